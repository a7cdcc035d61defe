"""Random streams of mapped functions: the same on all devices, or apart along exactly the axes that are folded."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.spmd.mapping import assert_close, shard_map
from torch_shard.collectives import axis_index, fold_in_axis


def draws(out: torch.Tensor) -> np.ndarray:
    """Which of the 4 x 2 devices drew the same numbers, as small numbers."""
    rows = out.cpu().view(8, -1)
    return np.array([next(k for k in range(8) if torch.equal(rows[k], row)) for row in rows]).reshape(4, 2)


SAME, BY_I, BY_J = np.zeros((4, 2)), np.array([[0, 0], [2, 2], [4, 4], [6, 6]]), np.array([[0, 1]] * 4)
EACH = np.arange(8).reshape(4, 2)


@pytest.mark.parametrize(
    ("axes", "wanted"), [((), SAME), ("i", BY_I), ("j", BY_J), (("i", "j"), EACH)], ids=["none", "i", "j", "both"]
)
def test_random_streams_differ_along_the_folded_axes_alone(axes: Any, wanted: np.ndarray) -> None:
    out = P(("i", "j"))

    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.dropout(x, 0.5), torch.rand_like(x)], 1)

    def local(x: torch.Tensor) -> Any:
        x = x + 0 * (axis_index("i") + axis_index("j"))
        if axes:
            with fold_in_axis(axes):
                within = draw(x)
        else:
            within = draw(x)
        return within, draw(x)

    x = torch.ones(1, 32)
    within, after = shard_map(local, P(), out)(x)
    folded, again = shard_map(local, P(), out, fold_in_axes=axes)(x)
    for part in (slice(0, 32), slice(32, 64)):  # of dropout, and of rand
        assert (draws(within[:, part]) == wanted).all()
        assert (draws(after[:, part]) == SAME).all()
        assert (draws(folded[:, part]) == wanted).all()
        assert (draws(again[:, part]) == wanted).all()


def test_dropout_of_a_folded_stream_drops_the_same_backward() -> None:
    fn = shard_map(lambda x: F.dropout(x, 0.5), P("i"), P("i"), fold_in_axes="i")
    value, grad = ts.jax_jit(ts.jax_value_and_grad(lambda x: fn(x).sum()))(torch.ones(64))
    assert_close(value, grad.cpu().sum())  # the loss is linear: its gradient is the mask
    assert len({tuple(part.tolist()) for part in grad.cpu().view(4, 16)}) == 4


@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap], ids=["vmap", "pmap"])
def test_rows_draw_the_same_unless_folded(adapt: Any) -> None:
    same = adapt(lambda x: torch.rand_like(x), axis_name="p")(torch.zeros(8, 4))
    apart = adapt(lambda x: torch.rand_like(x), axis_name="p", fold_in_axes="p")(torch.zeros(8, 4))
    assert (same.cpu() == same.cpu()[0]).all()
    assert len({tuple(row.tolist()) for row in apart.cpu()}) == 8


def test_keys_are_folded_as_jax_folds_them() -> None:
    words = torch.tensor(np.array(jax.random.key_data(jax.random.key(3))))
    found = shard_map(lambda key: fold_in_axis(key, "i")[None], P(), P("i"))(words)
    wanted = [jax.random.key_data(jax.random.fold_in(jax.random.key(3), k)) for k in range(4)]
    assert np.array_equal(found.numpy(), np.stack(wanted))
