"""jax_vmap against a loop."""

import pytest
import torch

import torch_shard as ts
from tests.oracles.derivatives import X, assert_close, torch_grad, wavy


@pytest.mark.parametrize("inner", ["plain", "grad"])
def test_vmap_equals_a_loop(inner: str) -> None:
    fn, oracle = (wavy, wavy) if inner == "plain" else (ts.jax_grad(wavy), lambda x: torch_grad(wavy, x))
    rows = torch.stack([X, 2 * X, -X])
    assert_close(ts.jax_vmap(fn)(rows), torch.stack([oracle(row) for row in rows]))
    assert_close(ts.jax_jit(ts.jax_vmap(fn))(rows), torch.stack([oracle(row) for row in rows]))


def test_vmap_takes_axes() -> None:
    fn = ts.jax_vmap(lambda a, b: a @ b, in_axes=(1, None), out_axes=1)
    a, b = torch.randn(3, 4), torch.randn(3, 2)
    assert_close(fn(a, b), (a.T @ b).T)
