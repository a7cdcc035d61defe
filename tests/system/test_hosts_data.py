"""Data of several processes: each gives or reads the rows of its own devices, and all give one batch."""

import json
import pickle

import jax
import numpy as np
import torch

import torch_shard as ts
from tests.oracles.processes import run_processes
from tests.tables.host_data import ROWS, STOPS, Noted, X, fit_dataset, make_meshes, train, values
from torch_shard._fit.dataset import order_of


def test_each_process_gives_its_own_rows(tmp_path):
    expected = [
        values(train(mesh, X, accumulate_steps=2 - number // 2)[1])
        for number, mesh in enumerate(make_meshes(jax.devices()[:4]))
    ]
    (tmp_path / "expected").write_bytes(pickle.dumps(expected))
    run_processes(
        f"""
        import pickle
        from pathlib import Path
        from tests.tables import host_data as t

        t.check_shards(rank)
        t.check_local_batches(pickle.loads(Path({str(tmp_path / "expected")!r}).read_bytes()))
        t.check_last_batch()
        t.check_mistakes(rank)
        """,
        2,
    )


def test_each_process_reads_its_own_rows(tmp_path):
    """A run over a dataset in one process, then in two, then in one again: the same rows, in the same order."""
    mesh, rows = ts.make_mesh(batch=4, model=2), ts.Rows(Noted(), batch_size=8)
    order = torch.cat([order_of(rows, 0, epoch) for epoch in range(5)]).tolist()
    fit_dataset(mesh, Noted(), tmp_path / "checkpoints", STOPS[0])
    run_processes(
        f"""
        from pathlib import Path
        from tests.tables import host_data as t

        directory = Path({str(tmp_path)!r})
        t.check_dataset(rank, directory)
        t.check_evaluation(rank, directory)
        t.check_samplers(rank)
        """,
        2,
    )
    read = [json.loads((tmp_path / f"read{rank}").read_text()) for rank in range(2)]
    by_batch = np.concatenate([np.reshape(each, (STOPS[1] - STOPS[0], -1)) for each in read], axis=1)
    assert by_batch.ravel().tolist() == order[8 * STOPS[0] : 8 * STOPS[1]]
    assert sorted(by_batch[1:3].ravel().tolist()) == list(range(ROWS))  # of an epoch, over all processes

    last, undisturbed = Noted(), Noted()
    state = fit_dataset(mesh, last, tmp_path / "checkpoints", STOPS[2])
    assert last.read == order[8 * STOPS[1] : 8 * STOPS[2]]
    expected = fit_dataset(mesh, undisturbed, tmp_path / "undisturbed", STOPS[2])
    for name, value in values(expected).items():  # sums of another order, over nine steps of Adam
        np.testing.assert_allclose(values(state)[name], value, rtol=1e-3, atol=1e-4)
