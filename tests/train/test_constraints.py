"""Which values a step says that it lays out; the oracle is the program that it lowers to."""

import re
from typing import Any

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of

ROWS, WIDTH, HIDDEN = 16, 8, 24


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def make_step(**options: Any) -> ts.TrainStep:
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
    plan = ts.ShardingPlan(
        {"0.weight": P("model", "batch"), "2.weight": P("batch", "model")},
        default=P(),
        activations={"2": P("batch", "model")},
    )
    return step_of(model, loss_fn, optax.sgd(0.1), mesh=ts.make_mesh(batch=4, model=2), plan=plan, **options)


def lowered(step: ts.TrainStep) -> set[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and axes of each value that the program constrains."""
    text = step.lower(step.structs, torch.empty(ROWS, WIDTH, device="meta")).as_text()
    pattern = r"sdy\.sharding_constraint .*?<@\w+, \[(.*?)\]> : tensor<([\dx]+)xf32>"
    found = re.findall(pattern, text)
    return {(tuple(map(int, shape.split("x"))), tuple(re.findall(r"\{(.*?)\}", dims))) for dims, shape in found}


def as_text(value: ts.ConstrainedValue) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The same of a value, as the program writes it: `?` for what the compiler chooses."""

    def part(dim: int) -> str:
        if dim >= len(value.spec) or value.spec[dim] is None:
            return ""
        given: Any = value.spec[dim]
        if given is P.UNCONSTRAINED:
            return "?"
        return ", ".join(f'"{axis}"' for axis in ((given,) if isinstance(given, str) else given))

    return value.shape, tuple(map(part, range(len(value.shape))))


def test_the_program_has_what_the_step_says():
    step = make_step()
    found = step.constraints(torch.empty(ROWS, WIDTH, device="meta"))
    assert {value.why for value in found.values} == {"rows stay split", "the plan's activations"}
    assert {as_text(value) for value in found.values} <= lowered(step)
    assert [(v.value, v.shape, v.axes) for v in found.of("0") if not v.is_backward] == [
        ("addmm", (ROWS, HIDDEN), "0: batch")
    ]
    assert "the plan's activations" in str(found)


def test_what_a_step_leaves_to_the_compiler_is_not_in_it():
    """The plan's own rule for module 2 stays."""
    found = make_step(split_activations=False).constraints(torch.empty(ROWS, WIDTH, device="meta"))
    assert {value.module for value in found.values} == {"2"}
    assert {value.why for value in found.values} == {"the plan's activations"}


@pytest.mark.parametrize("scan_layers", [True, False])
def test_layers_that_are_alike_are_one_line(scan_layers: bool):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    mesh = ts.make_mesh(batch=8)
    plan = ts.ShardingPlan({"*.0.weight": P("batch")}, default=P())
    step = step_of(model, loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan, scan_layers=scan_layers)
    found = step.constraints(torch.empty(ROWS, WIDTH, device="meta"))
    assert [(v.value, v.count) for v in found.of("1.0") if not v.is_backward] == [("addmm", 3)]


def test_a_preview_says_it_beside_the_collectives():
    preview = make_step().preview(torch.empty(ROWS, WIDTH, device="meta"))
    (module,) = (module for module in preview.modules if module.path == "2")
    assert "the plan's activations" in module.constrained
