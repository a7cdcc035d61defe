"""unshard, gather_from_jax_processes, assert_replica_integrity; across real processes too."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.processes import run_processes
from torch_shard.collectives import axis_index, pmean


def place(x: torch.Tensor, spec: P) -> torch.Tensor:
    return ts.torch_view(jax.device_put(x.numpy(), NamedSharding(ts.make_mesh(a=4, b=2), spec)))


def corrupted(x: torch.Tensor, device: int, add: float) -> torch.Tensor:
    """The same array, but for the first element that one device holds."""
    array = x.jax()  # pyright: ignore[reportAttributeAccessIssue]
    pieces = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        data.flat[0] += add if shard.device.id == device else 0
        pieces.append(jax.device_put(data, shard.device))
    return ts.torch_view(jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces))


# unshard


def test_unshard_gives_one_tree_per_device() -> None:
    result = ts.tpmap(lambda x: {"x": x, "i": [axis_index("i")]}, "i", ["shard"])(torch.arange(16.0))
    rows = ts.unshard(result)
    assert len(rows) == 8
    for i, row in enumerate(rows):
        assert row["i"][0].item() == i
        assert row["x"].tolist() == [2 * i, 2 * i + 1]
    assert sum(row["x"] for row in rows).tolist() == [56, 64]
    assert [row[0].tolist() for row in ts.unshard((torch.arange(3), np.arange(3), jax.numpy.arange(3)))] == [0, 1, 2]


def test_unshard_lets_gradients_through() -> None:
    x = torch.arange(8.0).to("jax").requires_grad_()
    rows = ts.unshard(ts.tpmap(torch.square, "i", ["thru"])(x))
    (3 * rows[2]).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 12, 0, 0, 0, 0, 0]


# assert_replica_integrity


def test_equal_replicas_pass() -> None:
    x = torch.randn(8, 4)
    x[0, 0] = float("nan")
    for spec in (P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))):
        tree = {"w": place(x, spec), "n": 3, "cpu": x, "key": jax.random.key(0), "half": place(x, spec).bfloat16()}
        ts.assert_replica_integrity(tree)


def test_a_corrupted_replica_is_named_with_its_path_place_and_difference() -> None:
    good = place(torch.zeros(8, 4), P("a"))
    with pytest.raises(AssertionError) as info:
        ts.assert_replica_integrity({"good": good, "bad": [corrupted(good, 5, 0.25)]})
    assert str(info.value) == (
        "assert_replica_integrity: replicas differ by more than rtol=0.0, atol=0.0:\n\n"
        "  ['bad'][0][4:6, :]: CPU 5 differs from CPU 4 by 0.25 at most."
    )
    whole = corrupted(place(torch.zeros(8, 4), P()), 5, float("nan"))
    with pytest.raises(AssertionError, match=r"  the tensor: CPU 5 differs from CPU 0, .*, CPU 6 and CPU 7 by nan"):
        ts.assert_replica_integrity(whole)


def test_what_is_not_replicated_may_differ() -> None:
    ts.assert_replica_integrity(corrupted(place(torch.zeros(8, 4), P("a", "b")), 5, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64], ids=str)
def test_tolerances(dtype: torch.dtype) -> None:
    rows = torch.full((8, 3), 8, dtype=dtype)
    rows[2, 1] += 1
    for tolerance in ({"atol": 1.0}, {"rtol": 0.125}):
        ts.assert_replica_integrity(rows, device_axis=True, **tolerance)
    for tolerance in ({}, {"atol": 0.9}, {"rtol": 0.124}):
        with pytest.raises(AssertionError, match=r"row 2 differs from row 0, row 1, .* and row 7 by 1\.0 at most"):
            ts.assert_replica_integrity(rows, device_axis=True, **tolerance)


def test_infinities_and_large_integers_are_compared_exactly() -> None:
    inf = float("inf")
    ts.assert_replica_integrity(torch.tensor([inf, inf]), device_axis=True, rtol=0.1)
    for rows in (torch.tensor([inf, -inf]), torch.tensor([inf, 1.0])):
        with pytest.raises(AssertionError, match="row 1 differs from row 0"):
            ts.assert_replica_integrity(rows, device_axis=True)
    for more, atol in ((1, 0.0), (100, 1.0)):  # float64 has one number for all of these
        with pytest.raises(AssertionError, match=f"row 1 differs from row 0 by {more}.0 at most"):
            ts.assert_replica_integrity(torch.tensor([2**60, 2**60 + more]), device_axis=True, atol=atol)
    ts.assert_replica_integrity(torch.tensor([2**60, 2**60 + 1]), device_axis=True, atol=1.0)


def test_rows_of_mapped_results_are_replicas() -> None:
    same = ts.tpmap(lambda x: pmean(x, "i"), "i", ["shard"])(torch.arange(16.0))
    own = ts.tpmap(lambda x: x, "i", ["shard"])(torch.arange(16.0))
    ts.assert_replica_integrity({"a": same}, device_axis=True)
    ts.assert_replica_integrity({"a": own})
    with pytest.raises(AssertionError, match=r"\['a'\]: row 1 on CPU 1 differs from row 0 on CPU 0 by 2.0 at most"):
        ts.assert_replica_integrity({"a": own}, device_axis=True)


def test_a_bad_tree_and_a_bad_tolerance_are_refused() -> None:
    with pytest.raises(ValueError, match="rtol must be a number of at least 0, got nan"):
        ts.assert_replica_integrity({"a": 1.0}, rtol=float("nan"))
    with pytest.raises(TypeError, match=r"the tree must hold tensors and numbers\. Give its state_dict\(\)"):
        ts.assert_replica_integrity(torch.nn.Linear(2, 2))


# Several processes


def test_one_process_gathers_itself() -> None:
    (tree,) = ts.gather_from_jax_processes({"w": place(torch.arange(8.0), P("a")), "name": "x"})
    assert tree["name"] == "x"
    assert torch.equal(tree["w"], torch.arange(8.0))


def test_only_data_is_gathered() -> None:
    words = r"gather_from_jax_processes: \['x'\]: .* cannot be sent to another process: only None, .* tuples and dicts"
    for leaf in (print, object(), {1}):
        with pytest.raises(TypeError, match=words):
            ts.gather_from_jax_processes({"x": leaf})


def test_two_processes() -> None:
    run_processes(
        """
        from torch_shard.collectives import psum

        tree = {"x": torch.full((rank + 1,), float(rank)), "jax": torch.ones(2, device="jax") * rank, "who": f"p{rank}"}
        trees = ts.gather_from_jax_processes([tree] * (rank + 1))
        assert [len(t) for t in trees] == [1, 2]
        for r, (first, *_) in enumerate(trees):
            assert first["x"].tolist() == [r] * (r + 1)
            assert first["jax"].tolist() == [r, r]
            assert first["who"] == f"p{r}"

        total, own = ts.tpmap(lambda x: (psum(x.sum(), "i"), x), "i", ["shard"])(torch.arange(8.0))
        with pytest.raises(ValueError, match="no process holds the whole"):
            ts.gather_from_jax_processes(own)
        assert ts.unshard(total)[3].item() == 28
        assert [t[1].tolist() for t in ts.gather_from_jax_processes(ts.unshard(own))] == [[2.0, 3.0]] * 2

        import collections, os

        class Command:
            def __reduce__(self):
                return os.abort, ()

        words = r"gather_from_jax_processes: \\['f'\\]: Command cannot be sent to another process: only None, .*"
        with pytest.raises(Exception, match=words if rank else f"process 1 failed: TypeError: {words}"):
            ts.gather_from_jax_processes({"f": Command()} if rank else {})

        Point = collections.namedtuple("Point", "x y")
        points = ts.gather_from_jax_processes({"p": Point(rank, [torch.ones(2) * rank])})
        assert [(type(each["p"]), each["p"].x, each["p"].y[0].tolist()) for each in points] == [
            (Point, 0, [0.0, 0.0]), (Point, 1, [1.0, 1.0])
        ]
        with pytest.raises(ValueError, match="must have one structure in all processes, found .*Point.* 0 and l"):
            ts.gather_from_jax_processes((rank, 1) if rank else Point(0, 1))
        large = [torch.full((300_000, 4), float(rank)).bfloat16()] * rank  # by the devices from one process alone
        assert [[x.float().sum().item() for x in row] for row in ts.gather_from_jax_processes(large)] == [[], [1.2e6]]
        """,
        2,
    )


@pytest.mark.slow
def test_three_processes_of_which_one_is_corrupted() -> None:
    run_processes(
        """
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P

        mesh = ts.make_mesh(a=3, b=2)

        def place(spec, wrong=None, add=0.0):
            '''An array of which one process, if any, has made its first replica wrong.'''
            sharding = NamedSharding(mesh, spec)
            array = jax.make_array_from_callback((6, 2), sharding, lambda i: np.ones((6, 2), np.float32)[i])
            pieces = [np.array(s.data) for s in array.addressable_shards]
            pieces[0].flat[0] += add if rank == wrong else 0
            placed = [jax.device_put(p, s.device) for p, s in zip(pieces, array.addressable_shards)]
            return ts.torch_view(jax.make_array_from_single_device_arrays((6, 2), sharding, placed))

        def refused(message, tree, **options):
            with pytest.raises(AssertionError, match=message):
                ts.assert_replica_integrity(tree, **options)

        everywhere = {"whole": place(P()), "split": [place(P("a")), place(P(None, "b"))], "host": torch.ones(3), "n": 2}
        ts.assert_replica_integrity(everywhere)
        culprit = mesh.devices[1, 0].id
        refused(
            rf"\\['w'\\]: CPU {culprit} of process 1 differs from CPU 0 of process 0, .* by 0.5 at most",
            {"good": place(P()), "w": place(P(), wrong=1, add=0.5)},
        )
        columns = place(P(None, "b"), wrong=1, add=2.0)
        refused(rf"\\[:, 0:1\\]: CPU {culprit} of process 1 differs from CPU 0 of process 0 and", columns)
        refused(rf"\\[2:4, :\\]: CPU {culprit + 1} of process 1 differs from CPU {culprit} of", place(P("a"), 1, 2.0))
        ts.assert_replica_integrity(place(P(), wrong=1, add=0.5), atol=0.5)
        ts.assert_replica_integrity(place(P("a", "b"), wrong=1, add=0.5))
        refused(
            r"\\['x'\\]: the host of process 2 differs from the host of process 0 and the host of process 1 by 2.0",
            {"x": torch.tensor([1.0, 1.0 + 2 * (rank == 2)])},
        )
        longer = {"x": torch.ones(2 if rank else 1)}
        refused(r"\\['x'\\] is \\(1,\\) float32 in process 0 and \\(2,\\) float32 in process 1", longer)
        with pytest.raises(Exception, match="'x'; the tree must hold" if rank == 2 else "process 2 failed: .*hold"):
            ts.assert_replica_integrity("x" if rank == 2 else 1)
        """,
        3,
    )
