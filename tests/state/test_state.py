"""`step.init`: the state takes over the values of the model, which are then those of the run, without a second copy."""

import copy
import gc
import html
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_close, assert_follows, eager_trajectory
from tests.oracles.steps import sgd_step, step_of
from tests.tables.cases import CASE, WHOLE, Case, make_mesh, regression
from tests.tables.layers import WIDTH, Stack
from torch_shard._common.specs import describe_spec
from torch_shard._device import JaxTensor
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
def test_the_model_has_the_values_of_the_last_state(born: bool) -> None:
    case = CASE["tied" if born else "frozen"]
    plain = case.model()
    model = ts.materialize(case.build, make_mesh((4, 2)), case.plan) if born else case.model()
    model.load_state_dict(plain.state_dict())
    trajectory = eager_trajectory(case, 2)
    assert_follows(case, model, trajectory, (4, 2))
    assert [(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in plain.named_parameters()
    ]
    for name, parameter in model.named_parameters():
        assert (type(parameter), parameter.device.type) == (JaxTensor, "jax")
        assert_close(parameter.detach().cpu(), trajectory[-1]["held"][name], 10 * case.rtol, 2e-6, name)


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
    state = step.init(seed=0)
    assert all(total <= held + size for total, size in seen)  # a stack beside the rows that it was made of
    assert max(total for total, _ in seen) <= held * 1.5  # the largest stack is half of it
    assert num_bytes() - baseline == num_bytes(jax.tree.leaves(state)) - held
    assert len(state.params) == len(dict(model.named_parameters()))


def test_what_comes_after() -> None:
    case = CASE["tied"]
    model = ts.materialize(case.build, make_mesh((4, 2)), case.plan)
    step = make_step(model, case)
    first, second = case.batches(2)
    state, _ = step(step.init(seed=0), first)
    assert model.encode.weight is model.again.weight is model.extra
    exported = step.export(state)
    wanted = case.loss_fn(exported, second).item()
    for again in (make_step(model, case), step):  # each goes on from the present values
        state, metrics = again(again.init(seed=0), second)
        assert int(state.step) == 1
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
        model.load_state_dict(exported.state_dict())
    model.encode.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of extra has changed"):
        step(state, first)


def test_entries_that_lie_in_one_place_get_one_each() -> None:
    """On the jax device `load_state_dict` shares arrays, which XLA must not be given twice."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    ts.place(model, make_mesh((4, 2)), WHOLE)[1].load_state_dict(model[0].state_dict())
    model.register_buffer("before", model[0].weight.detach().clone())
    plain = ts.gather(copy.deepcopy(model))
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    step = sgd_step(model, loss_fn, (4, 2))
    state, batch = step.init(seed=0), torch.randn(8, 8)
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


def test_notebooks_show_a_step_and_what_its_state_stores() -> None:
    step = make_step((case := CASE["mlp"]).model(), case)
    state = step.init(seed=0)
    shown = html.unescape(re.sub("<[^>]*>", "", step._repr_html_()))
    assert [line.rstrip() for line in shown.splitlines()] == [repr(step), "Nothing was compiled yet."]
    state, _ = step(state, case.batches(1)[0])
    shown = html.unescape(re.sub("<[^>]*>", "", step._repr_html_()))
    assert step.report() in re.sub(r" +\n", "\n", shown)
    lines = html.unescape(re.sub("<[^>]*>", "", state._repr_html_())).splitlines()
    assert lines[0].rstrip() == repr(state)
    found = {line.split()[0]: line for line in lines[1:] if line.strip()}
    for name, array in state.params.items():
        assert all(part in found[name] for part in (str(array.shape), "float32", describe_spec(array.sharding.spec)))
    donated = state
    step(state, case.batches(1)[0])
    assert "donated" in donated._repr_html_()
    many = step_of(nn.Sequential(*map(nn.Linear, range(1, 15), range(2, 16)))).init()
    assert "and 12 more" in many._repr_html_()
    layers = step_of(Stack()).init()
    assert "blocks.*." in layers._repr_html_()
