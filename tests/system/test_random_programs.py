"""Some of the random programs of validation/fuzz: one on two axes of a mesh, and one on three."""

import pytest

from validation.fuzz.judge import judge
from validation.fuzz.programs import draw


@pytest.mark.parametrize("seed", [6, 15])
def test_a_program_is_right_or_refused(seed: int) -> None:
    verdict = judge(draw(seed))
    assert verdict.is_fine, verdict
