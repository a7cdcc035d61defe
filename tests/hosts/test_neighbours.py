"""Which processes of this host are still there."""

import subprocess
import sys
import time

import numpy as np

from torch_shard._hosts.neighbours import Neighbours, identity

OTHER = "from torch_shard._hosts.neighbours import identity\nprint(*identity(), flush=True)\ninput()"


def test_a_process_that_has_died_is_missed_also_before_its_parent_has_asked() -> None:
    own = identity()
    assert own.any()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    theirs = np.array(other.stdout.readline().split(), np.uint32)
    elsewhere = np.array([1, 2, 3, 4], np.uint32)  # where nobody can look
    found = Neighbours(np.stack([own, theirs, elsewhere]), 0)
    later = theirs + np.array([0, 0, 0, 1], np.uint32)  # of the same number
    again = Neighbours(np.stack([own, later]), 0)
    unknown = Neighbours(np.zeros((2, 4), np.uint32), 0)
    assert (found.gone(), again.gone(), unknown.gone()) == ([], [1], [])
    other.kill()
    until = time.monotonic() + 5
    while not found.gone() and time.monotonic() < until:  # nobody has waited for it
        time.sleep(0.01)
    assert found.gone() == [1]
    other.wait()
    assert found.gone() == [1]
    other.stdin.close()
    other.stdout.close()
