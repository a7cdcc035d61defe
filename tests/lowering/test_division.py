"""Division with a rounding mode against eager torch, over signs, dtypes, numbers and zero divisors."""

import itertools

import pytest
import torch

import torch_shard as ts

INTEGERS = torch.tensor([7, -7, 6, -6, 1, 0])
FLOATS = torch.tensor([7.5, -7.5, 0.3, -0.3, 1e6, 0.0])
DIVISORS = [2, -3, 2.0, -0.1, torch.tensor([2, -2, 3, -3, 1, 5]), torch.tensor([2.0, -2.0, 0.1, 0.0, -0.7, 0.0])]


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize(("x", "y"), [*itertools.product([INTEGERS, FLOATS], DIVISORS)])
def test_division_equals_torch(x: torch.Tensor, y: torch.Tensor | float, mode: str | None) -> None:
    wanted = torch.div(x, y, rounding_mode=mode)
    found = ts.jax_jit(lambda x: torch.div(x, y, rounding_mode=mode))(x).cpu()
    assert found.dtype.is_floating_point == wanted.dtype.is_floating_point  # JAX's integers have 32 bits
    torch.testing.assert_close(found.to(wanted.dtype), wanted, equal_nan=True)
