"""A loop that all processes leave at the same step, whichever of them asks for it."""

import itertools
import threading
from typing import cast

from jax.sharding import Mesh

from torch_shard._hosts.peers import Peers
from torch_shard._hosts.processes import is_shared
from torch_shard._hosts.session import peers

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

    def __init__(self, own: Peers) -> None:
        self.number, self.wanted = next(_NUMBERS), cast(str | None, None)
        self.at: int | None = None
        self.reason: tuple[int, str] | None = None
        self._peers, self._position, self._still = own, 0, False
        self._changed = threading.Condition()
        own.loop = self

    @classmethod
    def of(cls, mesh: Mesh) -> "Gate | None":
        """The gate of a loop of steps on this mesh; None where one process is enough."""
        own = peers() if is_shared(mesh) else None
        return None if own is None else cls(own)

    def may_run(self, position: int) -> bool:
        """Tell whether the step from this position is to be taken; then it must be."""
        with self._changed:
            if self.wanted is not None:
                self._ask(position, self.wanted)
            self._wait()
            self._peers.check()
            if self.at is not None and position >= self.at:
                return False
            self._position = position + 1
            self._peers.status.where = f"in step {position + 1} of fit"
            return True

    def stop(self, position: int, reason: str) -> int | None:
        """Ask for a stop from a step that could not be taken, and wait for where it is."""
        self._peers.patience = self._peers.times.notice
        with self._changed:
            self._ask(position, reason)
            self._wait()
            return self.at

    def _ask(self, position: int, reason: str) -> None:
        """Stand still until all stop."""
        if self.reason is None:
            self._position, self._still = position, True
            self._peers.ask_stop(self.number, reason)

    def fail(self, error: BaseException) -> None:
        """Let the others know that this process can go on no more."""
        self._peers.fail(error)

    def leave(self) -> tuple[int, str] | None:
        """Which process asked for the stop that has ended the loop, and why; None if it was JAX."""
        self._peers.told = self._peers.saved = True
        return self.reason

    def close(self) -> None:
        """Leave the loop."""
        with self._changed:
            self._peers.loop, self._peers.status.where = None, "after fit"
            self._peers.patience = self._peers.times.wait

    def _wait(self) -> None:
        while self._still and self._peers.failure is None:
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
