"""Batches onto the mesh. (Of several processes: tests/system/test_hosts_data.py.)"""

import dataclasses

import jax
import numpy as np
import torch

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.tables.host_data import ROWS, X, batch_of, make_step
from torch_shard._common.types import KEPT
from torch_shard._device import BatchLayout, GatheredLayout, HostRows, LocalLayout
from torch_shard._train.placing import _describe, compare_given

MESH = ts.make_mesh(batch=4, model=2)


def test_in_one_process_own_rows_are_all_rows():
    local, known = make_step(MESH, local_batches=True), make_step(MESH)
    for mine, theirs in zip(
        *(jax.tree.leaves(step(step.init(), batch_of(X))[0].params) for step in (local, known)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    placed = local.put({"x": X, "rows": torch.arange(8)})  # as always, leaves may have different sizes
    assert [array.shape for array in placed.arrays] == [(8,), (ROWS, 4)]


def test_a_batch_that_gradients_would_go_through_is_refused():
    step = make_step(MESH)
    with refuses(
        r"make_train_step: batch\['x'\] was computed from tensors that require grad.*Compute it within the loss"
    ):
        step(step.init(), {**batch_of(X), "x": X.clone().requires_grad_() * 2})


def test_layouts_of_own_rows_place_what_those_of_whole_batches_do():
    layout = BatchLayout(MESH, None)
    leaves = [X, np.float32(3.0), torch.zeros(0, 4)]
    for mine, theirs in zip(LocalLayout(layout).put(leaves), layout.put(leaves), strict=True):
        assert mine.sharding == theirs.sharding
        np.testing.assert_array_equal(mine, theirs)
    gathered = GatheredLayout(layout)
    odd = [X[:3], np.float32(3.0)]
    for array, leaf, struct in zip(gathered.put(odd), odd, gathered.structs(odd), strict=True):
        assert array.sharding.is_fully_replicated
        assert (struct.shape, struct.sharding) == (array.shape, array.sharding)
        np.testing.assert_array_equal(array, leaf)


def _parts(leaves):
    return {path: dataclasses.astuple(_describe(leaf)) for path, leaf in leaves.items()}


def test_what_processes_give_is_compared(monkeypatch):
    """All that is at fault is listed; keys of dicts may come in any order."""
    rows = HostRows(2, {0: (0,), 1: (0,), 2: (1,)}, 0, "(batch=2)")

    def given(*others):
        def exchange(make, subject):
            return [make(), *map(_parts, others)]

        monkeypatch.setattr("torch_shard._train.placing.exchange", exchange)
        return {"batch['a']": np.zeros((2, 3)), "batch['b']": np.zeros(2), "batch['n']": 1}

    alike = given()
    compare_given(rows, given(dict(reversed(alike.items())), {**alike, "batch['a']": np.ones((2, 3))}))
    with refuses(r"float32 in process 0, \(2, 4\) float32 in process 1.\n  batch\['b'\]: .* nothing in process 2"):
        without = {path: leaf for path, leaf in alike.items() if path != "batch['b']"}
        compare_given(rows, given({**alike, "batch['a']": np.zeros((2, 4))}, without))
    with refuses(
        r"of the whole batch, and so the same in each process.\n\n  batch\['n'\]: 1 in process 0, 2 in process 2"
    ):
        compare_given(rows, given(alike, {**alike, "batch['n']": 2}))
    with refuses(
        r"must give the same ones.\n\n  batch\['a'\]: other values in process 0, other values in process 1.\n\n"
    ):
        compare_given(rows, given({**alike, "batch['a']": np.ones((2, 3))}, alike))


def test_what_is_known_of_signatures_does_not_grow_without_bound(monkeypatch):
    """As of programs, the last ones used are kept."""
    monkeypatch.setattr("torch_shard._train.placing.is_shared", lambda mesh: True)
    step = make_step(MESH)
    for length in range(1, KEPT + 9):
        placed = step.put({"x": torch.zeros(8, length), "rows": torch.arange(8)})
    content = step._placer.content
    assert len(step._placer._placements) == len(content) == KEPT
    assert set(content[placed.signature]) == {"the content of batch['rows']", "the content of batch['x']"}
