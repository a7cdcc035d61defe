"""Loss, every gradient, every updated parameter and buffer against eager torch, on every mesh, over several steps."""

import pytest

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import CASE, MESHES

NUM_STEPS = 3
PAIRS = [(name, (4, 2)) for name in CASE] + [("mlp", sizes) for sizes in MESHES if sizes != (4, 2)]


@pytest.mark.parametrize(("name", "sizes"), PAIRS)
def test_steps_equal_eager_torch_on_every_mesh(name: str, sizes: tuple[int, int]) -> None:
    case = CASE[name]
    assert_follows(case, case.model(), eager_trajectory(case, NUM_STEPS), sizes)
