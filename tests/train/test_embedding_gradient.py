"""The gradient of an embedding that FSDP splits: eager torch's, and in no device whole."""

import math
import re
from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts

D, LENGTH = 16, 6


class Words(nn.Module):
    """A table and a layer."""

    def __init__(self, vocab: int = 16, **options: Any) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(vocab, D, **options), nn.Linear(D, D)  # pyright: ignore

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.up(self.words(tokens).tanh())


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().sum(-1).mean()


def make_step(model: nn.Module, axes: dict[str, Any]) -> ts.TrainStep:
    mesh = ts.make_mesh(**axes)
    plan = ts.plans.fsdp_tp(model, mesh) if "model" in axes else ts.plans.fsdp(model, mesh)
    return ts.make_train_step(model, loss_fn, optax.sgd(0.5), mesh=mesh, plan=plan)


ALONE, BOTH = {"batch": 8}, {"batch": 4, "model": 2}


@pytest.mark.parametrize(("axes", "options"), [(ALONE, {}), (BOTH, {"padding_idx": 3, "scale_grad_by_freq": True})])
def test_it_is_torchs(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, tokens = Words(**options), torch.randint(0, 9, (8, LENGTH))  # few of the words, each many times
    step = make_step(model, axes)
    state, _ = step(step.init(), tokens)
    loss_fn(model, tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted = parameter.detach() - 0.5 * parameter.grad
        # float32, sums of at most 48 rows in another order
        np.testing.assert_allclose(state.params[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("axes", "options"), [(ALONE, {}), (BOTH, {"scale_grad_by_freq": True})])
def test_no_device_has_the_whole_of_it(axes: dict[str, int], options: dict[str, Any]) -> None:
    """Where there are more tokens than it has rows, but fewer of each device."""
    vocab, rows = 1024, 256
    with torch.device("meta"):
        model, batch = Words(vocab=vocab, **options), torch.empty(rows, LENGTH, dtype=torch.long)
    preview = make_step(model, axes).preview(batch)
    assert preview.compiled is not None
    lines = (preview.compiled.as_text() or "").splitlines()
    tables = [
        math.prod(shape)
        for line in lines
        if "embedding_dense_backward" in line
        for dims in re.findall(r"f32\[([\d,]+)\]", line)
        if (shape := [int(size) for size in dims.split(",")])[0] in (vocab, vocab // 2)
    ]
    assert 0 < max(tables) <= vocab * D // axes["batch"]
