"""What the processes of a job bring together, and decide as one."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.simulated import wait_if_simulated
from torch_shard._hosts.data import pack, unpack
from torch_shard._hosts.peers import describe, most_each
from torch_shard._hosts.session import met, peers

R = TypeVar("R")


def agree(flag: bool) -> bool:
    """Tell whether any process says so."""
    return any(exchange(lambda: flag))


def exchange(make: Callable[[], R], subject: str | None = None) -> list[R]:
    """Bring together what each process makes, in order; where one fails, all raise, and no process waits forever.

    Values of many bytes go by a collective, once all processes are known to be there.

    Args:
        make: Called once; gives a value that `pack` takes.
        subject: What it is about, for errors; by default the public function under way.

    Raises:
        PeerError: Another process does not come.
        RuntimeError: `make` has raised in another process.
    """
    own = peers()
    if own is None:
        return [make()]
    failure = None
    try:
        data = pack(["value", make()])
    except Exception as error:
        failure, data = error, pack(["failure", describe(error)])
    first = data if len(data) <= most_each(jax.process_count()) else pack(["size", len(data)])
    found = [unpack(each) for each in own.exchange(first, subject or caller())]
    if failure is not None:
        raise failure
    for process, (kind, value) in enumerate(found):
        if kind == "failure":
            raise RuntimeError(f"{caller()}: process {process} failed: {value}")
    if sizes := [value for kind, value in found if kind == "size"]:
        found = [unpack(each) for each in _gather(data, max(sizes))]
    return [value for _, value in found]


def _gather(data: bytes, size: int) -> list[bytes]:
    """What each process gives, over the devices: `size` bytes at most, with their number in front."""
    row = np.zeros(8 + size, np.uint8)
    row[:8] = np.frombuffer(len(data).to_bytes(8, "big"), np.uint8)
    row[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(row)
    return [each[8 : 8 + int.from_bytes(each[:8].tobytes(), "big")].tobytes() for each in rows]


def is_shared(mesh: Mesh) -> bool:
    """Tell whether a mesh has devices of every process of a job of several."""
    num = jax.process_count()
    return num > 1 and len({device.process_index for device in mesh.devices.flat}) == num


def begin_run() -> None:
    """Note that a program over all processes is begun, which all must begin."""
    if (own := peers()) is not None:
        own.check()
        own.status.runs += 1


def check_peers() -> None:
    """Raise if another process has failed."""
    if (own := met()) is not None:
        own.check()


def follow(array: jax.Array) -> None:
    """Note what the last program gives, for which this process waits as long as it is not there."""
    if (own := met()) is not None:
        own.running = array
    wait_if_simulated(array)
