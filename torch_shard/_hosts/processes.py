"""What the processes of a job bring together, and decide as one."""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._hosts.channel import channel, describe, opened

R = TypeVar("R")
LARGE = 1 << 20
"""Bytes from which on values go by a collective, once all processes are known to be there."""


def agree(flag: bool) -> bool:
    """Tell whether any process says so."""
    return any(exchange(lambda: flag))


@dataclasses.dataclass(frozen=True)
class _Failure:
    text: str


def exchange(make: Callable[[], R], subject: str | None = None) -> list[R]:
    """Bring together what each process makes, in order; where one fails, all raise, and none waits for ever.

    Args:
        make: Called once; what it returns can be pickled.
        subject: What it is about, for errors; by default the public function under way.
    """
    line = channel()
    if line is None:
        return [make()]
    failure = None
    try:
        data = pickle.dumps(make())
    except Exception as error:
        failure, data = error, pickle.dumps(_Failure(describe(error)))
    subject = subject or caller()
    small = len(data) <= LARGE
    found = line.exchange(data if small else len(data).to_bytes(8, "big"), subject)
    if failure is not None:
        raise failure
    if max(sizes := [int.from_bytes(each, "big") if len(each) == 8 else len(each) for each in found]) > LARGE:
        found = _gather(data, sizes)
    values = [pickle.loads(each) for each in found]
    for process, value in enumerate(values):
        if isinstance(value, _Failure):
            raise RuntimeError(f"{caller()}: process {process} failed: {value.text}")
    return values


def _gather(data: bytes, sizes: list[int]) -> list[bytes]:
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def is_shared(mesh: Mesh) -> bool:
    """Tell whether a mesh has devices of every process of a job of several."""
    num = jax.process_count()
    return num > 1 and len({device.process_index for device in mesh.devices.flat}) == num


def begin_run() -> None:
    """Note that a program over all processes is begun, which all must begin.

    Raises:
        PeerError: A process has failed, so it would never end.
    """
    if (line := channel()) is not None:
        line.check()
        line.runs += 1


def check_peers() -> None:
    """Raise if another process has failed.

    Raises:
        PeerError: It has.
    """
    if (line := opened()) is not None:
        line.check()


def follow(array: jax.Array) -> None:
    """Note what the last program gives: as long as it is not there, this process waits for it."""
    if (line := opened()) is not None:
        line.running = array
