"""The wire: who is heard, and what others can do to the processes of a job, which is little."""

import contextlib
import logging
import pathlib
import pickle
import random
import socket
import threading
import time

import pytest

from tests.oracles.hubs import a_hub, beats, lines, some_ends
from torch_shard._hosts.channel import PeerError
from torch_shard._hosts.data import pack
from torch_shard._hosts.wire import Times, call

GREETING, PROOF = 16 + 32, 4 + 32 + 32
"""Bytes with which the hub greets, and with which a process answers."""
PATIENT = Times(beat=0.05, silent=5, greet=0.5)


class Command:
    """What executes a command in a process that unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def read(connection, size):
    """So many bytes, or fewer from one that closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < size and (more := connection.recv(size - len(found))):
            found += more
    return found


def is_closed(connection):
    connection.settimeout(5)
    return read(connection, 1 << 20) == b""


def exchange_together(channels, data=b"x"):
    found = {}
    threads = [
        threading.Thread(target=lambda line=line: found.update({line.rank: line.exchange(data, "a test")}))
        for line in channels
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


class Relay:
    """A listener to which a process comes instead of to the hub; it hands on what both say, and keeps the process's."""

    def __init__(self, place):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.place = self.server.getsockname()
        self.taken = b""
        self._hub = place
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            self.process = self.server.accept()[0]
            self.hub = socket.create_connection(self._hub)
            threading.Thread(target=self._copy, args=(self.hub, self.process), daemon=True).start()
            self._copy(self.process, self.hub)

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                self.taken += part if source is self.process else b""
                target.sendall(part)

    def close(self):
        for each in (self.server, self.process, self.hub):
            each.close()


@pytest.fixture
def command(tmp_path):
    """A pickle that leaves a trace where it is executed."""
    yield pickle.dumps(Command(tmp_path / "executed"))
    assert list(tmp_path.iterdir()) == []


def test_a_greeting_that_a_listener_has_taken_is_of_no_use(command):
    with a_hub(2, PATIENT) as place, some_ends() as ends, socket.create_server(("127.0.0.1", 0)) as thief:
        taken = []

        def listen():
            with thief.accept()[0] as process, socket.create_connection(place) as hub:
                process.sendall(read(hub, GREETING))
                taken.append(read(process, PROOF))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(ConnectionError):
            ends.connect(thief.getsockname(), 1, times=PATIENT)
        thread.join()
        assert len(taken[0]) == PROOF
        with socket.create_connection(place) as again:
            read(again, GREETING)
            again.sendall(taken[0] + command)
            assert is_closed(again)
        channels = [ends.line(place, rank, PATIENT) for rank in range(2)]
        assert exchange_together(channels) == {0: [b"x"] * 2, 1: [b"x"] * 2}


def test_a_whole_conversation_replayed_is_not_heard(command):
    with a_hub(3, PATIENT) as place, some_ends() as ends:
        relay = Relay(place)
        channels = [ends.line(at, rank, PATIENT) for rank, at in ((0, place), (1, relay.place))]
        channels[1].fail("OSError: no disk")
        with pytest.raises(PeerError, match="process 1 failed: OSError: no disk"):
            wait_for(channels[0].check)
        with socket.create_connection(place) as again:
            read(again, GREETING)
            again.sendall(relay.taken + command)
            assert is_closed(again)
        relay.close()


@pytest.mark.parametrize("what", ["again", "of its own"])
def test_who_sits_between_can_end_a_connection_and_not_speak_in_it(what, command):
    with a_hub(2, PATIENT) as place, some_ends() as ends:
        relay = Relay(place)
        channels = [ends.line(at, rank, PATIENT) for rank, at in ((0, place), (1, relay.place))]
        beats(channels[1])
        until = time.monotonic() + 5
        while len(relay.taken) <= PROOF and time.monotonic() < until:
            time.sleep(0.01)
        content = pack(["over", "failed", "a lie", "nowhere"])
        forged = len(content).to_bytes(4, "big") + bytes(32) + content + command
        relay.hub.sendall(relay.taken[PROOF:] if what == "again" else forged)
        with pytest.raises(PeerError, match="process 1 failed: connection closed: a message has a bad token"):
            wait_for(channels[0].check)
        relay.close()


def wait_for(check, timeout_s=5):
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        check()
        time.sleep(0.01)


def test_another_secret_is_refused_and_told_of(caplog):
    caplog.set_level(logging.WARNING)
    with a_hub(2, PATIENT) as place, some_ends() as ends:
        ends.line(place, 0, PATIENT)
        with pytest.raises(ConnectionError, match=r"^connection rejected: bad token$"):
            ends.connect(place, 1, secret=b"of another job", times=PATIENT)
        wait_for(lambda: None, 0.2)
        assert caplog.messages == ["connection rejected: bad token (from 127.0.0.1)"]


def test_a_process_that_has_come_is_not_replaced(caplog):
    with lines(2, PATIENT) as found, some_ends() as ends:
        place = found[0].wire._writer.get_extra_info("peername")  # of the hub, which listens no more
        with pytest.raises(ConnectionRefusedError):
            ends.connect(place, 1, times=PATIENT)
    with a_hub(3, PATIENT) as place, some_ends() as ends:
        first = [ends.line(place, rank, PATIENT) for rank in (0, 1)]
        for rank in (1, 3, 2**32 - 1):
            wire = ends.connect(place, rank, times=PATIENT)
            with pytest.raises(Exception, match="connection lost"):
                ends.run(wire.receive({}))
        assert first[0].failure is None


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (b"", "it does not answer in time"),
        (b"SSH-2.0-OpenSSH_9.2\r\n" * 9, "another program answers"),
        (b"torch_shard/hub2" + bytes(64), "another job answers: bad token"),
    ],
)
def test_another_program_at_the_place_of_the_hub_is_not_trusted(answers, words):
    """Also one that knows how we greet: the hub proves itself too."""
    with socket.create_server(("127.0.0.1", 0)) as other, some_ends() as ends:
        held = []

        def serve():
            held.append(other.accept()[0])
            held[0].sendall(answers)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(OSError, match=words):
            ends.run(call(other.getsockname(), b"of the job", 0, Times(greet=0.2)))
        held[0].close()


def test_fifty_silent_and_slow_strangers_delay_nobody():
    with a_hub(4, PATIENT) as place, some_ends() as ends, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place)) for _ in range(50)]
        over = threading.Event()

        def dribble():
            while not over.wait(0.05):
                for each in strangers[25:]:
                    with contextlib.suppress(OSError):
                        each.send(b"x")

        threading.Thread(target=dribble, daemon=True).start()
        began = time.monotonic()
        found = [ends.line(place, rank, PATIENT) for rank in range(4)]
        assert exchange_together(found) == {rank: [b"x"] * 4 for rank in range(4)}
        assert time.monotonic() - began < 5  # one after the other it were 25 s, as greet is 0.5 s
        for each in strangers:
            read(each, GREETING)
        assert all(map(is_closed, strangers))  # each at its deadline
        assert time.monotonic() - began < 8
        over.set()


def test_the_oldest_of_too_many_strangers_makes_room():
    patient = Times(greet=30, silent=5, beat=0.05)
    with a_hub(1, patient) as place, some_ends() as ends, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place)) for _ in range(66)]
        read(strangers[0], GREETING)
        assert is_closed(strangers[0])
        line = ends.line(place, 0, patient)
        assert line.exchange(b"x", "a test") == [b"x"]
        strangers[-1].settimeout(0.1)
        assert len(read(strangers[-1], GREETING)) == GREETING
        with pytest.raises(TimeoutError):
            strangers[-1].recv(1)


GARBAGE = {
    "noise": random.Random(0).randbytes(1000),
    "http": b"GET / HTTP/1.1\r\n\r\n" * 9,
    "lengths": (1 << 30).to_bytes(4, "big") * 25,
}


@pytest.mark.parametrize("says", GARBAGE.values(), ids=GARBAGE)
def test_garbage_of_strangers_ends_their_connections_alone(says, command):
    with lines_and_place(2) as (found, place), socket.create_connection(place) as stranger:
        stranger.sendall(says + command)
        read(stranger, GREETING)
        assert is_closed(stranger)
        assert exchange_together(found) == {0: [b"x"] * 3, 1: [b"x"] * 3, 2: [b"x"] * 3}


@contextlib.contextmanager
def lines_and_place(early):
    """Three processes, of which one comes only when it is asked for its data: until then the hub listens."""
    with a_hub(3, PATIENT) as place, some_ends() as ends:

        def make(rank):
            return ends.line(place, rank, PATIENT)

        found = [make(rank) for rank in range(early)]

        class Late:
            rank, closing = early, False

            def exchange(self, data, subject):
                found.append(make(self.rank))
                return found[-1].exchange(data, subject)

        yield [*found, Late()], place


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (lambda wire: raw(wire, b"garbage" * 99), "1734439522 bytes are announced, and a message has at most 16777216"),
        (lambda wire: raw(wire, (1 << 30).to_bytes(4, "big") + bytes(99)), "1073741824 bytes are announced"),
        (lambda wire: raw(wire, (9).to_bytes(4, "big") + bytes(99)), "a message has a bad token"),
        (lambda wire: wire.send_packed(b"\0\0\0\2[]"), "a message is of no known kind"),
        (lambda wire: wire.send_packed(b"\0\0\0\xff[]"), "the bytes are not a packed value"),
        (lambda wire: wire.send_packed(b"\0\1\0\0" + b"[" * (1 << 16)), "the bytes are not a packed value"),
        (lambda wire: wire.send_packed(pickle.dumps(Command("nowhere"))), "the bytes are not a packed value"),
        (lambda wire: wire.send("execute", "a command"), "a message is of no known kind"),
        (lambda wire: wire.send("beat", "one", "two"), "the message 'beat' has other parts than it must have"),
        (lambda wire: wire.send("exchange", 1, "s", 0, bytes(6 << 20), 1.0), "are too many for an exchange"),
    ],
)
def test_what_cannot_be_parsed_closes_that_connection_and_no_other(says, words):
    with lines(3, PATIENT) as found:
        found[1].closing = True  # it says nothing of its own end
        says(found[1].wire)
        for line in (found[0], found[2]):
            with pytest.raises(PeerError, match=f"process 1 failed: connection closed: .*{words}"):
                wait_for(line.check)
        others, until = {line: line.heard for line in (found[0], found[2])}, time.monotonic() + 5
        while not (hear := all(line.heard > then for line, then in others.items())) and time.monotonic() < until:
            time.sleep(0.01)
        assert hear


def raw(wire, content):
    wire.loop.call_soon_threadsafe(wire._writer.write, content)


def test_what_is_too_long_is_not_sent():
    with lines(1, PATIENT) as (line,), pytest.raises(ValueError, match="at most 16777216 bytes, found 1677"):
        line.wire.send("over", b"x" * (1 << 24), "")


def test_a_stopped_process_among_sixteen_delays_no_other():
    """It gives its part and takes nothing: what it is sent fills every buffer."""
    times = Times(beat=0.05, silent=4, greet=5)
    with lines(16, times) as found:
        stopped, others = found[7], found[:7] + found[8:]
        stopped.closing = True
        stopped.wire.loop.call_soon_threadsafe(stopped.wire._writer.transport.pause_reading)
        part = bytes(250_000)
        beating, gaps = threading.Event(), []

        def live():  # as the processes' own threads do
            while not beating.wait(0.05):
                beats(*found)
                gaps.append(time.monotonic() - min(line.heard for line in others))

        living = threading.Thread(target=live)
        living.start()
        for number in range(1, 5):  # 16 MB for it, which it does not take
            stopped.wire.send("exchange", number, "a test", 0, part, 60.0)
            began = time.monotonic()
            assert len(exchange_together(others, part)[0]) == 16
            assert time.monotonic() - began < 5  # of HMACs and copies
        for line in others:
            with pytest.raises(PeerError, match=r"process 7 failed: connection closed: no message was taken for 4 s"):
                wait_for(line.check, 20)
        beating.set()
        living.join()
        assert max(gaps) < 3  # less than `silent`: nobody was taken for gone
