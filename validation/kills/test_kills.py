"""What `tests/system` does with few kills, with twenty."""

from tests.system import test_faults, test_hosts
from tests.system.test_faults import uninterrupted  # noqa: F401  (a fixture)
from tests.system.test_hosts import whole  # noqa: F401


def test_a_run_of_one_process(uninterrupted):
    test_faults.assert_survives(*uninterrupted, num_kills=20)


def test_a_run_of_two_processes(whole, tmp_path):
    test_hosts.assert_survives(whole, tmp_path, num_kills=20)
