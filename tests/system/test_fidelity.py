"""Loss, every gradient, every updated parameter and buffer against eager torch, on every mesh, over several steps."""

from typing import Any

import pytest
import torch

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import CASES, MESHES, Case, chosen

NUM_STEPS = 3


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case) -> torch.nn.Module:
    """One model for all meshes."""
    return case.model()


@pytest.fixture(scope="module")
def trajectory(case: Case) -> list[dict[str, Any]]:
    """What eager torch does."""
    return eager_trajectory(case, NUM_STEPS)


@pytest.mark.parametrize("sizes", chosen(MESHES, [(4, 2), (1, 8)]))
def test_steps_equal_eager_torch_on_every_mesh(case: Case, model: Any, trajectory: Any, sizes: Any) -> None:
    assert_follows(case, model, trajectory, sizes)
