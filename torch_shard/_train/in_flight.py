"""How far a loop that never waits may run ahead of devices that the CPU simulates."""

import collections

import jax
from jax.sharding import Mesh

from torch_shard._hosts import follow

_AHEAD = 2


class InFlightLimit:
    """Makes the host wait for the step before the last where several devices are simulated on the CPU, and only there.

    XLA's CPU client has one pool of threads, as many as devices or cores, from which it launches programs as well as
    runs them. With 32 programs in flight on a device, a launch waits in one of those threads; if the program that it
    waits for has none yet, nothing goes on, and XLA ends the process ("rendezvous ... Termination timeout"). The host
    is ahead by the most that is of use; what is left of the 32 is for what the user dispatches beside the step.
    """

    def __init__(self, mesh: Mesh) -> None:
        local = mesh.local_devices
        self._bounded = len(local) > 1 and local[0].platform == "cpu"
        self._running: collections.deque[jax.Array] = collections.deque()

    def follow(self, loss: jax.Array) -> None:
        """Note a step that was dispatched, by what it gave, and wait for earlier ones if there are too many."""
        follow(loss)
        if not self._bounded:
            return
        self._running.append(loss)
        if len(self._running) > _AHEAD:
            earlier = self._running.popleft()
            if not earlier.is_deleted():
                earlier.block_until_ready()
