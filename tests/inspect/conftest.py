"""A mesh for all drawings."""

import pytest

import torch_shard as ts


@pytest.fixture
def mesh():
    return ts.make_mesh(batch=4, model=2)
