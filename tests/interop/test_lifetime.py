"""What the adapters keep: nothing that the user has let go of."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

import torch_shard as ts


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


def test_a_jax_view_dies_with_its_last_name():
    model = torch.nn.Linear(2, 1)
    alive = weakref.ref(model)
    view = ts.jax_view(model)
    jax.grad(lambda x: view(x).sum())(jnp.ones((3, 2)))
    del model, view
    collect()
    assert alive() is None
