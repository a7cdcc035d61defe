"""All that trains on the CPU compiles for TPUs, by TPU's own compiler, and exports for GPUs."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import CASE, Case, chosen, make_mesh


def structs(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.to("meta"), batch)


def make_step(case: Case, mesh: Any) -> ts.TrainStep:
    return step_of(case.model(), case.loss_fn, optax.adam(1e-2), mesh=mesh, plan=case.plan)


OFTEN = ("mlp", "lstm", "gpt", "resnet_train", "writes", "buffers")


@pytest.mark.parametrize("case", chosen([CASE[name] for name in OFTEN], [CASE["mlp"], CASE["lstm"]]))
def test_compiles_for_tpu(case: Case) -> None:
    step = make_step(case, ts.make_mesh(topology="v5e:2x2", batch=2, model=2))
    preview = step.preview(structs(case.batches(1)[0]))
    assert preview.fits()
    assert preview.cycles > 0
    assert preview.attributed >= 0.95


@pytest.mark.parametrize("case", [CASE["gpt"], CASE["lstm"], CASE["buffers"]], ids=str)
def test_exports_for_gpus(case: Case) -> None:
    exported = make_step(case, make_mesh((2, 2))).export_program(structs(case.batches(1)[0]))
    assert exported.platforms == ("cpu", "cuda", "tpu")


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_was_exported_runs_as_the_step_does(evaluates: bool) -> None:
    case = CASE["mlp"]
    train = make_step(case, make_mesh((4, 2)))
    step = train.evaluation() if evaluates else train
    batch, state = case.batches(1)[0], train.init(seed=0)
    read = jax.export.deserialize(step.export_program(batch, state, platforms=("cpu",)).serialize())
    given = jax.tree.map(jnp.copy, jax.tree.leaves((state, step.put(batch).arrays)))  # the step donates its own
    found = jax.jit(read.call)(given)
    wanted = jax.tree.leaves(step(state, batch))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = (
            jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (ours, theirs)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)  # other options of the compiler, other fusions
