"""Optimizers of optax on a mesh: what they do unsharded."""

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.tables.cases import CASE, GPT, chosen, make_mesh, make_step


def decays(params: dict) -> dict:
    return {name: "weight" in name for name in params}


OPTIMIZERS = {
    "multi_transform": optax.multi_transform({True: optax.adamw(1e-2), False: optax.sgd(1e-2, momentum=0.9)}, decays),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), decays), optax.adam(1e-2)),
    "masked adamw": optax.masked(optax.adamw(1e-2), decays),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 2, 10), mask=decays),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", chosen(OPTIMIZERS, ("multi_transform", "multi_steps", "adafactor", "plateau")))
def test_optimizers_of_optax_do_what_they_do_unsharded(name: str) -> None:
    case = CASE["mlp"]
    model, batches = case.model(), case.batches(3)
    found = []
    for sizes in [(1, 1), (4, 2)]:
        step = make_step(case, sizes, OPTIMIZERS[name], model)
        state = step.init()
        for batch in batches:
            state, _ = step(state, batch)
        found.append(ts.gather(state.params))
        assert step.num_compiles == 1
    for parameter, value in found[0].items():
        torch.testing.assert_close(found[1][parameter], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", pytest.param("mlp", marks=pytest.mark.slow)])
def test_the_state_of_an_optimiser_is_split_further_than_parameters(name: str) -> None:
    """ZeRO-1: each device updates its share, and the parameters are whole again."""
    case, mesh = CASE[name], make_mesh((4, 2))
    model = case.model()
    moments = ts.plans.fsdp(model, mesh, fsdp=("batch", "model"))
    step = ts.make_train_step(
        model, case.loss_fn, optax.adamw(1e-2), mesh=mesh, plan=ts.plans.replicated(), optimizer_plan=moments
    )
    state = step.init()
    step.prove(state, case.batches(1)[0]).raise_if_different()
    state, _ = step(state, case.batches(1)[0])
    first = state.opt_state[0].mu
    resolved = moments.resolve(model, mesh)
    for entry, array in state.params.items():
        assert array.sharding.is_fully_replicated, entry
        assert first[entry].sharding.shard_shape(array.shape) == resolved.entries[entry].local_shape, entry


def test_layers_whose_moments_are_split_differently_are_not_stored_together() -> None:
    case, mesh, model = CASE["gpt"], make_mesh((4, 2)), GPT(num_layers=4)
    apart = next(name for name, p in model.named_parameters() if ".3." in name and p.ndim == 2)
    moments = ts.plans.fsdp(model, mesh) | {apart: P()}
    step = ts.make_train_step(
        model, case.loss_fn, optax.adamw(1e-2), mesh=mesh, plan=ts.plans.replicated(), optimizer_plan=moments
    )
    state, _ = step(step.init(), case.batches(1)[0])
    first = state.opt_state[0].mu
    assert first[apart].sharding.is_fully_replicated
    assert not first[apart.replace(".3.", ".0.")].sharding.is_fully_replicated
    sizes = sorted(len(group) for group in state.params.layout.groups if apart.replace(".3.", ".0.") in group)
    assert sizes == [3]
