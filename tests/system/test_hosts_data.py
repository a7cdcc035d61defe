"""Data of several processes: each gives or reads the rows of its own devices, and all give one batch."""

import pickle

import jax
import pytest

from tests.oracles.processes import run_processes
from tests.tables.host_data import X, make_meshes, train, values


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_gives_its_own_rows(num, tmp_path):
    expected = [
        values(train(mesh, X, accumulate_steps=2 - number // 2)[1])
        for number, mesh in enumerate(make_meshes(jax.devices()[: 2 * num]))
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
        num,
    )
