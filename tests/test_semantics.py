"""Each thing that torch lets a forward do, trained for two steps on one device and a mesh, against eager torch."""

import itertools

import pytest

from tests import semantics
from tests.cases import Case
from tests.eager import assert_follows, eager_trajectory

ROWS = [
    *itertools.chain(semantics.AUTOGRAD, semantics.WRITES, semantics.STATE, semantics.PARAMETERS, semantics.CONTROL)
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_equals_eager_torch(case: Case) -> None:
    trajectory, model = eager_trajectory(case, num_steps=2), case.model()
    assert_follows(case, model, trajectory, (1, 1))
    assert_follows(case, model, trajectory, (4, 2))
