"""Models as people write them in plain torch, trained for some steps on one device and a mesh, against eager torch."""

import pytest

from tests.cases import Case
from tests.eager import assert_follows, eager_trajectory
from tests.models import MODELS


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    trajectory, model = eager_trajectory(case, num_steps=3), case.model()
    assert_follows(case, model, trajectory, (1, 1))
    assert_follows(case, model, trajectory, (4, 2))
