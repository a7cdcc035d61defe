"""The demo's text."""

import pytest

from torch_shard._demo.text import read_corpus


@pytest.fixture(scope="session")
def corpus():
    return read_corpus()
