"""A loop that all processes leave at the same step, whichever of them gets a signal or fails."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Generator
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from torch_shard._hosts.peers import PeerError, Peers, describe
from torch_shard._hosts.processes import is_shared
from torch_shard._hosts.session import peers

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
    def of(cls, mesh: Mesh) -> "Gate":
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
        rank, reason = self.reason or (0, signal.SIGTERM.name)  # where JAX has heard of it
        if reason not in [number.name for number in SIGNALS]:
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
