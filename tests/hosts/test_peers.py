"""What processes exchange, between threads that stand for processes; and strangers at the place of the store."""

import concurrent.futures
import contextlib
import datetime
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from tests.oracles.processes import run_alone
from torch_shard._hosts.judge import TOGETHER, Times
from torch_shard._hosts.peers import PeerError, Peers, _is_running
from torch_shard._hosts.processes import Gate
from torch_shard._hosts.session import put_down

TIMES = Times(beat=0.05, silent=5.0)


def store_of(port: int, **options: object) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=30), wait_for_workers=False, **options)


@contextlib.contextmanager
def a_job(num: int, times: Times = TIMES) -> Iterator[list[Peers]]:
    """All processes of a job, and where their store is."""
    held = store_of(0, is_master=True)
    put_down(held, "job", num)
    found = [Peers(store_of(held.port) if rank else held, "job", rank, num, times, {}) for rank in range(num)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


def together(*calls: Callable[[], object]) -> list[object]:
    """What each call gives, or the error that it raises."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_all_get_what_each_gives_and_the_store_does_not_grow() -> None:
    with a_job(3) as found:
        for number in range(30):
            given = [f"{number} of {each.rank}".encode() * 9 for each in found]
            pairs = zip(found, given, strict=True)
            calls = [lambda each=each, data=data: each.exchange(data, "a test") for each, data in pairs]
            assert together(*calls) == [given] * 3
        until = time.monotonic() + 5
        while (keys := found[0]._store.num_keys()) > 5 and time.monotonic() < until:
            time.sleep(0.01)
        assert keys <= 5  # of three processes, the news, and a count of the store's own


def test_those_at_other_places_are_told_so() -> None:
    with a_job(2) as (one, other):
        errors = together(lambda: one.exchange(b"", "save"), lambda: other.exchange(b"", "init"))
        assert {str(error) for error in errors} == {
            "torch_shard: the processes do not come together: they are not at the same place. Process 0 waits in save "
            f"(after 0 programs). Process 1 waits in init (after 0 programs). {TOGETHER}"
        }
        assert together(lambda: one.exchange(b"", "save"), lambda: other.exchange(b"", "save")) == [[b"", b""]] * 2


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda peers: peers.fail(OSError("no disk")), "process 1 (will not come|failed): OSError: no disk"),
        (lambda peers: peers.leave(), "process 1 will not come: it came to its end"),
        (lambda peers: peers.close(), "process 1 (will not come|failed): no sign of life for 0 s"),
        (
            lambda peers: setattr(peers.status, "runs", 1),
            "process 1 has gone on without it. .* Process 1 is at its beg",
        ),
    ],
    ids=["failed", "ended", "killed", "went on"],
)
def test_who_waits_in_vain_is_told_why(act: Callable[[Peers], object], words: str) -> None:
    with a_job(2, Times(beat=0.05, silent=0.4)) as (one, other):
        act(other)
        with pytest.raises(PeerError, match=words):
            one.exchange(b"", "save")


def test_who_was_not_there_passes_by_what_the_others_gave_up() -> None:
    """Process 0 catches that process 1 has gone on without it; what both do then, they do together."""
    with a_job(2) as (one, other):
        other.status.runs = one.status.runs + 1
        for subject in ("save", "broadcast"):
            with pytest.raises(PeerError, match="process 1 has gone on without it"):
                one.exchange(b"", subject)
        one.status.runs = other.status.runs
        for data in (b"first", b"second"):
            calls = [lambda each=each, data=data: each.exchange(data, "init") for each in (one, other)]
            assert together(*calls) == [[data, data]] * 2


def test_who_comes_too_late_is_told_that_the_others_gave_up() -> None:
    with a_job(2) as (one, other):
        one.patience = 0.2
        with pytest.raises(PeerError, match=r"process 1 did not come within"):
            one.exchange(b"", "save")
        with pytest.raises(PeerError, match=r"process 1 did not come within"):
            other.exchange(b"", "save")
        calls = [lambda each=each: each.exchange(b"again", "save") for each in (one, other)]
        assert together(*calls) == [[b"again"] * 2] * 2


def gates(found: list[Peers]) -> list[Gate]:
    made = [Gate(each) for each in found]
    for gate in made:
        gate.number = 0
    return made


def wait_until_told(gate: Gate) -> None:
    """Wait for the news of a stop, which another thread brings."""
    until = time.monotonic() + 5
    while gate.at is None and time.monotonic() < until:
        time.sleep(0.01)


def test_all_stop_where_the_farthest_is() -> None:
    with a_job(3) as found:
        made = gates(found)
        for gate, begun in zip(made, (4, 5, 4), strict=True):
            assert all(gate.may_run(position) for position in range(begun))
        assert made[2].behind(3, OSError("no disk")) == 2  # its fourth step could not be begun
        for gate in made[:2]:
            wait_until_told(gate)
            assert (gate.at, gate.reason) == (5, (2, "OSError: no disk"))
            assert gate.may_run(4)
            assert not gate.may_run(5)


def test_who_is_signalled_stands_still_until_all_stop() -> None:
    with a_job(2) as found:
        one, other = gates(found)
        assert all(gate.may_run(position) for gate in (one, other) for position in range(3))
        other.received = signal.SIGTERM
        assert together(lambda: other.may_run(3), lambda: one.may_run(3)) in ([False, False], [True, True])
        assert not other.may_run(4)
        wait_until_told(one)
        assert (one.at, other.at) in ((3, 3), (4, 4))
        assert other.reason == (1, "SIGTERM")
        assert other.signalled == "SIGTERM to process 1"


def test_none_stops_if_one_has_left_the_loop() -> None:
    with a_job(2) as found:
        made = gates(found)
        made[0].close()
        assert made[1].behind(3, OSError("no disk")) is None
        assert made[1].may_run(3)


def test_a_process_that_has_died_is_missed_also_before_its_parent_has_asked() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _is_running(other.pid)
    other.kill()
    until = time.monotonic() + 5
    while _is_running(other.pid) and time.monotonic() < until:  # nobody has waited for it
        time.sleep(0.01)
    assert not _is_running(other.pid)
    other.wait()
    assert not _is_running(other.pid)
    assert other.stdin is not None
    other.stdin.close()


MAGIC = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # with which a client of a store begins
NONSENSE = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), MAGIC + b"\xff" * 60, MAGIC + b"\x01" + b"\xff" * 60]
NONSENSE += [MAGIC + b"\x02" + struct.pack("<Q", 1 << 62)]


def test_strangers_neither_stall_nor_end_a_job() -> None:
    with a_job(2) as found, contextlib.ExitStack() as stack:
        for text in [*NONSENSE, *[b""] * 50]:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", found[0]._store.port)))
            stranger.sendall(text)
        begun = time.monotonic()
        for number in range(9):
            data = str(number).encode()
            calls = [lambda each=each, data=data: each.exchange(data, "a test") for each in found]
            assert together(*calls) == [[data, data]] * 2
        assert time.monotonic() - begun < Times().silent  # PyTorch logs each with a stack, which it looks up once
        assert [each.failure for each in found] == [None, None]


FORKS = """
from tests.hosts.test_peers import a_job, together
from torch_shard._hosts.session import _forget
import functools, time

with a_job(2) as found:
    for each in found:
        os.register_at_fork(after_in_child=functools.partial(_forget, each))
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        assert all(each.closing for each in found)
        found[1].fail(OSError("of the child"))  # is heard by nobody
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    time.sleep(0.5)
    assert together(*(lambda each=each: each.exchange(b"x", "a test") for each in found)) == [[b"x"] * 2] * 2
    print("done", flush=True)
    os._exit(0)
"""


def test_a_forked_process_leaves_the_store_to_its_parent() -> None:
    ended = run_alone(FORKS)
    assert (ended.output, ended.status) == ("done\n", 0)
