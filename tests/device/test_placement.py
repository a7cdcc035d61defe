"""Entries onto the mesh and back."""

import weakref
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.device.test_tensor import assert_same
from tests.tables.cases import CASES, MESHES, make_mesh
from torch_shard._device import placement as _placement

GPT = next(case for case in CASES if case.name == "gpt")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_entry_lies_as_the_plan_says_and_comes_back(sizes: tuple[int, int]) -> None:
    model, mesh = GPT.model(), make_mesh(sizes)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    resolved = GPT.plan.resolve(model, mesh)
    assert ts.place(model, mesh, GPT.plan) is model
    for name, tensor in model.state_dict().items():
        array = tensor.jax()
        assert array.sharding == resolved[name]
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[name].numpy()[shard.index])
    assert model.head.weight is model.tokens.weight
    assert ts.gather(model) is model
    assert model.head.weight is model.tokens.weight
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, wanted[name])


def test_a_state_dict_is_placed_as_a_tree() -> None:
    mesh, tree = make_mesh((4, 2)), {"a": torch.arange(8.0).view(4, 2), "b": torch.arange(3)}
    placed = ts.place(tree, mesh, ts.ShardingPlan({"a": P("batch", "model")}, default=P()))
    assert placed["a"].jax().sharding.shard_shape((4, 2)) == (1, 1)
    back = ts.gather(placed)
    assert torch.equal(back["a"], tree["a"])
    assert torch.equal(back["b"], tree["b"].int())  # 64-bit integers are 32-bit in JAX
    tree["a"].zero_()
    assert float(placed["a"].sum()) == 28.0  # no memory is shared


def test_flags_and_non_persistent_buffers_survive() -> None:
    model = nn.BatchNorm1d(4)
    model.weight.requires_grad_(False)
    model.register_buffer("passing", torch.ones(2), persistent=False)
    ts.place(model, make_mesh((4, 2)), ts.ShardingPlan({}, default=P()))
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    assert isinstance(model.weight, nn.Parameter)
    assert "passing" not in model.state_dict()
    assert model.passing.device.type == "jax"


def test_only_one_entry_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an entry moves, all entries before it have let their CPU storage go, and none after it has an array."""
    model = GPT.model()
    names = [name for name, _ in model.named_parameters()]
    olds = [weakref.ref(p) for p in model.parameters()]
    seen: list[list[str]] = []

    def watching(value: Any, sharding: Any) -> Any:
        seen.append([n for n, p in model.named_parameters() if p.device.type == "jax"])
        assert [n for n, old in zip(names, olds, strict=True) if old() is None] == seen[-1]
        return put(value, sharding)

    put = _placement.put
    monkeypatch.setattr(_placement, "put", watching)
    ts.place(model, make_mesh((4, 2)), GPT.plan)
    assert seen == [names[:i] for i in range(len(names))]


def test_a_bad_plan_moves_nothing() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"dim 0 = 3 is not a multiple of model=2"):
        ts.place(model, make_mesh((4, 2)), ts.ShardingPlan({"weight": P("model")}, default=P()))
    assert model.weight.device.type == "cpu"


def test_computation_follows_the_placed_parameters() -> None:
    mesh, model = make_mesh((4, 2)), nn.Linear(8, 4, bias=False)
    x = torch.randn(8, 8)
    wanted = model(x)
    ts.place(model, mesh, ts.ShardingPlan({"weight": P("model")}))
    out = model(ts.place({"x": x}, mesh, ts.ShardingPlan({"x": P("batch")}))["x"])
    assert out.jax().sharding.spec == P("batch", "model")
    torch.testing.assert_close(out.cpu(), wanted)


def test_gather_of_a_training_state() -> None:
    tree = {"a": jax.numpy.ones(2), "rest": (torch.ones(1), 3, None)}
    found = ts.gather(tree)
    assert type(found["a"]) is torch.Tensor
    assert found["rest"][1:] == (3, None)


def test_a_model_without_values_is_refused_by_name() -> None:
    model, plan = nn.Linear(8, 4, device="meta"), ts.ShardingPlan({}, default=P())
    with pytest.raises(ValueError, match=r"place: weight, bias on the meta device.*materialize"):
        ts.place(model, make_mesh((4, 2)), plan)


def test_loading_a_state_dict_keeps_the_layout() -> None:
    plan = ts.ShardingPlan({"weight": jax.sharding.PartitionSpec("model")}, default=jax.sharding.PartitionSpec())
    model, source = nn.Linear(4, 4), nn.Linear(4, 4)
    ts.place(model, ts.make_mesh(batch=4, model=2), plan)
    layout = model.weight.sharding
    model.load_state_dict(source.state_dict())
    assert model.weight.sharding == layout
    assert_same(model.weight.detach(), source.weight.detach())
