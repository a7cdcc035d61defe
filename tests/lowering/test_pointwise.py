"""Casts, totals, division and extremes against eager torch, and dtypes by its rules."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import torch_shard as ts

NAN = float("nan")

INPUTS = {
    "floats": torch.tensor([[1.0, 3.0, 3.0], [-2.0, -5.0, -2.0]]),
    "nan": torch.tensor([[1.0, NAN, 3.0], [NAN, 0.0, NAN]]),
    "integers": torch.tensor([[1, 3, 3], [-2, -5, -2]]),
    "booleans": torch.tensor([[False, True, True], [True, True, False]]),
    "scalar": torch.tensor(2.0),
}


@pytest.mark.parametrize("pick", [torch.max, torch.min])
def test_values_and_places(pick) -> None:
    calls = [
        (name, dim, keepdim) for name, x in INPUTS.items() for dim in range(x.ndim) or [0] for keepdim in (False, True)
    ]

    def picked(inputs: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        return [list(pick(inputs[name], dim, keepdim=keepdim)) for name, dim, keepdim in calls]

    for call, found, wanted in zip(calls, ts.jax_jit(picked)(INPUTS), picked(INPUTS), strict=True):
        for a, b in zip(found, wanted, strict=True):
            is_place = ts.jax_view(a).dtype == "int32"
            torch.testing.assert_close(
                a.cpu(), b, equal_nan=True, check_dtype=not is_place, msg=lambda text, call=call: f"{call}: {text}"
            )


@pytest.mark.parametrize("pick", [torch.max, torch.min])
def test_the_gradient_goes_to_the_place(pick) -> None:
    x = INPUTS["floats"].clone().requires_grad_()
    pick(x, 1).values.square().sum().backward()
    found = ts.jax_grad(lambda x: pick(x, 1).values.square().sum())(INPUTS["floats"])
    torch.testing.assert_close(found.cpu(), x.grad)


CASTS: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: torch.tensor([300.0, -3.0, 1.5]).to(torch.uint8),
    "int8": lambda: torch.tensor([300.0, -3.0, 1.5]).to(torch.int8),
    "int16": lambda: torch.tensor([40000.0, -3.0, 1.5]).to(torch.int16),
    "bool": lambda: torch.tensor([0.0, -0.0, 0.5, torch.nan]).bool(),
    "complex to real": lambda: torch.tensor([1 + 2j, 2j]).real,
    "cumsum of uint8": lambda: torch.full((3,), 200, dtype=torch.uint8).cumsum(0).int(),
    "cumsum of bool": lambda: torch.tensor([[True, False, True]]).cumsum(-1).int(),
    "cumprod of int8": lambda: torch.full((3,), 20, dtype=torch.int8).cumprod(0).int(),
    "mean in a dtype": lambda: torch.full((4,), 60000.0, dtype=torch.float16).mean(dtype=torch.float32),
    "mean of rows in a dtype": lambda: torch.full((2, 4), 60000.0, dtype=torch.float16).mean(1, dtype=torch.float32),
    "sum in a dtype": lambda: torch.full((4,), 60000.0, dtype=torch.float16).sum(dtype=torch.float32),
    "sum of rows in a dtype": lambda: torch.full((2, 4), 60000.0, dtype=torch.float16).sum(-1, dtype=torch.float32),
    "sum of what is cut": lambda: torch.tensor([1.7, 2.7, -0.5]).sum(dtype=torch.int32),
    "nansum in a dtype": lambda: torch.full((4,), 60000.0, dtype=torch.float16).nansum(dtype=torch.float32),
    "mean of short numbers": lambda: torch.full((4,), 60000.0, dtype=torch.float16).mean(),
    "mean of whole numbers": lambda: torch.full((3,), 200, dtype=torch.uint8).mean(dtype=torch.float32),
    "cumsum in a dtype": lambda: torch.full((3,), 200, dtype=torch.uint8).cumsum(0, dtype=torch.float32),
    "bytes, resampled": lambda: F.interpolate(
        torch.full((1, 1, 4, 4), 200, dtype=torch.uint8), size=3, mode="bicubic", antialias=True
    ),
    "sum of bools": lambda: torch.tensor([True, False]) + torch.tensor([True, False]),
}


def test_conversions_and_totals_have_torchs_dtypes() -> None:
    for name, found in ts.jax_jit(lambda: {key: cast() for key, cast in CASTS.items()})().items():
        torch.testing.assert_close(
            found.cpu(), CASTS[name](), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


INTEGERS = torch.tensor([7, -7, 6, -6, 1, 0])

FLOATS = torch.tensor([7.5, -7.5, 0.3, -0.3, 1e6, 0.0])

DIVISORS = [2, -3, 2.0, -0.1, torch.tensor([2, -2, 3, -3, 1, 5]), torch.tensor([2.0, -2.0, 0.1, 0.0, -0.7, 0.0])]


DIVISIONS: dict[str, tuple[Callable[..., torch.Tensor], list[Any]]] = {
    "true": (torch.div, DIVISORS),
    "floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), DIVISORS),
    "trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), DIVISORS),
    "remainder": (torch.fmod, [*DIVISORS[:4], DIVISORS[4] % 7]),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_division_equals_torch(name: str) -> None:
    divide, divisors = DIVISIONS[name]

    def divided(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [divide(x, y) for x in inputs for y in divisors]

    pairs = itertools.product([INTEGERS, FLOATS], divisors)
    given = [INTEGERS, FLOATS]
    for pair, found, wanted in zip(pairs, ts.jax_jit(divided)(given), divided(given), strict=True):
        assert found.dtype.is_floating_point == wanted.dtype.is_floating_point, pair  # JAX's integers have 32 bits
        torch.testing.assert_close(
            found.cpu().to(wanted.dtype), wanted, equal_nan=True, msg=lambda text, pair=pair: f"{pair}: {text}"
        )


INF = float("inf")

ODD = torch.tensor([INF, NAN, 1.0, -INF, NAN, 0.0])

AT_ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "times a mask": lambda x: x * (x > 0),
    "a mask times": lambda x: (x == 0).mul(x.double()),
    "addcmul": lambda x: torch.addcmul(x[2:3], x, x > 0),
    "sign": torch.sign,
    "gradient of abs": lambda x: torch.func.grad(lambda x: x.abs().sum())(x),
    "gradient of amax": lambda x: torch.func.grad(lambda x: x.amax())(x),
    "cummax": lambda x: [*x.cummax(0)],
    "cummin": lambda x: [*torch.stack([x, x.flip(0)]).cummin(-1)],
}


@pytest.mark.parametrize("name", AT_ODD)
def test_infinities_and_nan(name: str) -> None:
    wanted = AT_ODD[name](ODD)
    for found in (AT_ODD[name](ODD.to("jax")), ts.jax_jit(AT_ODD[name])(ODD)):
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (found, wanted)), strict=True):
            torch.testing.assert_close(a.cpu(), b, equal_nan=True, check_dtype=False)


def test_integers_are_rolled() -> None:
    x = torch.arange(12).reshape(3, 4)
    assert torch.equal(ts.jax_jit(lambda x: x.roll((1, 2), (0, 1)))(x).cpu().long(), x.roll((1, 2), (0, 1)))


VALUES = {
    "float": torch.tensor([0.5, -2.0, 3.0]),
    "bfloat16": torch.tensor([0.5, -2.0, 3.0]).bfloat16(),
    "half": torch.tensor([0.5, -2.0, 3.0]).half(),
    "long": torch.tensor([1, 2, -3]),
    "byte": torch.tensor([250, 2, 3], dtype=torch.uint8),
    "bool": torch.tensor([True, True, True]),  # no zero, to divide by
    "scalar_float": torch.tensor(1.5),
    "scalar_long": torch.tensor(3),
    "complex": torch.tensor([1 + 1j, 2j, 3.0]),
}

PYTHON: dict[str, Any] = {"int": 2, "float": 1.5, "bool": True}

OPERATIONS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "eq": lambda a, b: a == b,
    "where": lambda a, b: torch.where(torch.tensor([True, False, True]), a, b),
    "cat": lambda a, b: torch.cat([torch.atleast_1d(a), torch.atleast_1d(torch.as_tensor(b))]),
}


@pytest.mark.parametrize(("operation", "x64"), [*((name, True) for name in OPERATIONS), ("add", False)])
def test_promotion_is_torchs(operation: str, x64: bool) -> None:
    """Every pair of kinds: value and dtype."""

    def apply(operation: Any, a: Any, b: Any) -> Any:
        try:
            return operation(a, b)
        except RuntimeError:
            return None

    pairs = [(a, b) for a in VALUES.values() for b in [*VALUES.values(), *PYTHON.values()]]
    run = lambda: [apply(OPERATIONS[operation], a, b) for a, b in pairs]  # noqa: E731
    with jax.enable_x64(x64):
        found = [None if out is None else out.cpu() for out in ts.jax_jit(run)()]
    for pair, out, wanted in zip(pairs, found, run(), strict=True):
        if wanted is not None:  # (a few pairs that torch refuses have a plain meaning: bool - float)
            assert out is not None, pair
            shorter = out.dtype is torch.int32 and not x64  # JAX holds torch's int64 in 32 bits then
            wanted = wanted.int() if shorter else wanted
            torch.testing.assert_close(out, wanted, rtol=ROUNDING.get(wanted.dtype, 1e-6), atol=0)


ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


WIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "number": lambda k, x: torch.stack([k / 10, k * 0.1, k + 0.1, 0.1 - k, (k > 2) * 0.1, k**0.5, 2.5**k]),
    "integers": lambda k, x: torch.stack([k / (k + 2), k.reciprocal(), k.sigmoid(), k.exp(), torch.atan2(k, k + 1)]),
    "sum": lambda k, x: k.sum() / 7,
    "both": lambda k, x: torch.stack([x**k, k / x, torch.where(k > 2, k, x), torch.lgamma(x), k.copysign(-k)]),
    "complex": lambda k, x: (torch.complex(x * 1.0, x) / k).abs() if x.dtype != torch.bfloat16 else x,
    "xlogy": lambda k, x: torch.stack([torch.xlogy(0.3, k), torch.xlogy(k - 1, 0.3), torch.special.xlog1py(0.3, k)]),
}


@pytest.mark.parametrize("name", WIDE)
def test_integers_meet_numbers_in_the_default_dtype(name: str) -> None:
    fn = WIDE[name]
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.bfloat16, 2**-8)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with jax.enable_x64(dtype == torch.float64):
                k, x = torch.arange(1, 5), torch.tensor([0.1, 0.4, 0.7, 0.9])
                wanted = fn(k, x)
                for found in (ts.jax_jit(fn)(k, x).cpu(), fn(k.to("jax"), x.to("jax")).cpu()):
                    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        finally:
            torch.set_default_dtype(before)
