"""Messages over a socket, between processes that know one secret; and how long each thing may take."""

import contextlib
import dataclasses
import hashlib
import os
import pickle
import socket
import threading
from collections.abc import Generator
from typing import Any

SIZE = 36
"""Bytes with which a process makes itself known: a digest of the secret, and its number."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; each is read from the environment if it is there, as `TORCH_SHARD_SILENT_S`.

    Attributes:
        beat: From one sign of life to the next.
        silent: A process that gives none for so long counts as gone.
        grace: A process whose peer has failed has so long to come back from what it waits for.
        notice: One that waits for another in an agreement says so this often.
        wait: So long it waits for one that is alive.
        connect: To reach process 0 at the beginning.
    """

    beat: float = 0.5
    silent: float = 25.0
    grace: float = 5.0
    notice: float = 30.0
    wait: float = 1800.0
    connect: float = 30.0

    @classmethod
    def of_environment(cls) -> "Times":
        """Give the defaults, and what the environment says otherwise."""
        names = (field.name for field in dataclasses.fields(cls))
        given = {name: os.environ.get(f"TORCH_SHARD_{name.upper()}_S") for name in names}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


class Wire:
    """Pickled messages to and fro; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lock = connection, threading.Lock()
        self._out, self._in = connection.makefile("wb"), connection.makefile("rb")

    def send(self, *message: object) -> None:
        """Send a message; to nobody, if the other end is gone: who receives hears of that."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            pickle.dump(message, self._out)
            self._out.flush()

    def receive(self) -> tuple[Any, ...]:
        """Wait for a message.

        Raises:
            EOFError: The other end is gone.
        """
        try:
            return pickle.load(self._in)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            for end in (self._in, self._out, self._socket):
                with contextlib.suppress(OSError):
                    end.close()
            raise EOFError from error

    def close(self) -> None:
        """Let go of it: both ends hear of that, this one too, where it waits for a message."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Let go of it in a forked process, where it stays the parent's."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


def call(address: tuple[str, int], secret: bytes, rank: int, timeout_s: float) -> Wire:
    """Connect to process 0.

    Raises:
        OSError: Nobody is there, or somebody else.
    """
    with _closing_if_it_fails(socket.create_connection(address, timeout_s)) as connection:
        connection.sendall(_digest(secret, b"call") + rank.to_bytes(4, "big"))
        if _read(connection, 32) != _digest(secret, b"answer"):
            raise ConnectionError(f"another program answers at {address[0]}:{address[1]}")
        return Wire(connection)


def answer(connection: socket.socket, secret: bytes, timeout_s: float) -> tuple[Wire, int]:
    """Take a call: the wire, and which process it is.

    Raises:
        OSError: It is a stranger.
    """
    connection.settimeout(timeout_s)
    with _closing_if_it_fails(connection):
        heard = _read(connection, SIZE)
        if heard[:32] != _digest(secret, b"call"):
            raise ConnectionError("a stranger called")
        connection.sendall(_digest(secret, b"answer"))
        return Wire(connection), int.from_bytes(heard[32:], "big")


@contextlib.contextmanager
def _closing_if_it_fails(connection: socket.socket) -> Generator[socket.socket, None, None]:
    try:
        yield connection
    except OSError:
        connection.close()
        raise


def _digest(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(purpose, key=secret, digest_size=32).digest()


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (more := connection.recv(size - len(found))):
            raise ConnectionError("it hung up")
        found += more
    return found
