"""Largest and smallest along a dim against eager torch: values, places among equals, NaN, dtypes, gradients."""

import pytest
import torch

import torch_shard as ts

NAN = float("nan")
INPUTS = {
    "floats": torch.tensor([[1.0, 3.0, 3.0], [-2.0, -5.0, -2.0]]),
    "nan": torch.tensor([[1.0, NAN, 3.0], [NAN, 0.0, NAN]]),
    "integers": torch.tensor([[1, 3, 3], [-2, -5, -2]]),
    "booleans": torch.tensor([[False, True, True], [True, True, False]]),
    "scalar": torch.tensor(2.0),
}


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("pick", [torch.max, torch.min])
def test_values_and_places(pick, name: str, keepdim: bool) -> None:
    x = INPUTS[name]
    for dim in range(x.ndim) or [0]:
        wanted = pick(x, dim, keepdim=keepdim)
        found = ts.jax_jit(lambda x, dim=dim: tuple(pick(x, dim, keepdim=keepdim)))(x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.cpu(), b, equal_nan=True, check_dtype=ts.jax_view(a).dtype != "int32")


@pytest.mark.parametrize("pick", [torch.max, torch.min])
def test_the_gradient_goes_to_the_place(pick) -> None:
    x = INPUTS["floats"].clone().requires_grad_()
    pick(x, 1).values.square().sum().backward()
    found = ts.jax_grad(lambda x: pick(x, 1).values.square().sum())(INPUTS["floats"])
    torch.testing.assert_close(found.cpu(), x.grad)
