"""What torch asks of a device type."""

import pytest
import torch

import torch_shard as ts
from tests.device.test_tensor import assert_same


def test_modes_of_torchax_are_accepted() -> None:
    ts.enable_globally()
    with ts.jax_device():
        assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))
    ts.disable_globally()
    assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_the_state_of_the_generator_comes_back_for_each_seed_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    first = torch.rand(2, device="jax")
    state = torch.jax.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    assert state.dtype == torch.uint8
    second = torch.rand(2, device="jax")
    assert not torch.equal(first.cpu(), second.cpu())
    torch.jax.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(torch.rand(2, device="jax").cpu(), second.cpu())
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(2, device="jax").cpu(), first.cpu())
