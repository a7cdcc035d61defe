"""The peers of this job: met at the first need, and watched by a thread that waits for none of them forever."""

import atexit
import contextlib
import datetime
import functools
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torch_shard._common.caller import caller
from torch_shard._hosts.initialize import coordinator
from torch_shard._hosts.judge import News, Status, Times, silent_for
from torch_shard._hosts.launchers import LOOPBACK
from torch_shard._hosts.peers import STATUS, Peers, describe, flush_streams, pack


def watch(peers: Peers) -> None:
    """Begin to watch, and let the others know of an error that ends this process."""
    threading.Thread(target=_run, args=(peers,), name="torch_shard watch", daemon=True).start()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        peers.dying = True
        peers.fail(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and peers.failure is not None:
            error.add_note("torch_shard: process {} failed: {}".format(*peers.failure))
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


_LENGTH = 2048
"""Bytes of what is made known at the beginning."""

_TOLD = "TORCH_SHARD_HOST"
"""The variable that says on which of its addresses process 0 is to listen."""

_FAR = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has, of RFC 5737 and 3849: the way there is the default route."""


def peers() -> Peers | None:
    """The peers of this job, met by the first call, to which all processes must come; None of one process."""
    return _meet() if jax.process_count() > 1 else None


def met() -> Peers | None:
    """The peers of this job if they have met."""
    return _meet() if _meet.cache_info().currsize else None


@functools.cache
def _meet() -> Peers:
    times, rank, num = Times.of_environment(), jax.process_index(), jax.process_count()
    store, fault, told = None, "", {}
    if rank == 0:
        try:
            store, told = _serve(num, times)
        except Exception as error:
            told = {"error": describe(error)}
    told = _broadcast(told)
    if "error" in told:
        raise RuntimeError(f"{caller()}: process 0 cannot listen for the other processes: {told['error']}")
    host, port = told["place"]
    if rank > 0:
        try:
            socket.create_connection((host, port), timeout=times.connect).close()  # the store's own errors are long
            store = _store(host, port, times)
        except (OSError, RuntimeError) as error:
            fault = f": {describe(error)}"
    everywhere = np.asarray(multihost_utils.process_allgather(np.array([store is not None, *_identity()], np.uint32)))
    if store is None or not everywhere[:, 0].all():
        missing = np.flatnonzero(everywhere[:, 0] == 0).tolist()
        raise RuntimeError(
            f"{caller()}: processes {missing} do not reach process 0, over which the processes of a job agree, at "
            f"{host} port {port}{fault}. Let the hosts of a job reach each other's ports, as PyTorch's and JAX's own "
            f"coordinators need it too. If process 0 has another address for them, set {_TOLD} to it there."
        )
    is_here = (everywhere[:, 2:] == everywhere[rank, 2:]).all(1) & everywhere[rank, 2:].any()
    neighbours = {int(other): int(everywhere[other, 1]) for other in np.flatnonzero(is_here) if other != rank}
    found = Peers(store, told["prefix"], rank, num, times, neighbours)
    watch(found)
    atexit.register(found.leave)
    os.register_at_fork(after_in_child=functools.partial(_forget, found))
    return found


def _identity() -> list[int]:
    """The number of this process, and in two words where it is counted; these are 0 where Linux does not say."""
    try:
        counted = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return [0, 0, 0]
    digest = hashlib.blake2b(counted.encode(), digest_size=8).digest()
    return [os.getpid(), *np.frombuffer(digest, np.uint32).tolist()]


def _serve(num: int, times: Times) -> tuple[TCPStore, dict[str, Any]]:
    """Start the store, and put down how all stand; what the others are told of it.

    The names of its entries begin with what nobody else knows, so that other programs disturb nothing.
    """
    server = listen(coordinator())
    host, port = server.getsockname()[:2]
    store: Any = _store(host, port, times, master_listen_fd=server.detach(), is_master=True)
    prefix = f"torch_shard/{secrets.token_hex(16)}"
    put_down(store, prefix, num)
    return store, {"place": [host, port], "prefix": prefix}


def put_down(store: Any, prefix: str, num: int) -> None:
    """Let the store have how so many processes stand at the beginning, and no news."""
    store.multi_set([f"{prefix}/of/{rank}" for rank in range(num)], [pack(vars(Status()))] * num)
    store.set(f"{prefix}/news", pack(vars(News())))


def _store(host: str, port: int, times: Times, **options: Any) -> TCPStore:
    timeout = datetime.timedelta(seconds=max(times.silent, times.connect))
    return TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)


def _broadcast(known: dict[str, Any]) -> dict[str, Any]:
    """What process 0 knows, over the devices."""
    text = json.dumps(known).encode()
    block = np.frombuffer(text.ljust(_LENGTH), np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(block)).tobytes())


def listen(coordinator: str | None) -> socket.socket:
    """Listen on a free port of the interface over which the other processes reach process 0, and of no other.

    Args:
        coordinator: `host:port` of JAX's coordinator, which is on this host; None if that is unknown.

    Returns:
        On the interface that `TORCH_SHARD_HOST` names, else the coordinator's, else that of the default route, else the
        loopback.

    Raises:
        ValueError: `TORCH_SHARD_HOST` is no address of this host.
    """
    host = (coordinator or "").rpartition(":")[0].strip("[]")
    if told := os.environ.get(_TOLD):
        addresses = [told]
    elif host == "localhost" or _is_loopback(host):
        addresses = [LOOPBACK]
    else:  # a name of this host that means the loopback is of no use to others: many hosts have one
        on_the_way = [address for address in map(address_towards, (host, *_FAR)) if address]
        addresses = [address for address in on_the_way if not _is_loopback(address)] + [LOOPBACK]
    for address in addresses:
        with contextlib.suppress(OSError, UnicodeError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family)
            if server.getsockname()[0] not in ("0.0.0.0", "::"):
                return server
            server.close()
    raise ValueError(f"{_TOLD} must be an address of the host of process 0, or a name of one, found {told}")


def address_towards(host: str) -> str | None:
    """The address of this host from which it would reach another, or itself; None where there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as out:
            out.connect(place)  # sends nothing, but chooses where it would leave from
            return out.getsockname()[0].partition("%")[0]
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _forget(found: Peers) -> None:
    """Leave the store to the process from which this one was forked."""
    found.closing = True
    _meet.cache_clear()
