"""Hugging Face models as their users have them: loss, every gradient, every new value, against eager torch."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from tests.cases import Case
from tests.eager import assert_follows, eager_trajectory
from tests.hf_models import HF_MODELS

FIRST = [case for model in HF_MODELS for case in model.cases()[:1]]
OTHERS = [pytest.param(case, marks=pytest.mark.slow) for model in HF_MODELS for case in model.cases()[1:]]


@pytest.mark.parametrize("case", FIRST + OTHERS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    trajectory, model = eager_trajectory(case, num_steps=2), case.model()
    assert_follows(case, model, trajectory, (1, 1))
    assert_follows(case, model, trajectory, (4, 2))


@pytest.mark.parametrize("experts", [pytest.param(0, id="grouped_mm"), pytest.param(1, id="batched_mm")])
@pytest.mark.slow
def test_weights_over_both_axes_and_rows_over_one(experts: int) -> None:
    """The layout in which XLA's partitioner has given wrong gradients for a program of another tracer."""
    mixtral = next(model for model in HF_MODELS if model.name == "Mixtral")
    case = mixtral.cases()[experts]
    model = case.model()
    split = {name: P(("batch", "model")) for name, p in model.named_parameters() if p.shape[0] % 8 == 0}
    case = dataclasses.replace(case, rules=split)
    assert_follows(case, model, eager_trajectory(case, num_steps=2), (4, 2))
