"""Shardings as grids of cells, and the names beside them."""

import itertools
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.tables.drawn import layout, sharded
from torch_shard._inspect.drawing import visualize_sharding
from torch_shard._inspect.grid import describe_names


def test_too_many_shards_are_refused(monkeypatch):
    monkeypatch.setattr("torch_shard._inspect.grid.MAX_CELLS", 4)
    with pytest.raises(ValueError, match=r"8 shards are more than can be drawn \(4\)"):
        visualize_sharding(sharded((8,), ("batch", "model")))
    with pytest.raises(ValueError, match="8 shards of w are more"):
        visualize_sharding({"w": sharded((8,), ("batch", "model"))})


def test_struct_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"visualize_sharding: odd \(6,\) float32: .*evenly divide") as caught:
        visualize_sharding({"odd": layout((4, 2), P("a"), shape=(6,))})
    assert caught.value.__cause__ is not None


def test_same_parts_on_other_devices_are_another_layout():
    mesh = ts.make_mesh(a=4, b=2)
    turned = ts.make_mesh(devices=jax.devices()[::-1], a=4, b=2)
    held = {
        str(i): jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(m, P("a")))
        for i, m in enumerate((mesh, turned))
    }
    assert len(visualize_sharding(held).grids) == 2
    held = {str(i): layout((4, 2), spec) for i, spec in enumerate((P("a"), P("a", None), P(None, "a"), P("b")))}
    assert len(visualize_sharding(held).grids) == 3


def spell_out(text):
    """What a shell makes of braces."""
    pieces = re.split(r"\{(.*?)\}", text)
    options = [[piece] for piece in pieces]
    for i in range(1, len(pieces), 2):
        ends = pieces[i].split("..")
        options[i] = pieces[i].split(",") if len(ends) == 1 else [str(n) for n in range(int(ends[0]), int(ends[1]) + 1)]
    return ["".join(choice) for choice in itertools.product(*options)]


components = st.sampled_from(["a", "b", "weight", *map(str, range(12))])


@given(st.sets(st.lists(components, min_size=1, max_size=4).map(".".join)))
def test_folded_names_spell_out_to_the_same_names(names):
    said = [name for text in describe_names((name,) for name in names) for name in spell_out(text)]
    assert sorted(said) == sorted(names)
