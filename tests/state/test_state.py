"""`step.init(donate=True)`: the state takes over the values of the model, and no second copy of them exists."""

import copy
import gc
from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import sgd_step, step_of
from tests.tables.cases import CASE, WHOLE, Case, make_mesh, regression
from tests.tables.layers import WIDTH, Stack
from torch_shard._state import state as _state


def num_bytes(arrays: list[jax.Array] | None = None) -> int:
    """Of arrays, by default all that are alive, on all devices; memory that several arrays share counts once."""
    arrays = jax.live_arrays() if arrays is None else arrays
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return sum({(shard.device, shard.unsafe_buffer_pointer()): shard.nbytes for shard in shards}.values())


def make_step(model: torch.nn.Module, case: Case, **more: Any) -> ts.TrainStep:
    mesh = make_mesh((4, 2))
    return ts.make_train_step(model, case.loss_fn, optax.adam(1e-3), mesh=mesh, plan=case.plan, **more)


@pytest.mark.parametrize("born", [True, False], ids=["born sharded", "on the cpu"])
def test_donating_changes_no_number(born: bool) -> None:
    case = CASE["tied" if born else "frozen"]
    models = [ts.materialize(case.build, make_mesh((4, 2)), case.plan) if born else case.model() for _ in range(2)]
    steps = [make_step(model, case) for model in models]
    states = [step.init(seed=0, donate=donate) for step, donate in zip(steps, (True, False), strict=True)]
    names = [n for n, _ in models[0].named_parameters()]
    assert all(t.device.type == "meta" for t in (*models[0].parameters(), *models[0].buffers()))
    assert [(n, p.shape, p.requires_grad) for n, p in models[0].named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in models[1].named_parameters()
    ]
    for batch in case.batches(2):
        states = [steps[0](state, batch)[0] for state in states]  # one program for both
    one, other = (steps[0].export(state) for state in states)
    assert [n for n, _ in one.named_parameters()] == names
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_one_stored_array_more_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("stack", lambda: Stack(depth=6), regression(WIDTH, out=WIDTH), {"blocks.*.up.weight": P("model")})
    gc.collect()
    before = num_bytes()
    model = ts.materialize(case.build, make_mesh((4, 2)), case.plan)
    held = num_bytes() - before
    step = make_step(model, case)
    stored, seen = _state._placed, []

    def placed(*args: Any, **kwargs: Any) -> jax.Array:
        array = stored(*args, **kwargs)
        seen.append((num_bytes() - before, num_bytes([array])))
        return array

    monkeypatch.setattr(_state, "_placed", placed)
    baseline = num_bytes()
    state = step.init(seed=0, donate=True)
    assert all(total <= held + size for total, size in seen)  # a stack beside the rows that it was made of
    assert max(total for total, _ in seen) <= held * 1.5  # the largest stack is half of it
    assert num_bytes() - baseline == num_bytes(jax.tree.leaves(state)) - held
    assert len(state.params) == len(dict(model.named_parameters()))


def test_what_comes_after() -> None:
    case = CASE["tied"]
    model = ts.materialize(case.build, make_mesh((4, 2)), case.plan)
    step = make_step(model, case)
    state = step.init(seed=0, donate=True)
    assert model.encode.weight is model.again.weight is model.extra
    with pytest.raises(
        ValueError, match=r"went into an earlier state \(donate=True\)\. Go on with that state, or make a"
    ):
        step.init(seed=0)
    with pytest.raises(ValueError, match=r"init: extra, .* on the meta device.*materialize\(model, mesh, plan, init="):
        make_step(model, case).init(seed=0)
    again = make_step(step.export(state), case)
    _, metrics = again(again.init(seed=0), case.batches(1)[0])
    state, wanted = step(state, case.batches(1)[0])
    assert float(metrics["loss"]) == float(wanted["loss"])
    model.encode.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of extra has changed"):
        step(state, case.batches(1)[0])


@pytest.mark.parametrize("donate", [True, False])
def test_entries_that_lie_in_one_place_get_one_each(donate: bool) -> None:
    """On the jax device `load_state_dict` shares arrays, which XLA must not be given twice."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    ts.place(model, make_mesh((4, 2)), WHOLE)[1].load_state_dict(model[0].state_dict())
    model.register_buffer("before", model[0].weight.detach())
    plain = ts.gather(copy.deepcopy(model))
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    step = sgd_step(model, loss_fn, (4, 2))
    state, batch = step.init(seed=0, donate=donate), torch.randn(8, 8)
    for _ in range(2):
        state, _ = step(state, batch)
        plain.zero_grad()
        loss_fn(plain, batch).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
    found, wanted = step.export(state).state_dict(), plain.state_dict()
    for name in wanted:  # sums of 64 products in float32, in another order
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-5)


def test_a_buffer_that_cannot_be_an_array_is_named() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"adjacency: A torch.sparse_coo tensor cannot move to the jax device"):
        step_of(model, lambda model, x: model(model.adjacency @ x).mean()).init()
