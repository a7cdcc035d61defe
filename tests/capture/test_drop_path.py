"""Stochastic depth of transformers: layers with a rate each are one program, and draw what they draw without a loop."""

from typing import Any

import optax
import pytest
import torch
import transformers
from torch import nn

import torch_shard as ts


def _drops(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    few: dict[str, Any] = {"num_labels": 4, "drop_path_rate": 0.5}
    if kind == "Swin":
        few |= {"image_size": 32, "embed_dim": 8, "depths": [2, 6], "num_heads": [2, 2], "window_size": 2}
    elif kind == "ConvNext":
        few |= {"depths": [1, 6], "hidden_sizes": [8, 16], "num_stages": 2}
    else:
        few |= {"image_size": 32, "patch_size": 16, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        few |= {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    few |= more
    return getattr(transformers, f"{kind}ForImageClassification")(getattr(transformers, f"{kind}Config")(**few))


def _dropping_step(model: nn.Module, scan: Any) -> tuple[ts.TrainStep, Any]:
    torch.manual_seed(1)
    batch = torch.randn(8, 3, 32, 32), torch.randint(4, (8,))
    mesh = ts.make_mesh(batch=8)
    step = ts.make_train_step(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]).logits, batch[1]),
        optax.sgd(0.1),
        mesh=mesh,
        plan=ts.plans.replicated(),
        scan_layers=scan,
    )
    return step, batch


@pytest.mark.parametrize("kind", ["Swin", "ConvNext", "Beit"])
def test_layers_with_rates_of_their_own_are_one_loop(kind: str) -> None:
    model, losses = _drops(kind), []
    for scan in (True, False):
        step, batch = _dropping_step(model, scan)
        state = step.init(seed=0)
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        if scan:
            step.prove(step.init(seed=0), batch).raise_if_different()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)  # the same numbers are drawn; sums are in another order


def test_a_rate_that_is_changed_makes_another_program() -> None:
    model = _drops("ConvNext")
    step, batch = _dropping_step(model, True)
    step(step.init(seed=0), batch)
    layer = model.get_submodule("convnext.encoder.stages.1.layers.3.drop_path")
    layer.drop_prob = 0.9
    _, changed = step(step.init(seed=0), batch)
    fresh, _ = _dropping_step(model, False)
    assert float(changed["loss"]) == pytest.approx(float(fresh(fresh.init(seed=0), batch)[1]["loss"]), rel=1e-6)
    layer.drop_prob = 0.01
    other, _ = _dropping_step(model, False)
    assert float(changed["loss"]) != float(other(other.init(seed=0), batch)[1]["loss"])


def test_a_stage_that_its_windows_cover_sets_its_shift_at_the_first_call() -> None:
    model = _drops("Swin", depths=[2, 2], window_size=4)
    shifts = [module for module in model.modules() if hasattr(module, "shift_size")]
    before = [module.shift_size for module in shifts]
    step, batch = _dropping_step(model, "auto")
    step.prove(step.init(seed=0), batch).raise_if_different()
    assert [module.shift_size for module in shifts] == before  # what torch would have left is taken back
