"""Runs that are killed twenty times at random moments, of one process and of two; `tests/system` kills them less."""

import random
import time

from tests.system import test_hosts
from tests.system.test_faults import assert_same_end, run, survive, uninterrupted  # noqa: F401  (a fixture)
from tests.system.test_hosts import whole  # noqa: F401

NUM_KILLS = 20


def test_a_run_of_one_process(uninterrupted):
    start = time.perf_counter()
    assert run(uninterrupted.parent / "again") == 0  # with compiled programs at hand
    seconds = time.perf_counter() - start
    directory, moments, kills = uninterrupted.parent / "kills", random.Random(NUM_KILLS), 0
    while kills < NUM_KILLS:
        status = survive(directory, after_s=moments.uniform(0.2, 1.0) * seconds)
        kills += status != 0
        if status == 0:  # it came to its end before: let the next ones begin anew
            assert_same_end(directory, uninterrupted)
            directory = uninterrupted.parent / f"kills-{kills}"
    assert run(directory) == 0
    assert_same_end(directory, uninterrupted)


def test_a_run_of_two_processes(whole, tmp_path):
    test_hosts.assert_survives(whole, tmp_path, num_kills=NUM_KILLS)
