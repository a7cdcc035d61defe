"""Hugging Face models as their users have them: loss, every gradient, every new value, against eager torch."""

import pytest

pytest.importorskip("transformers", reason="of the extra `hf`")

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
