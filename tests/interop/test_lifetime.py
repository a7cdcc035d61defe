"""What the adapters keep: nothing that the user has let go of."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

import torch_shard as ts
from torch_shard._interop import jax_function


def collect():
    """JAX lets go of a function's programs when the function has gone, and these of what they were made from."""
    for _ in range(3):
        gc.collect()


def adapted_and_used(adapter, number):
    """An adapted function that ran, and its weights: each of its own, so that nothing is shared."""
    model = torch.nn.Linear(2, 1)
    fn = adapter(lambda x: model(x).sum() * number)
    fn(torch.ones(3, 2))
    return fn, weakref.ref(model)


@pytest.mark.parametrize(
    "adapter", [ts.jax_jit, ts.jax_grad, ts.jax_value_and_grad, ts.jax_checkpoint], ids=lambda fn: fn.__name__
)
def test_an_adapted_function_dies_with_its_last_name(adapter):
    functions, models = zip(*(adapted_and_used(adapter, i) for i in range(3)), strict=True)
    assert all(ref() is not None for ref in models)
    alive = [weakref.ref(fn) for fn in functions]
    del functions
    collect()
    assert [ref() for ref in alive] == [None] * 3
    assert [ref() for ref in models] == [None] * 3


def viewed_and_used():
    model = torch.nn.Linear(2, 1)
    view = ts.jax_view(model)
    jax.grad(lambda x: view(x).sum())(jnp.ones((3, 2)))
    return weakref.ref(model)


def test_a_jax_view_dies_with_its_last_name():
    model = viewed_and_used()
    collect()
    assert model() is None


def captured_call(number):
    """A captured function that calls JAX, with a derivative."""

    def loss(x):
        return ts.call_jax(lambda a: jnp.sin(a) * number, x).sum()

    return ts.jax_jit(ts.jax_value_and_grad(loss))


def test_calls_into_jax_of_captures_that_are_gone_are_forgotten():
    collect()
    before = len(jax_function._FUNCTIONS)
    functions = [captured_call(float(i)) for i in range(5)]
    for i, fn in enumerate(functions):
        torch.testing.assert_close(fn(torch.ones(3))[0].cpu(), 3 * torch.ones(3).sin()[0] * i)
    assert len(jax_function._FUNCTIONS) > before
    del functions, fn
    collect()
    assert len(jax_function._FUNCTIONS) == before


def test_a_compiled_program_finds_its_calls_into_jax_for_another_trace():
    """New shapes are captured anew, known ones are not: their programs are lowered again for a new transform."""
    fn = captured_call(2.0)
    x = torch.ones(3)
    value, grad = fn(x)
    gc.collect()
    jax.clear_caches()  # it is traced and lowered again
    again = fn(x)
    torch.testing.assert_close(again[0].cpu(), value.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(again[1].cpu(), grad.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(grad.cpu(), 2 * x.cos())
