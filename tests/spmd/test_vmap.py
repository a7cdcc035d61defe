"""jax_vmap against a loop."""

import torch

import torch_shard as ts
from tests.oracles.derivatives import X, assert_close, torch_grad, wavy


def test_a_gradient_by_rows_equals_a_loop() -> None:
    rows = torch.stack([X, 2 * X, -X])
    by_rows = ts.jax_vmap(ts.jax_grad(wavy))
    for fn in (by_rows, ts.jax_jit(by_rows)):
        assert_close(fn(rows), torch.stack([torch_grad(wavy, row) for row in rows]))
