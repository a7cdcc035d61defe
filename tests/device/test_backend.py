"""What torch asks of a device type."""

import torch

import torch_shard as ts
from tests.device.test_tensor import assert_same


def test_modes_of_torchax_are_accepted() -> None:
    ts.enable_globally()
    with ts.jax_device():
        assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))
    ts.disable_globally()
    assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))
