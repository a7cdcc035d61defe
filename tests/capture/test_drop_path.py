"""Stochastic depth of transformers: layers with a rate each are one program, and draw what they draw without a loop."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import torch_shard as ts
from tests.oracles.steps import anew, sgd_step
from tests.tables.cases import chosen

SAME = 1e-5  # the same numbers are drawn; float32 sums of some hundred terms are in another order

KINDS: dict[str, dict[str, Any]] = {
    # with a layer scale of 1, not of 1e-6 as by default, and large weights: a dropped branch shows in float32
    "ConvNext": {
        "depths": [1, 4],
        "hidden_sizes": [4, 8],
        "num_stages": 2,
        "layer_scale_init_value": 1.0,
        "initializer_range": 0.3,
    },
    "Swin": {"image_size": 32, "embed_dim": 8, "depths": [2, 4], "num_heads": [2, 2], "window_size": 2},
}


def _drops(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(num_labels=4, drop_path_rate=0.5, **{**KINDS[kind], **more})
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def _dropping_step(model: nn.Module, scan: Any, num_devices: int = 8) -> tuple[ts.TrainStep, Any]:
    torch.manual_seed(1)
    batch = torch.randn(8, 3, 32, 32), torch.randint(4, (8,))
    loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).logits, batch[1])  # noqa: E731
    return sgd_step(model, loss_fn, (num_devices, 1), scan_layers=scan), batch


def _losses(step: ts.TrainStep, batch: Any, num_steps: int) -> list[float]:
    state, losses = anew(step, _drops("ConvNext")).init(seed=0), []
    for _ in range(num_steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("kind", chosen(KINDS, ["ConvNext"]))
def test_layers_with_rates_of_their_own_are_one_loop(kind: str) -> None:
    model = _drops(kind)
    looped, batch = _dropping_step(model, True)
    if kind != "ConvNext":
        looped.prove(looped.init(seed=0), batch).raise_if_different()
        assert looped.programs[0].loops
        return
    losses = _losses(looped, batch, 2)
    assert looped.programs[0].loops
    unrolled, _ = _dropping_step(model, False)
    assert losses == pytest.approx(_losses(unrolled, batch, 2), rel=SAME)
    layer = model.get_submodule("convnext.encoder.stages.1.layers.3.drop_path")
    assert 0 < layer.drop_prob <= 0.5
    layer.drop_prob = 1 - 1e-3  # all eight rows lose the branch
    (changed,) = _losses(looped, batch, 1)
    assert abs(changed - losses[0]) > 1e-2, "the rate that was changed is that of another program"
    assert [changed] == pytest.approx(_losses(unrolled, batch, 1), rel=SAME)


def test_a_stage_that_its_windows_cover_sets_its_shift_at_the_first_call() -> None:
    model = _drops("Swin", depths=[2], num_heads=[2], window_size=8)
    shifts = [module for module in model.modules() if hasattr(module, "shift_size")]
    before = [module.shift_size for module in shifts]
    step, batch = _dropping_step(model, "auto", num_devices=1)
    step.prove(step.init(seed=0), batch).raise_if_different()
    assert [module.shift_size for module in shifts] == before  # what torch would have left is taken back
