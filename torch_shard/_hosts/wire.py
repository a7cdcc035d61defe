"""Authenticated messages over a socket, between processes that know one secret; and how long each thing may take.

Both ends prove that they know the secret, each for a number that the other has just drawn, so that nothing that was
recorded is of use to another. What follows are frames: a length, an HMAC over the frame's number and its content, and
the content, which is data (`data.py`).
"""

import asyncio
import collections
import contextlib
import dataclasses
import hmac
import os
import secrets
import types
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from torch_shard._hosts.background import replace_descriptor
from torch_shard._hosts.data import pack, unpack

Schema = Mapping[str, tuple[type | types.UnionType, ...]]
"""The messages that one end takes: by kind, of what types their parts are."""

LIMIT = 1 << 24
"""Bytes that a message has at most."""

LOST = "connection lost (killed, or out of memory?)"
"""What is said of a process that is gone without giving a reason."""

_GREETING = b"torch_shard/hub2"
_NONCE = _PROOF = 32


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; each is read from the environment if it is there, as `TORCH_SHARD_SILENT_S`.

    Attributes:
        beat: From one sign of life to the next.
        silent: A process that gives none for so long counts as gone, and one that takes none too.
        grace: A process whose peer has failed has so long to come back from what it waits for.
        notice: One that waits for another in an agreement says so this often.
        wait: So long it waits for one that is alive.
        connect: To reach process 0 at the beginning.
        greet: Who connects has so long to prove that it belongs to the job.
    """

    beat: float = 0.5
    silent: float = 25.0
    grace: float = 5.0
    notice: float = 30.0
    wait: float = 1800.0
    connect: float = 30.0
    greet: float = 5.0

    @classmethod
    def of_environment(cls) -> "Times":
        """Give the defaults, and what the environment says otherwise."""
        names = (field.name for field in dataclasses.fields(cls))
        given = {name: os.environ.get(f"TORCH_SHARD_{name.upper()}_S") for name in names}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})


class WireError(Exception):
    """The other end is gone, or says what is no message: its text tells which."""


class Wire:
    """Messages to and fro; any thread may send, which never waits."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: tuple[bytes, bytes],
        timeout_s: float,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._sending, self._receiving = _Seal(keys[0]), _Seal(keys[1])
        self._queue: collections.deque[bytes] = collections.deque()
        self._filled = asyncio.Event()
        self._fault = LOST
        self._task = self.loop.create_task(self._send_all())

    def send(self, *message: object) -> None:
        """Send a message; to nobody, if the other end is gone: who receives hears of that."""
        self.send_packed(pack(list(message)))

    def send_packed(self, content: bytes) -> None:
        """Send a message that is encoded already, as for several."""
        if len(content) > LIMIT:
            raise ValueError(f"a message must have at most {LIMIT} bytes, found {len(content)}")
        if self._task.done():  # the other end took nothing any more
            return
        self._queue.append(content)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._filled.set)

    async def _send_all(self) -> None:
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._queue:
                    content = self._queue.popleft()
                    head = len(content).to_bytes(4, "big") + self._sending.next(content)
                    async with asyncio.timeout(self._timeout_s):
                        self._writer.writelines((head, content))
                        await self._writer.drain()
        except OSError as error:
            if isinstance(error, TimeoutError):
                self._fault = f"connection closed: no message was taken for {self._timeout_s:.0f} s (stopped?)"
            self._queue.clear()
            self._writer.transport.abort()

    async def flush(self) -> None:
        """Wait until all is on its way, or cannot be."""
        while not self._task.done() and (self._queue or self._writer.transport.get_write_buffer_size()):
            await asyncio.sleep(0.01)

    async def receive(self, schema: Schema) -> list[Any]:
        """Wait for a message."""
        try:
            head = await self._reader.readexactly(4 + _PROOF)
            if (size := int.from_bytes(head[:4], "big")) > LIMIT:
                raise ValueError(f"{size} bytes are announced, and a message has at most {LIMIT}")
            content = await self._reader.readexactly(size)
            if not hmac.compare_digest(head[4:], self._receiving.next(content)):
                raise ValueError("a message has a bad token")
            return _checked(unpack(content), schema)
        except (OSError, EOFError, ValueError) as error:
            self._end()
            fault = f"connection closed: {error}" if isinstance(error, ValueError) else self._fault
            raise WireError(fault) from error

    def close(self) -> None:
        """Let go of it: both ends hear of that, this one too, where it waits for a message."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()

    def abandon(self) -> None:
        """Let go of it in a forked process, where it stays the parent's."""
        replace_descriptor(self._writer.get_extra_info("socket").fileno())


class _Seal:
    """The HMAC of each message of one direction, of which none can be left out, repeated or moved."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next(self, content: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + content, "sha256")


def _checked(message: Any, schema: Schema) -> list[Any]:
    """Give a message that has the parts of its kind."""
    if not (isinstance(message, list) and message and isinstance(message[0], str) and message[0] in schema):
        raise ValueError("a message is of no known kind")
    kind, *parts = message
    types = schema[kind]
    if len(parts) != len(types) or not all(map(isinstance, parts, types)):
        raise ValueError(f"the message {kind!r} has other parts than it must have")
    return message


async def call(address: tuple[str, int], secret: bytes, rank: int, times: Times) -> Wire:
    """Connect to process 0."""
    async with _within(times.greet, "it does not answer in time"):
        reader, writer = await asyncio.open_connection(*address)
        try:
            greeting = await _read(reader, len(_GREETING) + _NONCE, "another program answers")
            if not greeting.startswith(_GREETING):
                raise ConnectionError("another program answers")
            nonce = secrets.token_bytes(_NONCE)
            talk = greeting + rank.to_bytes(4, "big") + nonce
            writer.write(talk[len(greeting) :] + _prove(secret, b"process", talk))
            proof = await _read(reader, _PROOF, "connection rejected: bad token")
            if not hmac.compare_digest(proof, _prove(secret, b"process 0", talk)):
                raise ConnectionError("another job answers: bad token")
        except BaseException:
            writer.transport.abort()
            raise
    keys = _prove(secret, b"from a process", talk), _prove(secret, b"from process 0", talk)
    return Wire(reader, writer, keys, times.silent)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, times: Times
) -> tuple[Wire, int]:
    """Take a call: the wire, and which process it is. Who calls must prove itself first."""
    greeting = _GREETING + secrets.token_bytes(_NONCE)
    try:
        async with _within(times.greet, "connection rejected: no token in time"):
            writer.write(greeting)
            heard = await _read(reader, 4 + _NONCE + _PROOF, "connection closed")
        talk = greeting + heard[:-_PROOF]
        if not hmac.compare_digest(heard[-_PROOF:], _prove(secret, b"process", talk)):
            raise ConnectionError("connection rejected: bad token")
        writer.write(_prove(secret, b"process 0", talk))
    except BaseException:
        writer.transport.abort()
        raise
    keys = _prove(secret, b"from process 0", talk), _prove(secret, b"from a process", talk)
    return Wire(reader, writer, keys, times.silent), int.from_bytes(heard[:4], "big")


def _prove(secret: bytes, purpose: bytes, talk: bytes) -> bytes:
    """What only one who knows the secret can say of what both ends have said; all of `talk` has one length."""
    return hmac.digest(secret, purpose + b"\0" + talk, "sha256")


@contextlib.asynccontextmanager
async def _within(seconds: float, fault: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TimeoutError(str(error) or fault) from error


async def _read(reader: asyncio.StreamReader, size: int, fault: str) -> bytes:
    try:
        return await reader.readexactly(size)
    except EOFError:
        raise ConnectionError(fault) from None
