"""Errors of the user's own code in a capture: where they say that they came up, and what their traceback shows."""

import traceback

import jax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import WHOLE, make_mesh


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def words_and_frames(filtering: str) -> tuple[list[str], list[traceback.FrameSummary]]:
    before, step = jax.config.jax_traceback_filtering, step_of(Narrow(), mesh=(1, 1))
    state = step.init()
    jax.config.update("jax_traceback_filtering", filtering)
    try:
        with pytest.raises(RuntimeError) as error:
            step(state, torch.ones(4, 4))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    words = [*traceback.format_exception_only(error.value)]
    return "".join(words).splitlines(), traceback.extract_tb(error.value.__traceback__)


def test_an_error_ends_with_the_users_line_and_module(capfd: pytest.CaptureFixture[str]) -> None:
    words, frames = words_and_frames("auto")
    assert words[0].startswith("RuntimeError: ")
    assert "[4, 8] X [4, 2]" in words[0]
    assert words[1].startswith('In "blocks.1", Linear(in_features=4, out_features=2, bias=True), given (4, 8): File "')
    assert words[1].endswith("in forward: x = block(x)")
    assert words[2] == "make_train_step: the loss was captured, once, for a batch of (4, 4) torch.float32."
    assert frames[-1].line == "x = block(x)"
    assert not any("site-packages" in frame.filename for frame in frames)
    assert "Traceback" not in capfd.readouterr().err  # in PyTorch's own log


def test_all_frames_are_there_where_jax_shows_its_own() -> None:
    assert any("site-packages" in frame.filename for frame in words_and_frames("off")[1])


def test_adapters_too() -> None:
    with pytest.raises(RuntimeError) as error:
        ts.jax_jit(Narrow())(torch.ones(4, 4))
    assert 'In "blocks.1"' in "".join(traceback.format_exception_only(error.value))


def test_a_function_of_jax_that_is_given_a_torch_tensor() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return jax.numpy.sum(x)  # pyright: ignore[reportArgumentType, reportReturnType]

    with pytest.raises(TypeError) as error:
        ts.jax_grad(fn)(torch.ones(3))
    assert "ts.call_jax(function, *args) calls JAX." in "".join(traceback.format_exception_only(error.value))


def test_inputs_by_name_of_a_forward_pass() -> None:
    def fn(model: Narrow, batch: torch.Tensor) -> torch.Tensor:
        return model.blocks[0](input=batch)

    apply = ts.make_apply(Narrow(), fn=fn, mesh=make_mesh((1, 1)), plan=WHOLE)
    with pytest.raises(RuntimeError) as error:
        apply(torch.ones(4, 5))
    words = "".join(traceback.format_exception_only(error.value)).splitlines()
    assert 'given (4, 5): File "' in words[1]
    assert words[2] == "make_apply: the forward pass was captured, once, for a batch of (4, 5) torch.float32."


TWO_DTYPES = {
    "linear": lambda x, w: nn.functional.linear(x, w),
    "linear with a bias": lambda x, w: nn.functional.linear(x, w, w[0]),
    "bias": lambda x, w: torch.addmm(w, x, x),
    "vector": lambda x, w: torch.mv(x, w[0]),
    "batches": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "convolution": lambda x, w: nn.functional.conv1d(x[None], w[:, :, None]),
    "whole numbers": lambda x, w: x @ w.long(),
}


@pytest.mark.parametrize("name", TWO_DTYPES)
def test_products_of_two_dtypes_are_refused_as_in_eager_torch(name: str) -> None:
    fn, given = TWO_DTYPES[name], (torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        fn(*given)
    with pytest.raises(RuntimeError, match="must be given tensors of one dtype") as error:
        ts.jax_jit(fn)(*given)
    assert f'File "{__file__}"' in str(error.value)


def test_a_default_dtype_that_changes_within_is_refused() -> None:
    """A graph that is replayed with the other default would round otherwise than eager torch."""

    def third(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return x + torch.full((4,), 1.0) / 3
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.raises(NotImplementedError, match=r"(?s)in third: return x .*the default dtype is torch.bfloat16"):
        ts.jax_jit(third)(torch.ones(4))
