"""Stored forms: there and back, what does not fit, and what a program of them costs in collectives."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from torch_shard._sharding.forms import Form, KernelLast, Padded, Pieces

CASES = [  # form, torch's shape and spec, what is stored
    (Pieces(3, dim=0), (12, 8), P("model"), (3, 4, 8), P(None, "model", None)),
    (Pieces(3, dim=-1), (8, 12), P(None, "model"), (8, 3, 4), P(None, None, "model")),
    (Pieces(2, dim=1), (4, 8, 6), P("a", ("b", "c")), (4, 2, 4, 6), P("a", None, ("b", "c"), None)),
    (Padded(6, dim=0), (5, 4), P("model"), (6, 4), P("model", None)),
    (Padded(8, dim=-1), (3, 5), P(None, "model"), (3, 8), P(None, "model")),
    (KernelLast(4), (8, 6, 3, 2), P("model", "batch"), (3, 2, 6, 8), P(None, None, "batch", "model")),
    (KernelLast(3), (8, 6, 3), P(("model", "batch")), (3, 6, 8), P(None, None, ("model", "batch"))),
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


@pytest.mark.parametrize(
    ("form", "shape", "says"),
    [
        (Pieces(3, dim=0), (10, 4), "dim 0 = 10 is not 3 pieces of one size. Give the number that it has."),
        (Pieces(0, dim=0), (10, 4), "an entry has at least one piece"),
        (Pieces(3, dim=2), (12, 4), "the entry has 2 dims, (12, 4). Name one of them."),
        (KernelLast(3), (4, 5), "the entry has shape (4, 5). Leave it out."),
        (Padded(4, dim=0), (5, 4), "dim 0 = 5 is larger. Give a size of at least 5."),
    ],
)
def test_what_does_not_fit(form: Form, shape: tuple[int, ...], says: str):
    fault = form.find_fault(shape)
    assert fault is not None
    assert fault.startswith(str(form))
    assert says in fault
