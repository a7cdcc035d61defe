"""One step for all tests of the loop."""

import pytest

from tests.tables.runs import make_step


@pytest.fixture(scope="session")
def step():
    return make_step(4, 2)
