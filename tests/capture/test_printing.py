"""Tensors made into text in a capture: known values as they are, others described and warned of, or refused."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_shard as ts
from tests.oracles.errors import refuses

NAMED = r"(?s)test_printing\.py.*Here Python needs the value of a tensor.*\.item\(\)"


def doubled(use: Callable[[torch.Tensor], object]) -> torch.Tensor:
    def fn(x: torch.Tensor) -> torch.Tensor:
        use(x.sum())
        return x * 2

    return ts.jax_jit(fn)(torch.ones(3))


@pytest.mark.parametrize(
    "use",
    [print, str, repr, lambda x: f"{x}", "%s".__mod__, "{}".format, lambda x: logging.getLogger("t").error("%s", x)],
)
def test_a_tensor_without_a_value_is_described(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert doubled(use).tolist() == [2, 2, 2]
    said = [r.getMessage() for r in caplog.records if r.name.startswith("torch_shard")]
    assert any("test_printing.py" in text and "has no value while the program is made" in text for text in said)


def test_the_description_names_shape_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    doubled(lambda x: print("sum", x))  # noqa: T201
    assert capsys.readouterr().out == "sum tensor(..., size=(), dtype=torch.float32)\n"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("use", [lambda x: f"{x:.3f}", "{:.2f}".format, "%f".__mod__, "%d".__mod__])
def test_a_number_with_a_format_is_refused_by_line(use: Any) -> None:
    with refuses(NAMED, NotImplementedError):
        doubled(use)


def test_a_refusal_that_the_function_catches_is_said_again() -> None:
    def use(x: torch.Tensor) -> None:
        with contextlib.suppress(Exception):
            x.item()

    with refuses(NAMED, NotImplementedError):
        doubled(use)


def test_constants_have_their_values(caplog: pytest.LogCaptureFixture) -> None:
    texts = []

    def use(x: torch.Tensor) -> None:
        half, pair = torch.tensor(0.5), torch.arange(2) + 1
        texts.extend([f"{half}", f"{half:.2f}", f"{pair}", str(pair), repr(half), f"{x.shape}"])

    doubled(use)
    assert texts[:6] == ["0.5", "0.50", "tensor([1, 2])", "tensor([1, 2])", "tensor(0.5000)", "torch.Size([])"]
    assert not [r for r in caplog.records if r.name.startswith("torch_shard")]
