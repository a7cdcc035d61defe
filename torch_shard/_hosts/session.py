"""The peers of this job: met at the first need, by one broadcast of where process 0 has its store."""

import atexit
import datetime
import functools
import json
import os
import secrets
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torch_shard._common.caller import caller
from torch_shard._hosts.initialize import coordinator
from torch_shard._hosts.interfaces import listen
from torch_shard._hosts.judge import News, Status
from torch_shard._hosts.neighbours import Neighbours, identity
from torch_shard._hosts.peers import Peers, describe
from torch_shard._hosts.times import Times
from torch_shard._hosts.watch import watch

_LENGTH = 2048
"""Bytes of what is made known at the beginning."""


def peers() -> Peers | None:
    """The peers of this job, met by the first call, to which all processes must come; None of one process."""
    return _meet() if jax.process_count() > 1 else None


def met() -> Peers | None:
    """The peers of this job if they have met."""
    return _meet() if _meet.cache_info().currsize else None


@functools.cache
def _meet() -> Peers:
    times, rank, num = Times.of_environment(), jax.process_index(), jax.process_count()
    store, known = _serve(num, times) if rank == 0 else (None, {})
    told = _broadcast(known)
    if "error" in told:
        raise RuntimeError(f"{caller()}: process 0 cannot listen for the other processes: {told['error']}")
    host, port = told["place"]
    store, fault = (store, "") if rank == 0 else _reach(host, port, times)
    own = np.array([store is not None, *identity()], np.uint32)
    everywhere = np.asarray(multihost_utils.process_allgather(own))
    if store is None or not everywhere[:, 0].all():
        missing = np.flatnonzero(everywhere[:, 0] == 0).tolist()
        raise RuntimeError(
            f"{caller()}: processes {missing} do not reach process 0, over which the processes of a job agree, at "
            f"{host} port {port}{fault}. Let the hosts of a job reach each other's ports, as PyTorch's and JAX's own "
            "coordinators need it too. If process 0 has another address for them, set TORCH_SHARD_HOST to it there."
        )
    found = Peers(store, told["prefix"], Neighbours(everywhere[:, 1:], rank), times)
    watch(found)
    atexit.register(found.leave)
    os.register_at_fork(after_in_child=functools.partial(_forget, found))
    return found


def _serve(num: int, times: Times) -> tuple[TCPStore | None, dict[str, Any]]:
    """Start the store, and put down how all stand; what the others are told of it, or that it cannot be.

    The names of its entries begin with what nobody else knows, so that other programs disturb nothing.
    """
    try:
        server = listen(coordinator())
        host, port = server.getsockname()[:2]
        store = _store(host, port, times, master_listen_fd=server.detach(), is_master=True)
        prefix = f"torch_shard/{secrets.token_hex(16)}"
        store.multi_set(  # pyright: ignore[reportAttributeAccessIssue]
            [f"{prefix}/of/{rank}" for rank in range(num)], [Status().text()] * num
        )
        store.set(f"{prefix}/news", News().text())
        return store, {"place": [host, port], "prefix": prefix}
    except Exception as error:
        return None, {"error": describe(error)}


def _reach(host: str, port: int, times: Times) -> tuple[TCPStore | None, str]:
    """The store of process 0, or why it is out of reach."""
    try:
        socket.create_connection((host, port), timeout=times.connect).close()  # the store's own errors are long
        return _store(host, port, times), ""
    except (OSError, RuntimeError) as error:
        return None, f": {describe(error)}"


def _store(host: str, port: int, times: Times, **options: Any) -> TCPStore:
    timeout = datetime.timedelta(seconds=max(times.silent, times.connect))
    return TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)


def _broadcast(known: dict[str, Any]) -> dict[str, Any]:
    """What process 0 knows, over the devices."""
    text = json.dumps(known).encode()
    block = np.zeros(_LENGTH, np.uint8)
    block[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(block)).tobytes().rstrip(b"\0"))


def _forget(found: Peers) -> None:
    """Leave the store to the process from which this one was forked."""
    found.closing = True
    _meet.cache_clear()
