"""What a process tells the others of its job, and hears of them: agreements with an end, and news of failures.

It needs no collective of XLA, which would wait forever where one process does not come. Process 0 has a
`torch.distributed.TCPStore`. A thread of each process puts down there how this process stands, and takes what process 0
makes of that (`judge.py`); the program itself brings what is exchanged. Values are data, of which nothing is executed:
msgpack, with an extension for what that lacks.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import msgpack
import numpy as np
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torch_shard._common.caller import caller
from torch_shard._hosts.judge import TOGETHER, Judge, News, Refusal, Status, Times, standing, waits_in

_TORCH_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}


def pack(value: object) -> bytes:
    """Encode a value.

    Args:
        value: None, booleans, numbers, strings, bytes, NumPy arrays and tensors on the CPU, in lists, tuples and dicts.

    Raises:
        TypeError: Something else is in it.
    """
    try:
        # Strict, since a subclass would come out as another type.
        return msgpack.Packer(default=_encode, strict_types=True, unicode_errors="surrogatepass").pack(value)
    except (RecursionError, ValueError) as error:
        raise TypeError(f"a value is too large, or nested too deeply, to be sent to another process: {error}") from None


def unpack(data: bytes) -> Any:
    """Decode what `pack` gives."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")
    except (ArithmeticError, LookupError, RecursionError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"the bytes are not a packed value: {error}") from error


def _encode(value: object) -> msgpack.ExtType:
    return msgpack.ExtType(0, pack(_parts(value)))


def _parts(value: Any) -> list[object]:
    """What makes up a value that msgpack lacks, behind a word for its kind."""
    kind = type(value)
    if kind is tuple:
        return ["tuple", *value]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is int:  # of more than 64 bits
        return ["int", str(value)]
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_plain(value):
        whole = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return ["tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), data]
    if isinstance(value, np.ndarray | np.generic) and _is_of_bytes(value.dtype):
        return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.name, value.shape, value.tobytes()]
    raise TypeError(
        f"{kind.__qualname__} cannot be sent to another process: only None, booleans, numbers, strings, bytes, NumPy "
        "arrays and tensors can, in lists, tuples and dicts"
    )


def _is_of_bytes(dtype: np.dtype[Any]) -> bool:
    """Tell whether the name of a dtype gives it again, and its values are no pointers."""
    try:
        return np.dtype(dtype.name) == dtype and not dtype.hasobject
    except TypeError:
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _decode(code: int, data: bytes) -> Any:
    kind, *parts = unpack(data)
    if kind == "tuple":
        return tuple(parts)
    if kind in ("complex", "int"):
        return complex(*parts) if kind == "complex" else int(*parts)
    name, shape, content = parts
    if kind == "tensor":
        dtype, own = _TORCH_DTYPES[name], bytearray(content)
        return torch.frombuffer(own, dtype=dtype).reshape(shape) if own else torch.empty(shape, dtype=dtype)
    array = np.frombuffer(bytearray(content), np.dtype(name)).reshape(shape)
    return array if kind == "array" else array[()]


STATUS = 75
"""With which a process ends whose peer has failed: EX_TEMPFAIL of sysexits.h, "try again"."""
LOST = "the connection to it is lost (killed, or out of memory?)"


class PeerError(RuntimeError):
    """Another process has failed, or does not come: what this one waits for will never be."""


class Loop(Protocol):
    """A loop that all processes leave at the same step, by its number; see `Gate` in `processes.py`."""

    number: int
    reason: tuple[int, str] | None

    def pause(self) -> int:
        """Stand still, and say how many steps were begun."""
        ...

    def resume_until(self, at: int | None, rank: int, reason: str) -> None:
        """Go on, up to this position."""
        ...


class Peers:
    """The other processes of a job, as one of them knows them.

    Attributes:
        status: How this one stands, as the others are told.
        failure: Which process has failed, and how; None while none has.
        ended: Those that have ended in order.
        failed: Whether this one has told the others that it has.
        told: Whether the program knows that a process has failed: it has got the error.
        dying: Whether an error that nobody caught ends this one.
        saved: Whether all have stopped at one step, so that it waits for nobody any more.
        running: What the last program gives, perhaps not yet computed.
        loop: That of `fit` which is under way.
        heard: When the store gave the last answer.
        closing: Whether this process is at its orderly end.
        exit_at: When it is ended, where its end is hopeless, and with which status.
    """

    def __init__(
        self, store: TCPStore, prefix: str, rank: int, num: int, times: Times, neighbours: Mapping[int, int]
    ) -> None:
        self.rank, self.num, self.times = rank, num, times
        self.status, self.patience = Status(), times.wait
        self.failure: tuple[int, str] | None = None
        self.ended: dict[int, str] = {}
        self.failed = self.told = self.dying = self.saved = self.closing = False
        self.running: jax.Array | None = None
        self.loop: Loop | None = None
        self.heard = time.monotonic()
        self.exit_at: tuple[float, int] | None = None
        self._store: Any = store  # whose annotations have text alone, where it takes bytes
        self._prefix, self._neighbours = prefix, neighbours  # numbers of processes of this host, by rank
        self._judge = Judge(num, times) if rank == 0 else None
        self._number, self._one_at_a_time = 0, threading.Lock()
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="torch_shard peers", daemon=True)
        self._thread.start()

    # ---- what the program calls ----

    def exchange(self, data: bytes, subject: str) -> list[bytes]:
        """Bring together what each process gives, in order."""
        with self._one_at_a_time:
            self.check()
            place = subject, self.status.runs
            found = None
            try:
                # One that the others have given up, while this process was elsewhere, is none of its calls. Without
                # passing it by, this process would be one exchange behind for good.
                while found is None:
                    self._number += 1
                    self.status.waits = self._number, subject, self.patience
                    found = self._gather(self._key("exchange", self._number), place, pack([*place, data]))
            except RuntimeError as error:
                if not isinstance(error, PeerError):
                    self._lose(error)
                    self.check()
                raise
            finally:
                self.status.waits = None
        if len({(subject, runs) for subject, runs, _ in found}) > 1:
            where = standing([waits_in(subject, runs) for subject, runs, _ in found])
            raise PeerError(
                f"{caller()}: the processes do not come together: they are not at the same place. {where} {TOGETHER}"
            )
        return [data for *_, data in found]

    def _gather(self, key: str, place: tuple[str, int], content: bytes) -> list[Any] | None:
        """What each process gives under this key, once all have come; None if others gave it up from another place."""
        store, keys = self._store, [f"{key}/{rank}" for rank in range(self.num)]
        store.set(keys[self.rank], content)
        if store.add(f"{key}/came", 1) == self.num:
            store.compare_set(f"{key}/all", "", pack(None))
        pause = 0.001
        while not store.check([f"{key}/all"]):
            self.check()
            if 0 in self.ended:  # which would say of others that they do not come
                raise PeerError(f"{caller()}: process 0 will not come: {self.ended[0]}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if (refused := unpack(store.get(f"{key}/all"))) is not None:
            refusal = Refusal(**refused)
            if place not in refusal.places:
                return None
            self.told = self.told or self.failure is not None
            raise PeerError(f"{caller()}: {refusal.why}")
        found = [unpack(text) for text in store.multi_get(keys)]
        if store.add(f"{key}/read", 1) == self.num:
            for done in (*keys, f"{key}/came", f"{key}/all", f"{key}/read"):
                store.delete_key(done)
        return found

    def check(self) -> None:
        """Raise if another process has failed."""
        if self.failure is not None:
            self.told = True
            raise PeerError(f"{caller()}: process {self.failure[0]} failed: {self.failure[1]}")

    def ask_stop(self, loop: int, reason: str) -> None:
        """Ask for a stop of a loop in all processes."""
        self.status.asks = {loop: reason, **self.status.asks}
        self._awake.set()

    def fail(self, error: BaseException) -> None:
        """Let all others know that this process has failed, and will come to nothing more.

        An error of XLA may tell of a connection to a process that is gone: then it is known first which one it is.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            is_of_peer = re.search("(?i)connection|socket|peer|remote|gloo|nccl", str(error))
            until = time.monotonic() + (self.times.silent + 2 * self.times.beat if is_of_peer else 1.0)
            while self.failure is None and time.monotonic() < until:
                time.sleep(0.05)
        self.told = self.failed = True
        self.status.over = self.status.over or ("failed", describe(error))
        self._awake.set()

    def leave(self) -> None:
        """Let all others know that this process ends in order; where that is hopeless, end it soon all the same."""
        if self.closing:
            return
        self.status.over = self.status.over or ("ended", "it came to its end")
        if self.failed or self.failure is not None:
            # JAX's own end waits for all processes, minutes long
            self.exit_at = time.monotonic() + self.times.grace, 1 if self.failed else STATUS
        self.close()

    def close(self) -> None:
        """End the thread, which the end of Python must not meet within the store; its last word is how this ends."""
        self.closing = True
        self._awake.set()
        self._thread.join(2.0)

    # ---- the thread that talks with the store ----

    def _talk(self) -> None:
        try:
            while not self.closing:
                self._awake.clear()
                self._beat(time.monotonic())
                self.heard = time.monotonic()
                self._awake.wait(self.times.beat)
            if self.status.over is not None:
                self._beat(time.monotonic())
        except Exception as error:
            if not self.closing and 0 not in self.ended:
                self._lose(error)
                # JAX may end us any moment
                os.write(2, "torch_shard: process {} failed: {}\n".format(*self.failure or ()).encode())

    def _lose(self, error: Exception) -> None:
        """Note that process 0 is gone, and the store with it."""
        self.failure = self.failure or (0, f"{LOST}: {type(error).__name__}")

    def _beat(self, now: float) -> None:
        self.status.count += 1
        self.status.misses = [rank for rank, pid in self._neighbours.items() if not _is_running(pid)]
        self._store.set(self._key("of", self.rank), pack(vars(self.status)))
        if self._judge is not None:
            texts = self._store.multi_get([self._key("of", rank) for rank in range(self.num)])
            self._judge.look([Status(**unpack(text)) for text in texts], now)
            self._store.set(self._key("news"), pack(vars(self._judge.news)))
            for number, refusal in self._judge.refused.items():
                self._store.compare_set(self._key("exchange", number, "all"), "", pack(vars(refusal)))
        self._take(News(**unpack(self._store.get(self._key("news")))))

    def _take(self, news: News) -> None:
        for rank, how in news.failed.items():
            if rank != self.rank:
                self.failure = self.failure or (rank, how)
        self.ended = news.ended
        for number, (rank, reason) in news.asked.items():
            loop = self.loop if self.loop is not None and self.loop.number == number else None
            if number not in self.status.stands:
                self.status.stands[number] = None if loop is None else loop.pause()
                self._awake.set()
            if number in news.stops and loop is not None and loop.reason is None:
                loop.resume_until(news.stops[number], rank, reason)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def _is_running(pid: int) -> bool:
    """Tell whether a process of this host still runs, as Linux tells: one that is killed is missed at once."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it may not be looked at
        return True


def most_each(num: int) -> int:
    """Bytes that each of some processes may give in an exchange, so that one value holds what all give."""
    return min(1 << 20, (1 << 22) // num)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def flush_streams() -> None:
    """Write out what was printed, if that takes no second."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
