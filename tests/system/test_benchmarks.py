"""The suite's own arithmetic; `validation/rivals` has that its rivals compute what eager torch computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from benchmarks import counts
from benchmarks.processes import Failed, isolated
from benchmarks.rows import timed
from benchmarks.timing import agree, summary
from benchmarks.tpu_mixtral import share_of_rows
from torch_shard._cost.total import costs_of

TRIPS = 5


def compiled(fn, *args, specs):
    mesh = ts.make_mesh(m=8)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(fn, in_shardings=shardings, out_shardings=NamedSharding(mesh, P())).lower(*args).compile().as_text()


def chain(step, ws, x):
    return jax.lax.scan(lambda x, w: (step(x, w), None), x, ws)[0]


def test_collectives_within_a_loop_count_once_per_iteration():
    ws, x = jnp.ones((TRIPS, 16, 16)), jnp.ones((4, 16))
    found = counts.collectives(compiled(lambda ws, x: chain(jnp.dot, ws, x), ws, x, specs=(P(None, "m"), P())), 8)
    num_bytes = TRIPS * x.nbytes
    assert found["all-reduce"] == counts.Traffic(TRIPS, num_bytes, 2 * num_bytes * 7 / 8)


def test_collectives_within_a_loop_of_unknown_length_are_refused():
    def until(w, x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ w, x)

    text = compiled(until, jnp.ones((16, 16)), jnp.ones((4, 16)), specs=(P("m"), P()))
    with pytest.raises(ValueError, match=r"all-reduce in .* unknown number of iterations"):
        counts.collectives(text, 8)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("mesh['a'=4,'b'=2] {'a'}", 4),
        ("mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", 2),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
        ("{}", 8),
    ],
)
def test_group_sizes_in_all_ways_that_xla_prints(groups, size):
    line = f"  %r = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{line}\n}}"
    sent = 2 * 32 * (size - 1) / size
    assert counts.collectives(text, num_devices=8)["all-reduce"] == counts.Traffic(1, 32, sent)
    if groups != "{}":  # a preview's costs do not know the mesh
        assert sum(cost.received_bytes for cost in costs_of(text)) == sent


def test_an_asynchronous_gather_counts_its_result_alone():
    line = "  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}"
    found = counts.collectives(f"ENTRY %main (x: f32[2]) -> f32[8] {{\n{line}\n}}", num_devices=4)
    assert found["all-gather"] == counts.Traffic(1, 32, 24)


def test_ratios_are_paired_before_the_median():
    ours, rival = np.array([1.0, 10.0, 3.0]), np.array([2.0, 10.0, 1.0])  # ratios 0.5, 1, 3; of medians 1.5
    ratio = summary(np.stack([ours, rival], -1))
    assert (ratio.median, ratio.low, ratio.high, ratio.ours_s, ratio.rival_s) == (1.0, 0.75, 2.0, 3.0, 2.0)
    row = timed("x", ours, rival, target=0.9)
    assert (row.ours, row.rival, row.ratio, row.ok) == ("3 s", "2 s", 1.0, False)


def test_a_side_that_computes_something_else_is_not_timed():
    losses = {"ours": iter([3.0, 2.0, 1.0]), "other": iter([3.0, 2.0, 1.1])}
    with pytest.raises(AssertionError, match="other"):
        agree({name: lambda _, found=found: next(found) for name, found in losses.items()}, None)
    with pytest.raises(AssertionError, match="nothing was learnt"):
        agree({"ours": lambda _: 1.0}, None)


def test_a_function_runs_in_a_process_of_its_own_and_its_error_comes_back():
    assert isolated("json:loads", s="[1, 2]") == [1, 2]
    with pytest.raises(Failed, match="JSONDecodeError"):
        isolated("json:loads", s="[")


def test_of_grouped_products_what_is_used_counts():
    whole, tile = 8 * 4096, 128  # rows of a device, of which half are for its 32 experts of 64
    assert share_of_rows(8, 4096, (64, 32), tile) == (whole / 2 + 31 * tile) / whole
    assert share_of_rows(1, 16, (4, 4), tile) == 1.0
