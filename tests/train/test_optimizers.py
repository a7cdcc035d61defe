"""Optimizers of optax on a mesh: what they do unsharded."""

import optax
import pytest
import torch

import torch_shard as ts
from tests.tables.cases import CASE, chosen, make_step


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
