"""Which processes are ended that would wait in vain, and which are left alone."""

import types

import pytest

from tests.oracles.processes import run_alone
from torch_shard._hosts import session


def is_in_vain(**given):
    """Whether a process is seen to wait in vain."""
    computes = types.SimpleNamespace(is_ready=lambda: not given.get("computes", False))
    line = {"failure": (1, "OSError: no disk"), "ended": {}, "told": False, "dying": False, "saved": False}
    status = types.SimpleNamespace(waits=given.get("waits"))
    line |= {"loop": None, "running": computes, "status": status} | given
    return session.in_vain(types.SimpleNamespace(**line)) is not None


@pytest.mark.parametrize(
    ("given", "is_ended"),
    [
        ({"failure": None, "computes": True}, False),
        ({}, True),  # it may wait in a collective, for all that can be seen
        ({"computes": True}, True),
        ({"told": True}, False),  # it has caught the error
        ({"told": True, "computes": True}, False),  # and leaves alone what will never be there
        ({"told": True, "computes": True, "loop": "fit"}, True),  # fit reads it
        ({"told": True, "loop": "fit"}, False),  # fit saves or cleans up
        ({"told": True, "dying": True}, True),
        ({"told": True, "dying": True, "saved": True}, False),
        ({"told": True, "dying": True, "computes": True, "saved": True}, True),
        ({"told": True, "saved": True}, False),
        ({"told": True, "saved": True, "waits": (1, "save", 60.0)}, True),
        ({"failure": None, "ended": {1: "it came to its end"}, "computes": True}, True),
        ({"failure": None, "ended": {1: "it came to its end"}}, False),
    ],
)
def test_who_waits_in_vain_is_ended(given, is_ended):
    assert is_in_vain(**given) == is_ended


PROGRAM = """
import os, sys, time
from tests.hosts.test_peers import a_job
from torch_shard._hosts.peers import PeerError
from torch_shard._hosts.judge import Times
from torch_shard._hosts.session import watch

times = Times(beat=0.05, silent=0.5, grace=0.2)
pids = {}
for part in range(3):  # before there are threads
    if not (pid := os.fork()):
        break
    pids[pid] = part
else:
    statuses = {}
    while pids:
        pid, status = os.wait()
        statuses[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
    print([statuses[part] for part in range(3)])
    sys.exit()
with a_job(2, times) as (own, other):
    watch(own)
    other.close()
    while own.failure is None:
        time.sleep(0.01)
    if part == 0:  # the error is caught, and the program goes on with something else
        try:
            own.check()
        except PeerError:
            time.sleep(2)
        own.closing = True
        print("went on", flush=True)
        os._exit(0)
    if part == 1:  # it does not come to see the error
        time.sleep(30)
    try:
        own.check()
    except PeerError:
        sys.excepthook(*sys.exc_info())
        time.sleep(30)  # an end that takes too long
"""


def test_a_program_that_has_caught_the_error_goes_on():
    output = run_alone(PROGRAM).output
    assert output.endswith("\n[0, 75, 75]\n"), output
    assert "went on\n" in output
    lost = (
        "process 1 failed: no sign of life for 0 s (killed, stopped, or its host is gone) (last seen at its beginning)"
    )
    end = "torch_shard: exiting with status 75: lost a peer (process 0 is at its beginning)\n"
    assert output.count(f"\ntorch_shard: {lost}") == 2
    assert output.count(end) == 2
    assert f"PeerError: torch_shard: {lost}" in output
