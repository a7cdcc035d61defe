"""The channel, between threads that stand for processes: who comes together, and what the others are told."""

import concurrent.futures
import threading
import time

import pytest

from tests.oracles.hubs import beats, lines
from torch_shard._hosts.channel import PeerError
from torch_shard._hosts.stopping import Gate
from torch_shard._hosts.wire import Times


def together(*calls):
    """What each call gives, or the error that it raises."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_all_get_what_each_gives():
    with lines(3) as found:
        for number in range(3):
            given = [f"{number} of {line.rank}".encode() * 9 for line in found]
            pairs = zip(found, given, strict=True)
            calls = [lambda line=line, data=data: line.exchange(data, "a test") for line, data in pairs]
            assert together(*calls) == [given] * 3


def test_those_at_other_places_are_told_so():
    with lines(2) as (one, other):
        errors = together(lambda: one.exchange(b"", "save"), lambda: other.exchange(b"", "init"))
        assert {str(error) for error in errors} == {
            "torch_shard: the processes do not come together: they are not at the same place. Process 0 waits in save "
            "(after 0 programs). Process 1 waits in init (after 0 programs)."
        }
        assert together(lambda: one.exchange(b"", "save"), lambda: other.exchange(b"", "save")) == [[b"", b""]] * 2


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda line: line.fail("OSError: no disk"),
            "process 1 will not come: OSError: no disk|failed: OSError: no disk",
        ),
        (lambda line: line.leave(), "process 1 will not come: it came to its end"),
        (lambda line: line.wire.close(), r"connection lost \(killed, or out of memory\?\)"),
        (lambda line: beats(line), "process 1 has gone on without it. .* Process 1 is in its second step."),
        (lambda line: None, "no sign of life for 0 s"),
    ],
    ids=["failed", "ended", "killed", "went on", "stopped"],
)
def test_who_waits_in_vain_is_told_why(act, words):
    with lines(2) as (one, other):
        other.runs, other.where = 1, "in its second step"
        act(other)
        beating = threading.Event()
        threading.Thread(target=lambda: [beats(one) for _ in iter(lambda: beating.wait(0.1), True)]).start()
        with pytest.raises(PeerError, match=words):
            one.exchange(b"", "save")
        beating.set()


def test_a_wait_for_one_that_lives_has_an_end():
    with lines(2, Times(beat=0.05, silent=9)) as (one, _):
        one.patience = 0.2
        with pytest.raises(PeerError, match=r"process 1 did not come within 0 s. Process 0 waits in save"):
            one.exchange(b"", "save")


def gates(found):
    made = [Gate(line) for line in found]
    for gate in made:
        gate.number = 0
    return made


def test_all_stop_where_the_farthest_is():
    with lines(3) as found:
        made = gates(found)
        for gate, begun in zip(made, (4, 5, 4), strict=True):
            assert all(gate.may_run(position) for position in range(begun))
        assert made[2].stop(3, "OSError: no disk") == 5  # its fourth step could not be begun
        for gate in made[:2]:
            until = time.monotonic() + 5
            while gate.at is None and time.monotonic() < until:
                time.sleep(0.01)
            assert (gate.at, gate.leave()) == (5, (2, "OSError: no disk"))
            assert gate.may_run(4)
            assert not gate.may_run(5)


def test_none_stops_if_one_has_left_the_loop():
    with lines(2) as found:
        made = gates(found)
        made[0].close()
        assert made[1].stop(3, "SIGTERM") is None
        assert made[1].may_run(3)
