"""Optimizers of optax on a mesh: what they do unsharded."""

from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import CASE, make_mesh, make_step


def decays(params: dict) -> dict:
    return {name: "weight" in name for name in params}


OPTIMIZERS: dict[str, Any] = {
    "multi_transform": optax.multi_transform({True: optax.adamw(1e-2), False: optax.sgd(1e-2, momentum=0.9)}, decays),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "multi_steps of the loss": optax.MultiSteps(optax.polyak_sgd(), 2),
    "lbfgs": optax.lbfgs(1e-2, linesearch=None),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_optax_do_what_they_do_unsharded(name: str) -> None:
    case = CASE["mlp"]
    batches, found = case.batches(3), []
    for sizes in [(1, 1), (4, 2)]:
        step = make_step(case, sizes, OPTIMIZERS[name])
        state = step.init()
        for batch in batches:
            state, _ = step(state, batch)
        found.append(ts.gather(state.params))
        assert step.num_compiles == 1
    for parameter, value in found[0].items():
        torch.testing.assert_close(found[1][parameter], value, rtol=1e-4, atol=1e-5)


def test_the_state_of_an_optimiser_is_split_further_than_parameters() -> None:
    """ZeRO-1: each device updates its share, and the parameters are whole again."""
    case, mesh = CASE["mlp"], make_mesh((4, 2))
    model = case.model()
    moments = ts.plans.fsdp(model, mesh, fsdp=("batch", "model"))
    step = step_of(model, case.loss_fn, optax.adamw(1e-2), optimizer_plan=moments)
    state = step.init()
    step.prove(state, case.batches(1)[0]).raise_if_different()
    state, _ = step(state, case.batches(1)[0])
    first = state.opt_state[0].mu
    resolved = moments.resolve(model, mesh)
    for entry, array in state.params.items():
        assert array.sharding.is_fully_replicated, entry
        assert first[entry].sharding.shard_shape(array.shape) == resolved.entries[entry].local_shape, entry


def test_layers_whose_moments_are_split_differently_are_not_stored_together() -> None:
    mesh, model = make_mesh((4, 2)), nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    moments = ts.plans.fsdp(model, mesh) | {"3.0.weight": P()}
    step = step_of(model, optimizer=optax.adamw(1e-2), optimizer_plan=moments)
    state, _ = step(step.init(), torch.ones(8, 8))
    first = state.opt_state[0].mu
    assert first["3.0.weight"].sharding.is_fully_replicated
    assert not first["0.0.weight"].sharding.is_fully_replicated
    assert [len(group) for group in state.params.layout.groups if "0.0.weight" in group] == [3]


def test_moments_are_stored_in_the_form_of_their_parameters() -> None:
    """A plan for moments alone may be a recipe's, which keeps fused projections in pieces."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    moments = ts.ShardingPlan({"0.weight": P("model")}, default=P(), stored={"0.weight": ts.Pieces(3, dim=0)})
    step = step_of(model, optimizer=optax.adamw(1e-2), optimizer_plan=moments)
    step.prove(step.init(), torch.randn(8, 8)).raise_if_different()
    found = {leaf.sharding.spec for leaf in jax.tree.leaves(step.init().opt_state) if leaf.shape == (24, 8)}
    assert found == {P("model")}


@pytest.mark.parametrize(("form", "given"), [(ts.Pieces, ("3", 0)), (ts.Pieces, (3, 0.0)), (ts.Padded, (17.0, 0))])
def test_forms_are_of_whole_numbers(form: Any, given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"P\w+: \w+ must be a whole number, got"):
        form(*given)
