"""Several processes of one program: what they agree on, and how all of them fail where one does."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from torch_shard._common.caller import caller

R = TypeVar("R")


def agree(flag: bool) -> bool:
    """Tell whether any process says so."""
    return bool(multihost_utils.process_allgather(np.array(flag)).any()) if jax.process_count() > 1 else flag


@dataclasses.dataclass(frozen=True)
class _Failure:
    text: str


def exchange(make: Callable[[], R]) -> list[R]:
    """Bring together what each process makes, in order; where one fails, all raise, and none waits for ever."""
    if jax.process_count() == 1:
        return [make()]
    failure = None
    try:
        data = pickle.dumps(make())
    except Exception as error:
        failure, data = error, pickle.dumps(_Failure(str(error)))
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.uint32)).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    if failure is not None:
        raise failure
    found = [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
    for process, value in enumerate(found):
        if isinstance(value, _Failure):
            raise RuntimeError(f"{caller()}: process {process} failed: {value.text}")
    return found
