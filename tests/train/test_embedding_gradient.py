"""The gradient of an embedding that FSDP splits: eager torch's, and in no device whole."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import step_of

D, LENGTH = 16, 6


class Words(nn.Module):
    """A table and a layer."""

    def __init__(self, vocab: int = 16, **options: Any) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(vocab, D, **options), nn.Linear(D, D)  # pyright: ignore

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.up(self.words(tokens).tanh())


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return 5 * model(tokens).square().sum(-1).mean()  # so that an update shows as much of the gradient


def split(model: nn.Module, axes: dict[str, Any]) -> dict[str, Any]:
    """A mesh and a plan."""
    mesh = ts.make_mesh(**axes)
    plan = ts.plans.fsdp_tp(model, mesh) if "model" in axes else ts.plans.fsdp(model, mesh)
    return {"mesh": mesh, "plan": plan}


ALONE, BOTH = {"batch": 8}, {"batch": 4, "model": 2}


@pytest.mark.parametrize(("axes", "options"), [(ALONE, {}), (BOTH, {"padding_idx": 3, "scale_grad_by_freq": True})])
def test_it_is_torchs(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, tokens = Words(**options), torch.randint(0, 9, (8, LENGTH))  # few of the words, each many times
    close = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums of at most 48 rows in another order
    agrees_with_torch(model, loss_fn, [tokens], **split(model, axes), **close)


@pytest.mark.parametrize(("axes", "options"), [(ALONE, {}), (BOTH, {"scale_grad_by_freq": True})])
def test_no_device_has_the_whole_of_it(axes: dict[str, int], options: dict[str, Any]) -> None:
    """Where there are more tokens than it has rows, but fewer of each device."""
    vocab, rows = 1024, 256
    with torch.device("meta"):
        model, batch = Words(vocab=vocab, **options), torch.empty(rows, LENGTH, dtype=torch.long)
    preview = step_of(model, loss_fn, **split(model, axes)).preview(batch)
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
