"""Entries of repeated layers stored together: a mapping, and a pytree."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_shard._sharding.stacked import Layout, Stacks

GROUPS = (("0.w", "1.w", "2.w"), ("0.b", "1.b"))

NAMES = ("first", "0.w", "0.b", "1.w", "1.b", "2.w")

LAYOUT = Layout.of(GROUPS, NAMES)


def values() -> dict[str, jax.Array]:
    shapes = {"w": (2, 3), "b": (2,), "first": (4,)}
    return {n: jnp.full(shapes[n.split(".")[-1]], float(i)) for i, n in enumerate(NAMES)}


def test_it_reads_like_the_dict() -> None:
    stacks = Stacks.from_dict(values(), LAYOUT)
    assert list(stacks) == list(NAMES)
    assert len(stacks) == 6
    assert "2.b" not in stacks
    for name, value in values().items():
        np.testing.assert_array_equal(stacks[name], value)
    assert [array.shape for array in stacks.arrays] == [(4,), (3, 2, 3), (2, 2)]
    assert repr(stacks) == ("Stacks({first: float32[4], 0.w to 2.w: float32[3, 2, 3], 0.b to 1.b: float32[2, 2]})")
    with pytest.raises(KeyError, match=r"2\.b"):
        stacks["2.b"]


def test_it_is_a_pytree() -> None:
    stacks = Stacks.from_dict(values(), LAYOUT)
    doubled = jax.tree.map(lambda x: 2 * x, stacks)
    np.testing.assert_array_equal(doubled["1.b"], 2 * values()["1.b"])
    same = Layout.of(GROUPS, NAMES)
    assert jax.tree.structure(stacks) == jax.tree.structure(Stacks.from_dict(values(), same))
    assert jax.tree.structure(stacks) != jax.tree.structure(Stacks.from_dict(values(), Layout.of((), NAMES)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(stacks)]
    assert paths == ["['first']", "['0.w to 2.w']", "['0.b to 1.b']"]
    rows = jax.jit(lambda s: dict(s))(stacks)
    assert {n: v.shape for n, v in rows.items()} == {n: v.shape for n, v in values().items()}
    for other in (copy.deepcopy(stacks), pickle.loads(pickle.dumps(stacks))):
        assert other.layout == stacks.layout
        np.testing.assert_array_equal(other["2.w"], stacks["2.w"])


def test_layouts_name_each_entry_once() -> None:
    for groups in [(("a", "b"), ("b",)), (("a", "c"),)]:
        with pytest.raises(ValueError, match="each name stands in one group"):
            Layout.of(groups, ("a", "b"))
    assert LAYOUT.restricted(["0.b", "1.b", "0.w"]) == Layout.of((GROUPS[1],), ("0.b", "1.b", "0.w"))
