"""Models as people write them in plain torch, trained for some steps on a mesh, against eager torch."""

import pytest

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import Case
from tests.tables.models import MODELS


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
