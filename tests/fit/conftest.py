"""One step for all tests of the loop."""

import pytest

from tests.oracles.steps import anew
from tests.tables.runs import make_model, make_step


@pytest.fixture(scope="session")
def compiled():
    return make_step(4, 2)


@pytest.fixture
def step(compiled):
    """It begins each test with the first values."""
    return anew(compiled, make_model())
