"""A loop that all processes leave at the same step, whichever of them asks for it."""

import itertools
import threading
from typing import cast

from jax.sharding import Mesh

from torch_shard._hosts.channel import Channel
from torch_shard._hosts.processes import is_shared
from torch_shard._hosts.session import channel

_NUMBERS = itertools.count()


class Gate:
    """Where a loop asks, before each step, whether it is to be taken.

    Any process may ask for a stop. All of them then stand still before their next step until it is known how far each
    has come, and go on to where the farthest is; so none waits in a step that another does not take. Where nobody asks
    that costs nothing but a lock.

    Attributes:
        number: Of the loop, as all processes count them.
        wanted: Set by a signal's handler to ask for a stop.
        at: The position before which all stop; None while they do not.
        reason: Which process asked, and why.
    """

    def __init__(self, line: Channel) -> None:
        self.number, self.wanted = next(_NUMBERS), cast(str | None, None)
        self.at: int | None = None
        self.reason: tuple[int, str] | None = None
        self._line, self._position, self._still = line, 0, False
        self._changed = threading.Condition()
        line.loop = self

    @classmethod
    def of(cls, mesh: Mesh) -> "Gate | None":
        """The gate of a loop of steps on this mesh; None where one process is enough."""
        line = channel() if is_shared(mesh) else None
        return None if line is None else cls(line)

    def may_run(self, position: int) -> bool:
        """Tell whether the step from this position is to be taken; then it must be."""
        with self._changed:
            self._wait()
            self._line.check()
            if self.at is not None and position >= self.at:
                return False
            self._position = position + 1
            self._line.where = f"in step {position + 1} of fit"
            return True

    def stop(self, position: int, reason: str) -> int | None:
        """Ask for a stop from a step that could not be taken, and wait for where it is."""
        self._line.patience = self._line.times.notice
        with self._changed:
            self._position = position
            if self.reason is None:
                self._line.wire.send("stop", self.number, reason)
            while self.reason is None and self._line.failure is None:
                self._changed.wait(0.2)
            return self.at

    def fail(self, text: str) -> None:
        """Let the others know that this process can go on no more."""
        self._line.fail(text)

    def leave(self) -> tuple[int, str] | None:
        """Which process asked for the stop that has ended the loop, and why; None if it was JAX."""
        self._line.told = self._line.saved = True
        return self.reason

    def close(self) -> None:
        """Leave the loop."""
        with self._changed:
            self._line.loop, self._line.where = None, "after fit"
            self._line.patience = self._line.times.wait

    def _wait(self) -> None:
        while self._still and self._line.failure is None:
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
