"""Layers that are alike, and whose entries are stored together."""

from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import make_mesh
from torch_shard._entries import holdings
from torch_shard._scan.siblings import find_siblings, stack_layout


def grouped(model: nn.Module, rules: Any = None) -> set[tuple[str, ...]]:
    plan = ts.ShardingPlan(rules or {}, default=P()).resolve(model, make_mesh((4, 2)))
    specs = {name: sharding.spec for name, sharding in plan.items()}
    layout = stack_layout(model, holdings(model).all, find_siblings(model, specs, least=2))
    assert layout.names == tuple(holdings(model).all)
    return {group for group in layout.groups if len(group) > 1}


def both(*keys: str, at: tuple[str, ...] = ("0", "1")) -> set[tuple[str, ...]]:
    return {tuple(f"{i}.{key}" for i in at) for key in keys}


def test_alike_children_are_grouped_whatever_stands_between() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4))
    assert grouped(model) == both("weight", "bias", at=("0", "2", "4"))


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "spec", "class", "bias", "buffer"])
def test_children_that_differ_are_not(what: str) -> None:
    model, rules = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), {}
    if what == "shape":
        model[2] = nn.Linear(4, 8)
    elif what == "dtype":
        model[2].bfloat16()
    elif what == "frozen":
        model[2].bias.requires_grad_(False)
    elif what == "spec":
        rules = {"2.bias": P("model")}
    elif what == "class":
        model[2] = type("Other", (nn.Linear,), {})(4, 4)
    elif what == "bias":
        model[2] = nn.Linear(4, 4, bias=False)
    else:
        model[2].register_buffer("extra", torch.ones(2))
    assert grouped(model, rules) == both("weight", "bias")


def test_a_spec_with_nones_at_its_end_is_the_same_spec() -> None:
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert grouped(model, {"0.weight": P("model"), "1.weight": P("model", None)}) == both("weight", "bias")


def test_ties_stand_alone() -> None:
    shared = nn.Linear(4, 4)
    assert grouped(nn.ModuleList([shared, shared])) == set()
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model[0].weight = model[1].weight = model[2].weight
    assert grouped(model) == both("bias", at=("0", "1", "2"))


def test_nested_containers_are_grouped_at_the_outermost() -> None:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))

    assert grouped(nn.ModuleList([stage(4), stage(4)])) == both("0.weight", "1.weight")
    assert grouped(nn.ModuleList([stage(4), stage(8)])) == {
        ("0.0.weight", "0.1.weight"),
        ("1.0.weight", "1.1.weight"),
    }


def test_kinds_of_buffers_and_empty_places() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.Identity(), nn.BatchNorm1d(4)])
    found = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert grouped(model) == both(*found, at=("0", "2"))
