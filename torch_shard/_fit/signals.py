"""What stops a run between two steps: signals, to whichever process, and failures of others."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from torch_shard._hosts import Gate, PeerError, describe

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within a `with`, `SIGTERM` and `SIGINT` are noted instead of ending the process; a second one ends it.

    In another thread than the main one, where Python gives no signals, nothing changes. Of several processes all stop
    at the same step, whichever got the signal.

    Attributes:
        received: The first signal that came, or None.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._gate = gate

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self._gate is not None:
            self._gate.wanted = self.received.name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def may_run(self, position: int) -> bool:
        """Tell whether the step from this position is to be taken."""
        if self._gate is None:
            return self.received is None
        return not _preempted(position) and self._gate.may_run(position)

    def behind(self, position: int, error: Exception) -> int | None:
        """Let all processes stop because of an error in this one, and say how many steps it is behind the farthest."""
        at = position if self._gate is None else self._gate.stop(position, describe(error))
        return None if at is None else at - position

    def fail(self, error: Exception) -> None:
        """Let the other processes know that this one can go on no more, so that none waits for it."""
        if self._gate is not None:
            self._gate.fail(error)

    def leave(self, position: int) -> None:
        """Leave as the signal would have had it, now that all is saved.

        Raises:
            KeyboardInterrupt: For `SIGINT`.
            SystemExit: For `SIGTERM`, with the status that a shell gives it; also where another process got a signal.
            PeerError: Another process has failed.
        """
        rank, reason = (self._gate and self._gate.leave()) or (0, signal.SIGTERM.name)
        if reason not in [number.name for number in SIGNALS]:
            raise PeerError(f"fit: process {rank} failed: {reason}. All stopped, after {position} batches.")
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


def _preempted(position: int) -> bool:
    """Tell whether JAX has been told that a host is taken away, so that all are to stop here."""
    config: Any = jax.config
    return config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(position)
