"""Mamba-2's fused projection in parts: the numbers of eager torch, and no product of all parts."""

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._lowering.ops import mamba2

transformers = pytest.importorskip("transformers")

LENGTH, WIDTH, HEADS, STATE = 24, 16, 4, 5


def fused(num_groups: int = 1) -> int:
    """Features of gate and values, of B and C, and of the steps."""
    return 2 * 2 * WIDTH + 2 * num_groups * STATE + HEADS


def model(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    own = {"num_heads": HEADS, "head_dim": 2 * WIDTH // HEADS, "state_size": STATE, "n_groups": 1, "chunk_size": 8}
    config = transformers.Mamba2Config(hidden_size=WIDTH, vocab_size=32, num_hidden_layers=1, **own | sizes)
    return transformers.Mamba2ForCausalLM(config)


def split_step(of: nn.Module) -> ts.TrainStep:
    mesh = ts.make_mesh(batch=4, model=2)
    loss_fn = lambda model, batch: model(**batch, use_cache=False).loss  # noqa: E731
    return step_of(of, loss_fn, mesh=mesh, plan=ts.plans.fsdp_tp(of, mesh))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (8, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, -5:] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def test_a_mixer_in_parts_equals_eager_torch() -> None:
    step = split_step(model(use_bias=True, n_groups=2))
    assert f"8x{LENGTH}x{fused(2)}x" not in step.lower(step.structs, batch()).as_text()
    step.prove(step.init(), batch()).raise_if_different()


def test_a_projection_with_hooks_is_called_as_a_module() -> None:
    of, seen = model(), set[tuple[int, ...]]()
    for layer in of.backbone.layers:
        layer.mixer.in_proj.register_forward_hook(lambda module, args, out: seen.add(tuple(out.shape)))
    step = split_step(of)
    step.lower(step.structs, batch())
    assert seen == {(8, LENGTH, fused())}


def test_another_source_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mamba2._CALLED, "mamba2_chunk_scan", "00000000")
    step = split_step(model())
    assert f"8x{LENGTH}x{fused()}x" in step.lower(step.structs, batch()).as_text()
