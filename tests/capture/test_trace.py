"""What a capture means, and refuses."""

import concurrent.futures
import gc
import random
from collections.abc import Callable
from random import random as draw_one
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step

X = torch.tensor([0.5, -1.0, 2.0])


def test_two_threads_capture_side_by_side() -> None:
    models = [nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: ts.jax_jit(m)(X).cpu(), models))
    for out, model in zip(found, models, strict=True):
        torch.testing.assert_close(out, model(X))


DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.random(),
    "under its own name": lambda: draw_one(),
    "shuffled": lambda: sorted(range(3), key=lambda _: random.random())[0],
    "numpy": lambda: np.random.rand(),
}


class Draws(nn.Linear):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = super().forward(input)
        scale = self.draw()  # the line
        return before * scale


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_python_random_numbers_are_refused_with_their_line(draw: Callable[[], float]) -> None:
    """In layers, which a step captures one by one."""
    model = nn.Sequential(*(Draws(draw) for _ in range(4)))
    line = rf"(?s)^File .{__file__}., line {draw.__code__.co_firstlineno}, in <lambda>: .*\nHere the captured function "
    with refuses(line + "draws from Python's `random` or from NumPy", NotImplementedError):
        ts.jax_jit(model)(torch.ones(2, 4))
    step = sgd_step(model, lambda m, x: m(x).mean(), (8, 1))
    with refuses(line, NotImplementedError):
        step(step.init(), torch.ones(8, 4))


DEVICES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "cuda": (lambda x: x.cuda(), "cuda"),
    "to": (lambda x: x.to("cuda"), "cuda"),
    "to a device": (lambda x: x.to(torch.device("cuda", 1)), "cuda:1"),
    "to a number": (lambda x: x.to(0), "0"),
    "by keyword": (lambda x: x.to(device="mps", dtype=torch.float16), "mps"),
    "made there": (lambda x: x + torch.zeros(4, device="cuda:0"), "cuda:0"),
    "a module": (lambda x: nn.Linear(4, 4).cuda()(x), "cuda"),
    "a module, moved": (lambda x: nn.Linear(4, 4).to("cuda")(x), "cuda"),
    "a context": (lambda x: made_on_cuda() + x, "cuda"),
}


def made_on_cuda() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(4)


@pytest.mark.parametrize(("fn", "said"), DEVICES.values(), ids=DEVICES)
def test_other_devices_are_refused_with_their_line(fn: Callable[[torch.Tensor], Any], said: str) -> None:
    line = rf"(?s)^File .{__file__}., line \d+, in .*\nHere the captured function asks for the device {said}, where"
    with refuses(line, NotImplementedError):
        ts.jax_jit(fn)(torch.ones(2, 4))


def test_the_devices_of_a_capture_are_taken() -> None:
    def moved(x: torch.Tensor) -> torch.Tensor:
        x = x.to(x.device).to("cpu").to(torch.device("cpu"), torch.float32).cpu().to("jax")
        table = torch.tensor([1.0, 2.0, 3.0], device="jax") + torch.arange(3, device=x.device) + torch.ones(3).to("jax")
        return x * table + torch.zeros(3, device="jax:0")

    torch.testing.assert_close(ts.jax_jit(moved)(torch.ones(2, 3)).cpu(), torch.tensor([[2.0, 4.0, 6.0]] * 2))


class Failing(torch.autograd.Function):
    """Its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ValueError("no derivative")


def test_a_backward_pass_that_raises_leaves_no_notes_for_later_captures() -> None:
    class Model(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Failing.apply(super().forward(input).tanh()).sin()

    step = sgd_step(Model(4, 2), lambda model, x: model(x).mean())
    with pytest.raises(ValueError, match="no derivative"):
        step.preview(torch.ones(8, 4))
    gc.collect()  # of what the error held
    assert not torch.fx.traceback.get_current_meta()
