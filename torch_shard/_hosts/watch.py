"""A thread that ends a process that would wait forever for one that has failed."""

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import jax

from torch_shard._hosts.judge import silent_for
from torch_shard._hosts.peers import STATUS, Peers, flush_streams


def watch(peers: Peers) -> None:
    """Begin to watch, and let the others know of an error that ends this process."""
    threading.Thread(target=_run, args=(peers,), name="torch_shard watch", daemon=True).start()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        peers.dying = True
        peers.fail(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and peers.failure is not None:
            note = "torch_shard: process {} failed: {}".format(*peers.failure)
            if note not in getattr(error, "__notes__", []):
                error.add_note(note)
        before(kind, error, where)

    sys.excepthook = tell


def _run(peers: Peers) -> None:
    times, last = peers.times, time.monotonic()
    since: float | None = None  # when it was first seen that waiting may be in vain
    while True:
        time.sleep(times.beat)
        now = time.monotonic()
        if peers.closing:
            if peers.exit_at is not None and now > peers.exit_at[0]:
                os._exit(peers.exit_at[1])
            continue
        if now - last > times.silent / 2:  # this process itself was stopped
            peers.heard += now - last
        last = now
        if now - peers.heard > times.silent and not peers.ended:
            peers.failure = peers.failure or (0, silent_for(times.silent))
        reason = in_vain(peers)
        since = None if reason is None else since or now
        if reason is not None and since is not None and now - since > times.grace and not peers.closing:
            flush_streams()
            end = f"exiting with status {STATUS}: lost a peer (process {peers.rank} is {peers.status.where})"
            os.write(2, f"\ntorch_shard: {reason}\ntorch_shard: {end}\n".encode())
            os._exit(STATUS)


def in_vain(peers: Peers) -> str | None:
    """Say what this process waits for in vain, as far as can be told.

    A program that has caught the error of a failed peer is left alone, whatever it does then: only `fit` reads what
    the devices will never give. JAX still ends it when it finds a process gone.
    """
    running: Any = peers.running  # whose is_ready JAX does not annotate
    computes = running is not None and not running.is_ready()
    if peers.failure is not None:
        has_caught = peers.told and not peers.dying
        is_stuck = peers.status.waits is not None  # in the store of a process 0 that is stopped; else it had raised
        if is_stuck or (computes and peers.loop is not None) or (not has_caught and (computes or not peers.saved)):
            return "process {} failed: {}".format(*peers.failure)
    elif peers.ended and computes:
        ended, how = next(iter(peers.ended.items()))
        return f"process {ended} has ended ({how}) while others go on."
    return None
