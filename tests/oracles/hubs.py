"""A hub in this process, and channels to it, between threads that stand for processes."""

import contextlib
import socket
from collections.abc import Iterator

from torch_shard._hosts.background import Background
from torch_shard._hosts.channel import Channel
from torch_shard._hosts.hub import Hub
from torch_shard._hosts.wire import Times, Wire, call

SECRET = b"of the job"
TIMES = Times(beat=0.05, silent=0.5, notice=30, greet=0.5)

Place = tuple[str, int]


@contextlib.contextmanager
def a_hub(num: int, times: Times = TIMES) -> Iterator[Place]:
    """A hub for so many processes, and where it listens."""
    held = socket.create_server(("127.0.0.1", 0))
    place = held.getsockname()
    hub = Hub(num, SECRET, times, [held])
    try:
        yield place
    finally:
        hub.close()


class Ends(Background):
    """A thread for the ends of wires that processes hold."""

    def __init__(self) -> None:
        super().__init__("test")
        self.wires: list[Wire] = []
        self.channels: list[Channel] = []

    def connect(self, place: Place, rank: int, *, secret: bytes = SECRET, times: Times = TIMES) -> Wire:
        """The wire of a process to the hub."""
        self.wires.append(self.run(call(place, secret, rank, times)))
        return self.wires[-1]

    def line(self, place: Place, rank: int, times: Times = TIMES) -> Channel:
        """The channel of a process to the hub."""
        self.channels.append(Channel(rank, self.connect(place, rank, times=times), times))
        return self.channels[-1]


@contextlib.contextmanager
def some_ends() -> Iterator[Ends]:
    """Ends that are closed at the end, which no channel takes for a failure."""
    ends = Ends()
    try:
        yield ends
    finally:
        for channel in ends.channels:
            channel.closing = True
        for wire in ends.wires:
            wire.close()
        ends.close()


@contextlib.contextmanager
def lines(num: int, times: Times = TIMES) -> Iterator[list[Channel]]:
    """The channels of all processes of a job."""
    with a_hub(num, times) as place, some_ends() as ends:
        yield [ends.line(place, rank, times) for rank in range(num)]


def beats(*found: Channel) -> None:
    """Give a sign of life of each."""
    for line in found:
        line.wire.send("beat", line.runs, line.where)
