"""Which process has which rows of a batch."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.errors import refuses
from torch_shard._device import BatchLayout, HostRows


def rows_of(*blocks, process=0):
    """Of processes with these blocks."""
    num = len({block for own in blocks for block in own})
    return HostRows(num, dict(enumerate(blocks)), process, "(batch=4)")


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([(0,)], [(1, 0)]),
        ([(0, 1), (2, 3)], [(2, 0), (2, 1)]),
        ([(0,), (0,), (1,), (1,)], [(2, 0), (2, 0), (2, 1), (2, 1)]),
        ([(0,)] * 3, [(1, 0)] * 3),
        ([(1,), (0,)], [(2, 1), (2, 0)]),
        # A TPU v5e:4x4 with batch=16, whose hosts lie in squares of four chips
        ([(0, 1, 6, 15), (2, 3, 4, 5), (7, 12, 13, 14), (8, 9, 10, 11)], [(4, 0), (4, 1), (4, 2), (4, 3)]),
    ],
    ids=str,
)
def test_distinct_rows_are_counted_and_not_processes(blocks, found):
    assert [rows_of(*blocks, process=process).shard() for process in range(len(blocks))] == found


@pytest.mark.parametrize("blocks", [[(0, 1), (1, 2)], [(0,), (1, 2)], [(0, 1), (0,)]], ids=str)
def test_rows_in_common_and_not_all_are_refused(blocks):
    with refuses(r"none in common, and each as many as the others. Mesh \(batch=4\) .* have\n\n  process 0: 0"):
        rows_of(*blocks).shard()


def test_rows_of_a_whole_batch():
    rows = rows_of((0, 3), (1, 2), process=0)
    assert rows.of_whole(12) == [range(0, 3), range(9, 12)]
    assert rows.num_whole(6) == 12
    # Two processes share the middle of three blocks.
    assert rows_of((0, 1), (1, 2), process=1).of_whole(6) == [range(2, 4), range(4, 6)]
    assert rows_of((0, 1), (1, 2), process=1).num_whole(4) == 6


@pytest.mark.parametrize("spec", [None, P(), P("model"), P(("batch", "model")), P(None, "model")], ids=str)
def test_one_process_has_all_rows(spec):
    mesh = ts.make_mesh(batch=4, model=2)
    assert ts.data_shard(mesh, spec) == (1, 0)
    rows = HostRows.of(BatchLayout(mesh, spec))
    (own,) = rows.blocks.values()
    assert own == tuple(range(rows.num_blocks))
    sharding = jax.sharding.NamedSharding(mesh, P("batch") if spec is None else spec)
    starts = {index[0].indices(16)[:2] for index in sharding.devices_indices_map((16, 16)).values()}
    assert [(span.start, span.stop) for span in rows.of_whole(16)] == sorted(starts)
    assert rows.num_whole(16) == 16
