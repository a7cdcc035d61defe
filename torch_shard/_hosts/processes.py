"""What the processes of a job bring together, decide as one and take over from the first, and where all stop."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from torch_shard._common.caller import caller, public
from torch_shard._common.simulated import wait_if_simulated
from torch_shard._common.validate import check_module
from torch_shard._hosts.peers import PeerError, Peers, describe, most_each, pack, unpack
from torch_shard._hosts.session import met, peers

R = TypeVar("R")


def agree(flag: bool) -> bool:
    """Tell whether any process says so."""
    return any(exchange(lambda: flag))


def exchange(make: Callable[[], R], subject: str | None = None) -> list[R]:
    """Bring together what each process makes, in order; where one fails, all raise, and no process waits forever.

    Values of many bytes go by a collective, once all processes are known to be there.

    Args:
        make: Called once; gives a value that `pack` takes.
        subject: What it is about, for errors; by default the public function under way.

    Raises:
        PeerError: Another process does not come.
        RuntimeError: `make` has raised in another process.
    """
    own = peers()
    if own is None:
        return [make()]
    failure = None
    try:
        data = pack(["value", make()])
    except Exception as error:
        failure, data = error, pack(["failure", describe(error)])
    first = data if len(data) <= most_each(jax.process_count()) else pack(["size", len(data)])
    found = [unpack(each) for each in own.exchange(first, subject or caller())]
    if failure is not None:
        raise failure
    for process, (kind, value) in enumerate(found):
        if kind == "failure":
            raise RuntimeError(f"{caller()}: process {process} failed: {value}")
    if sizes := [value for kind, value in found if kind == "size"]:
        found = [unpack(each) for each in _gather(data, max(sizes))]
    return [value for _, value in found]


def _gather(data: bytes, size: int) -> list[bytes]:
    """What each process gives, over the devices: `size` bytes at most, with their number in front."""
    row = np.zeros(8 + size, np.uint8)
    row[:8] = np.frombuffer(len(data).to_bytes(8, "big"), np.uint8)
    row[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(row)
    return [each[8 : 8 + int.from_bytes(each[:8].tobytes(), "big")].tobytes() for each in rows]


def is_shared(mesh: Mesh) -> bool:
    """Tell whether a mesh has devices of every process of a job of several."""
    num = jax.process_count()
    return num > 1 and len({device.process_index for device in mesh.devices.flat}) == num


def begin_run() -> None:
    """Note that a program over all processes is begun, which all must begin."""
    if (own := peers()) is not None:
        own.check()
        own.status.runs += 1


def check_peers() -> None:
    """Raise if another process has failed."""
    if (own := met()) is not None:
        own.check()


def follow(array: jax.Array) -> None:
    """Note what the last program gives, for which this process waits as long as it is not there."""
    if (own := met()) is not None:
        own.running = array
    wait_if_simulated(array)


MOST = 8
"""Differences that an error names."""


class ProcessMismatchError(ValueError):
    """Processes of a job differ where they must be alike."""


def compare(subject: str, facts: Mapping[str, object], *, advice: Callable[[str], str] = lambda name: "") -> None:
    """Raise in every process if a fact differs between any two.

    Args:
        subject: What they are about.
        facts: By name; those that only some processes have, as parts of an array, are compared among these. What is
            shown in errors is `str`, and bytes are digests, which are not shown.
        advice: What to do, by the name of the first fact that differs.
    """
    if jax.process_count() == 1:
        return
    given = {name: fact if isinstance(fact, bytes) else str(fact) for name, fact in facts.items()}
    whole = digest(repr(list(given.items())).encode())
    if len(set(exchange(lambda: whole, subject))) == 1:
        return
    tables = exchange(lambda: given, subject)
    names = dict.fromkeys(name for table in tables for name in table)
    faults = {name: fault for name in names if (fault := _fault(name, tables)) is not None}
    if faults:
        shown = [*list(faults.values())[:MOST], *([f"and {len(faults) - MOST} more"] if len(faults) > MOST else [])]
        raise ProcessMismatchError(f"{caller()}: {'; '.join(shown)}. {advice(next(iter(faults)))}".strip())


def digest(data: bytes | memoryview) -> bytes:
    """What stands for bytes: equal bytes have equal ones, and others have others."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _fault(name: str, tables: list[dict[str, str | bytes]]) -> str | None:
    """Say between which processes a fact differs, of those that have it."""
    having = [(process, table[name]) for process, table in enumerate(tables) if name in table]
    (first, wanted), *others = having
    for process, found in others:
        if found != wanted:
            values = "" if isinstance(found, bytes) or isinstance(wanted, bytes) else f" ({wanted} and {found})"
            return f"{name} differs between process {first} and {process}{values}"
    return None


BLOCK = 1 << 24
"""Bytes that are sent at a time."""


@public
def broadcast(model: torch.nn.Module) -> None:
    """Give every process the parameters and buffers that process 0 has; every process must call it.

    Values are written into the module's own tensors, bit for bit. With one process nothing happens.

    Args:
        model: On the CPU; of the same entries, shapes and dtypes in all processes.

    Raises:
        TypeError: It is not a module.
        ValueError: Entries are elsewhere than on the CPU, or differ between processes in name, shape or dtype.

    Example:
        >>> import torch, torch_shard as ts
        >>> model = torch.nn.Linear(4, 1)  # each process draws values of its own
        >>> ts.broadcast(model)
    """
    model = check_module("model", model)
    held = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    if elsewhere := [f"{name} ({tensor.device.type})" for name, tensor in held.items() if tensor.device.type != "cpu"]:
        raise ValueError(
            f"broadcast: entries must be on the CPU, and these are not: {', '.join(elsewhere)}. Call it before the "
            "model is moved or placed."
        )
    if jax.process_count() == 1:
        return
    facts = {f"the shape of {name}": f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in held.items()}
    compare("broadcast", facts | {"the names of the entries": ", ".join(held)})
    for tensor in held.values():
        _take_over(tensor)


def _take_over(tensor: torch.Tensor) -> None:
    """Write what process 0 has into a tensor."""
    own = tensor.detach().contiguous().reshape(-1)
    flat = own.view(torch.uint8).numpy() if own.numel() else np.zeros(0, np.uint8)
    for start in range(0, flat.size, BLOCK):
        block = np.zeros(min(BLOCK, _power_of_two(flat.size)), np.uint8)  # of few sizes: each is a program of its own
        part = flat[start : start + BLOCK]
        block[: part.size] = part
        part[:] = np.asarray(multihost_utils.broadcast_one_to_all(block))[: part.size]
    with torch.no_grad():
        tensor.copy_(own.view_as(tensor) if own.numel() else tensor)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()


SIGNALS = (signal.SIGTERM, signal.SIGINT)

_NUMBERS = itertools.count()


class Gate:
    """Where a loop asks, before each step, whether it is to be taken.

    Any process may ask for a stop. All of them then stand still before their next step until it is known how far each
    has come, and go on to where the farthest is; so none waits in a step that another does not take. Where nobody asks
    that costs nothing but a lock.

    Args:
        own: The processes that run the loop together; None for one alone.

    Attributes:
        number: Of the loop, as all processes count them.
        received: The first signal that came to this one.
        at: The position before which all stop; None while they do not.
        reason: Which process asked, and why.
    """

    def __init__(self, own: Peers | None) -> None:
        self.number = 0 if own is None else next(_NUMBERS)
        self.received: signal.Signals | None = None
        self.at: int | None = None
        self.reason: tuple[int, str] | None = None
        self._peers, self._position, self._still = own, 0, False
        self._changed = threading.Condition()
        if own is not None:
            own.loop = self

    @classmethod
    def of(cls, mesh: Mesh) -> Gate:
        """The gate of a loop of steps on this mesh."""
        return cls(peers() if is_shared(mesh) else None)

    @contextlib.contextmanager
    def signals(self) -> Generator[None, None, None]:
        """Note `SIGTERM` and `SIGINT` within, instead of ending the process; a second one ends it.

        In another thread than the main one, where Python gives no signals, nothing changes.
        """
        before: dict[signal.Signals, Any] = {}

        def note(number: int, frame: object) -> None:
            self.received = signal.Signals(number)
            restore()

        def restore() -> None:
            while before:
                number, handler = before.popitem()
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

        if threading.current_thread() is threading.main_thread():
            before |= {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield
        finally:
            restore()

    @property
    def signalled(self) -> str | None:
        """The signal that ends the loop, and which process got it; None where a failure ends it."""
        if self._peers is None:
            return None if self.received is None else self.received.name
        rank, reason = self.reason or (None, signal.SIGTERM.name)  # where JAX has heard of it
        if reason not in [number.name for number in SIGNALS]:
            return None
        return reason if rank is None else f"{reason} to process {rank}"

    def may_run(self, position: int) -> bool:
        """Tell whether the step from this position is to be taken; then it must be."""
        if self._peers is None:
            return self.received is None
        if _preempted(position):
            return False
        with self._changed:
            if self.received is not None:
                self._ask(self._peers, position, self.received.name)
            self._wait(self._peers)
            self._peers.check()
            if self.at is not None and position >= self.at:
                return False
            self._position = position + 1
            self._peers.status.where = f"in step {position + 1} of fit"
            return True

    def behind(self, position: int, error: Exception) -> int | None:
        """Let all processes stop because of an error in this one, and say how many steps it is behind the farthest."""
        if self._peers is None:
            return 0
        self._peers.patience = self._peers.times.notice
        with self._changed:
            self._ask(self._peers, position, describe(error))
            self._wait(self._peers)
            return None if self.at is None else self.at - position

    def fail(self, error: BaseException) -> None:
        """Let the others know that this process can go on no more, so that none waits for it."""
        if self._peers is not None:
            self._peers.fail(error)

    def leave(self, position: int) -> None:
        """Leave as the signal would have had it, now that all is saved.

        Raises:
            KeyboardInterrupt: For `SIGINT`.
            SystemExit: For `SIGTERM`, with the status that a shell gives it; also where another process got a signal.
            PeerError: Another process has failed.
        """
        if self._peers is not None:
            self._peers.told = self._peers.saved = True
        if self.reason is not None and self.signalled is None:
            rank, reason = self.reason
            raise PeerError(f"fit: process {rank} failed: {reason}. All stopped, after {position} batches.")
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)

    def close(self) -> None:
        """End the loop."""
        if self._peers is not None:
            self._peers.loop, self._peers.status.where = None, "after fit"
            self._peers.patience = self._peers.times.wait

    def _ask(self, own: Peers, position: int, reason: str) -> None:
        """Stand still until all stop."""
        if self.reason is None:
            self._position, self._still = position, True
            own.ask_stop(self.number, reason)

    def _wait(self, own: Peers) -> None:
        while self._still and own.failure is None:
            self._changed.wait(0.2)

    def pause(self) -> int:
        """Stand still, and say how many steps were begun."""
        with self._changed:
            self._still = True
            return self._position

    def resume_until(self, at: int | None, rank: int, reason: str) -> None:
        """Go on, up to this position."""
        with self._changed:
            self.at, self.reason, self._still = at, (rank, reason), False
            self._changed.notify_all()


def _preempted(position: int) -> bool:
    """Tell whether JAX has been told that a host is taken away, so that all are to stop here."""
    config: Any = jax.config
    return config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(position)
