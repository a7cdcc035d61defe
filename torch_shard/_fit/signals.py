"""Signals that ask a run to stop, heard between two steps."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within a `with`, `SIGTERM` and `SIGINT` are noted instead of ending the process; a second one ends it.

    In another thread than the main one, where Python gives no signals, nothing changes.

    Attributes:
        received: The first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def leave(self) -> None:
        """Leave as the signal would have had it, now that all is saved.

        Raises:
            KeyboardInterrupt: For `SIGINT`.
            SystemExit: For `SIGTERM`, with the status that a shell gives it; also where another process got a signal.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)
