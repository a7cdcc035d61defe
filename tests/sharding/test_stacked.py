"""Entries of repeated layers stored together: a mapping, and a pytree."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_shard._sharding.stacked import Layout, Stacks, stack_dicts

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


def test_pieces_are_taken_as_they_are_stored() -> None:
    stacks = Stacks.from_dict(values(), LAYOUT)
    assert stacks.stacked(GROUPS[0]) is stacks.arrays[1]
    assert Stacks.from_dict(stacks, LAYOUT) is stacks
    again = Stacks.from_dict(stacks, Layout.of(GROUPS[:1], NAMES))
    assert again.arrays[1] is stacks.arrays[1]
    for names in [("1.w", "2.w"), ("2.w", "0.w", "1.w"), ("first",), ("0.b",), ("1.w", "1.w")]:
        np.testing.assert_array_equal(stacks.stacked(names), np.stack([values()[n] for n in names]))
    merged = Stacks.merged(stacks, {"other": jnp.ones(2)})
    assert merged.stacked(GROUPS[1]) is stacks.arrays[2]
    assert list(merged) == [*NAMES, "other"]
    assert merged.part(LAYOUT).arrays[1] is stacks.arrays[1]
    changed = stacks.updated({"1.b": jnp.zeros(2), "unknown": 0})
    assert changed.arrays[1] is stacks.arrays[1]
    np.testing.assert_array_equal(changed.stacked(GROUPS[1]), [values()["0.b"], np.zeros(2)])


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


def test_dicts_are_stored_where_their_leaves_agree() -> None:
    class Empty(tuple):
        pass

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values())
    tree = {"count": shapes["first"], "mu": shapes, "nu": {**shapes, "1.b": ()}, "some": {"0.w": shapes["0.w"]}}
    found = stack_dicts(tree, LAYOUT)
    assert found["mu"].layout == LAYOUT
    assert [len(group) for group in found["nu"].layout.groups] == [1, 3, 1, 1]
    assert found["some"].layout.groups == (("0.w",),)
    assert type(found) is dict
