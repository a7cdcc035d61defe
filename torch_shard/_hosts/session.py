"""The channel of this job: opened at the first need, by one broadcast of where process 0 listens and of a secret."""

import atexit
import functools
import hmac
import json
import os
import secrets
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from torch_shard._common.caller import caller
from torch_shard._hosts.background import Background
from torch_shard._hosts.channel import Channel, describe
from torch_shard._hosts.hub import Hub
from torch_shard._hosts.initialize import coordinator
from torch_shard._hosts.interfaces import open_sockets
from torch_shard._hosts.watch import watch
from torch_shard._hosts.wire import Times, Wire, call

_LENGTH = 2048
"""Bytes of what is made known at the beginning."""
_PLACES = 8
"""Addresses of process 0 that are made known at most."""
_ROUNDS = 3
"""So often each address is tried."""


def channel() -> Channel | None:
    """The channel of this job, opened by the first call, to which all processes must come; None of one process."""
    return _open() if jax.process_count() > 1 else None


def opened() -> Channel | None:
    """The channel of this job if it is open."""
    return _open() if _open.cache_info().currsize else None


@functools.cache
def _open() -> Channel:
    times = Times.of_environment()
    rank, num = jax.process_index(), jax.process_count()
    drawn = secrets.token_bytes(32)
    hub, known = _open_hub(num, job_secret(drawn), times) if rank == 0 else (None, {})
    told = _broadcast({**known, "secret": drawn.hex()})
    if "error" in told:
        raise RuntimeError(f"{caller()}: process 0 cannot listen for the other processes: {told['error']}")
    secret = job_secret(bytes.fromhex(told["secret"]))
    background = Background("torch_shard channel")
    wire, faults = _reach(background, told["places"], secret, rank)
    reached = multihost_utils.process_allgather(np.array(wire is not None))
    if wire is None or not reached.all():
        background.close()
        if hub is not None:
            hub.close()
        missing = [process for process, came in enumerate(reached.tolist()) if not came]
        places = ", ".join(f"{host} port {port}" for host, port in told["places"])
        raise RuntimeError(
            f"{caller()}: processes {missing} do not reach process 0, over which the processes of a job agree, at "
            f"{places}{': ' if faults else ''}{'; '.join(faults)}. Let the hosts of a job reach each other's ports, as "
            "PyTorch's and JAX's own coordinators need it too. If process 0 has another address for them, set "
            "TORCH_SHARD_HOST to it there. TORCH_SHARD_SECRET, if it is set, must be the same in all processes."
        )
    line = Channel(rank, wire, times)
    watch(line)
    atexit.register(line.leave)
    os.register_at_fork(after_in_child=functools.partial(_forget, line, background, hub))
    return line


def job_secret(drawn: bytes) -> bytes:
    """The secret of the job: what process 0 has drawn, and what the launcher has given to all, if it has."""
    return hmac.digest(drawn, os.environ.get("TORCH_SHARD_SECRET", "").encode(), "sha256")


def _open_hub(num: int, secret: bytes, times: Times) -> tuple[Hub | None, dict[str, Any]]:
    """Start the hub; what the others are told of it, or that it cannot be."""
    try:
        sockets = open_sockets(coordinator())
        places = [held.getsockname()[:2] for held in sockets[:_PLACES]]
        return Hub(num, secret, times, sockets), {"places": places}
    except Exception as error:
        return None, {"error": describe(error)}


def _broadcast(known: dict[str, Any]) -> dict[str, Any]:
    """What process 0 knows, over the devices."""
    text = json.dumps(known).encode()
    block = np.zeros(_LENGTH, np.uint8)
    block[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(block)).tobytes().rstrip(b"\0"))


def _reach(
    background: Background, places: list[tuple[str, int]], secret: bytes, rank: int
) -> tuple[Wire | None, list[str]]:
    """The first of these places where process 0 is, and what went wrong at the others."""
    times = Times.of_environment()
    faults: dict[str, None] = {}
    until = time.monotonic() + times.connect
    for host, port in places * _ROUNDS:
        if time.monotonic() > until:
            break
        try:
            return background.run(call((host, port), secret, rank, times)), []
        except OSError as error:
            faults[f"{host}: {error}"] = None
    return None, list(faults)


def _forget(line: Channel, background: Background, hub: Hub | None) -> None:
    """Leave the channel to the process from which this one was forked, and let its end be seen there."""
    line.closing = True
    background.abandon()
    line.wire.abandon()
    if hub is not None:
        hub.abandon()
    _open.cache_clear()
