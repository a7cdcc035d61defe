"""Dtypes of eager results on the jax device, for pairs of dtypes and ranks: those of torch, with its values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_shard  # noqa: F401  (it registers the device)

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.bfloat16)

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}  # JAX holds 32 bits while x64 is off

# tests/lowering/test_pointwise.py has sums, selections and concatenations, of more pairs.
BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "div": lambda x, y: x / y,
    "floor_divide": lambda x, y: x // y,
    "pow": lambda x, y: x**y,
    "gt": lambda x, y: x > y,
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
}

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(0),
    "mean": torch.mean,
    "exp": torch.exp,
    "argmax": torch.argmax,
    "softmax": lambda x: x.softmax(0),
    "softmax in float32": lambda x: x.softmax(0, dtype=torch.float32),
}

SCALARS = (True, 2, 2.5)


def check(fn: Callable[..., Any], *args: Any) -> None:
    """See that a function gives on the jax device what it gives on the CPU, if it gives anything there."""
    try:
        wanted = fn(*args)
    except (RuntimeError, TypeError):
        return
    found = fn(*(arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args))
    what = [(arg.dtype, arg.ndim) if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert found.dtype == NARROW.get(wanted.dtype, wanted.dtype), what
    assert found.shape == wanted.shape, what
    # operators of half precision round at other places
    close = {"rtol": 2e-2, "atol": 2e-2} if found.dtype in (torch.float16, torch.bfloat16) else {"rtol": 1e-4}
    torch.testing.assert_close(
        found.cpu(), wanted.to(found.dtype), **{"atol": 1e-4, **close}, msg=lambda m: f"{what}: {m}"
    )


def values(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return torch.tensor([1, 3, 2, 1][: 4 if rank else 1]).reshape((4,) if rank else ()).to(dtype)


PAIRS = (
    *((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.bfloat16)),
    *((torch.int8, torch.float32), (torch.int32, torch.bfloat16), (torch.int8, torch.int32)),
    *((torch.uint8, torch.int8), (torch.bool, torch.int8)),
)


@pytest.mark.parametrize("name", BINARY)
def test_pairs_of_tensors(name: str) -> None:
    for pair in PAIRS:
        for first, second in (pair, pair[::-1]):
            check(BINARY[name], values(first, 1), values(second, 0))
        check(BINARY[name], values(pair[0], 0), values(pair[1], 1))
        check(BINARY[name], values(pair[0], 1), values(pair[1], 1))


@pytest.mark.parametrize("name", sorted(BINARY.keys() - {"lerp"}))
def test_numbers_of_python(name: str) -> None:
    for dtype in DTYPES:
        for scalar in SCALARS:
            for rank in (0, 1):
                if name == "pow" and scalar is True and dtype is torch.bool:
                    continue  # of which PyTorch says int64 on meta tensors, and has bool
                check(BINARY[name], values(dtype, rank), scalar)
                if name in ("div", "pow"):
                    check(BINARY[name], scalar, values(dtype, rank))


@pytest.mark.parametrize("name", UNARY)
def test_one_tensor(name: str) -> None:
    for dtype in DTYPES:
        check(UNARY[name], values(dtype, 1))


def test_a_number_on_the_cpu_meets_a_tensor_of_the_device() -> None:
    x = torch.ones(4, dtype=torch.bfloat16, device="jax")
    assert (x * torch.tensor(2.0)).dtype == torch.bfloat16
    assert (x * torch.ones((), device="jax")).dtype == torch.bfloat16


def test_short_integers_wrap_around() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16):
        check(lambda x, dtype=dtype: x.to(dtype), torch.tensor([-1.5, 300.0, 40000.0]))
        check(lambda x, dtype=dtype: torch.empty(2, dtype=dtype, device=x.device).copy_(x), torch.tensor([-1.5, 300.0]))


def test_out_keeps_its_shape_and_a_sum_is_in_its_dtype() -> None:
    x = torch.tensor([[1.7, 2.7, -0.5]] * 2)
    check(lambda x: torch.sum(x, 1, out=torch.empty(2, dtype=torch.int32, device=x.device)), x)
    with pytest.raises(NotImplementedError, match=r"out has shape \(4, 3\), the result \(3,\)"):
        torch.add(x[0].to("jax"), 1, out=torch.empty(4, 3, device="jax"))


def test_a_result_that_does_not_fit_where_it_is_written() -> None:
    for device in ("cpu", "jax"):
        x = torch.ones(4, dtype=torch.int32, device=device)
        with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Int"):
            x.mul_(1.5)
        with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Int"):
            torch.add(x, 0.5, out=x)
        assert torch.equal(x.cpu(), torch.ones(4, dtype=torch.int32))
        half = torch.ones(4, dtype=torch.bfloat16, device=device)
        half.mul_(torch.full((4,), 0.5, device=device))
        assert half.dtype == torch.bfloat16
        assert half.tolist() == [0.5] * 4
