"""Stored forms: there and back, what does not fit, and what a program of them costs in collectives."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from torch_shard._sharding.forms import Form, Padded, Pieces

CASES = [  # form, torch's shape and spec, what is stored
    (Pieces(3, dim=0), (12, 8), P("model"), (3, 4, 8), P(None, "model", None)),
    (Pieces(3, dim=-1), (8, 12), P(None, "model"), (8, 3, 4), P(None, None, "model")),
    (Pieces(2, dim=1), (4, 8, 6), P("a", ("b", "c")), (4, 2, 4, 6), P("a", None, ("b", "c"), None)),
    (Padded(6, dim=0), (5, 4), P("model"), (6, 4), P("model", None)),
    (Padded(8, dim=-1), (3, 5), P(None, "model"), (3, 8), P(None, "model")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "shape", "spec", "stored", "stored_spec"), CASES)
def test_stored_and_restored(form: Form, shape: tuple[int, ...], spec: P, stored: tuple[int, ...], stored_spec: P):
    assert form.find_fault(shape) is None
    assert form.stored_shape(shape) == stored
    assert form.stored_spec(spec, ndim=len(shape)) == stored_spec
    host = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    arrays: list[Any] = [host, jnp.asarray(host), torch.from_numpy(host)]
    for array in arrays:
        kept = form.store(array)
        assert type(kept) is type(array)
        assert tuple(kept.shape) == stored
        assert float(kept.sum()) == host.sum()  # what is added is zero
        np.testing.assert_array_equal(np.asarray(form.restore(kept, shape)), host)


@pytest.mark.parametrize("form", [Pieces(3, dim=0), Padded(14, dim=0)])
def test_gradients_are_of_the_stored_form(form: Form):
    weight = torch.randn(12, 4)
    kept = form.store(weight).requires_grad_()
    form.restore(kept, (12, 4)).square().sum().backward()
    assert kept.grad is not None
    torch.testing.assert_close(kept.grad, form.store(2 * weight), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("form", "shape", "says"),
    [
        (Pieces(3, dim=0), (10, 4), "dim 0 = 10 is not 3 pieces of one size. Give the number that it has."),
        (Pieces(0, dim=0), (10, 4), "an entry has at least one piece"),
        (Pieces(3, dim=2), (12, 4), "the entry has 2 dims, (12, 4). Name one of them."),
        (Padded(4, dim=0), (5, 4), "dim 0 = 5 is larger. Give a size of at least 5."),
        (Padded(4, dim=-2), (5,), "the entry has 1 dims, (5,). Name one of them."),
    ],
)
def test_what_does_not_fit(form: Form, shape: tuple[int, ...], says: str):
    fault = form.find_fault(shape)
    assert fault is not None
    assert fault.startswith(str(form))
    assert says in fault


def _moves(fn: Callable[..., jax.Array], specs: list[P], *args: jax.Array) -> set[str]:
    """Collectives of the value and gradients, but for sums."""
    mesh = ts.make_mesh(batch=4, model=2)
    where = [NamedSharding(mesh, spec) for spec in specs]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(args, where, strict=True)]
    program = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)), out_shardings=(None, tuple(where[:2])))
    text = program.lower(*structs).compile().as_text()
    assert text is not None
    return set(re.findall(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text))


@pytest.mark.parametrize("sunk", [True, False])
def test_pieces_move_nothing_where_the_product_keeps_them_apart(sunk: bool):
    def loss(x_BTD: jax.Array, w_3FD: jax.Array):
        if sunk:
            y_BT3F = jnp.einsum("btd,pfd->btpf", x_BTD, w_3FD)
            q, k, v = (y_BT3F[:, :, i] for i in range(3))
        else:
            merged = Pieces(3, dim=0).restore(w_3FD, (48, 16))
            q, k, v = jnp.split(x_BTD @ merged.T, 3, -1)
        return (jax.nn.softmax(q * k) * v).sum()

    moved = _moves(loss, [P("batch"), P(None, "model", None)], jnp.zeros((8, 4, 16)), jnp.zeros((3, 16, 16)))
    assert bool(moved) is not sunk  # merging first gathers the weight, and is to be sunk


def test_a_padded_vocabulary_moves_nothing():
    def loss(x_BTD: jax.Array, w_VD: jax.Array):
        logits = x_BTD @ Padded(18, dim=0).restore(w_VD, (17, 16)).T
        target_BT1 = jnp.full((8, 4, 1), 3)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), target_BT1, -1).mean()

    assert not _moves(loss, [P("batch"), P("model", None)], jnp.zeros((8, 4, 16)), jnp.zeros((18, 16)))
