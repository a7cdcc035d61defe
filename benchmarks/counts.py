"""What a compiled program contains, and how often something was compiled or captured."""

import collections
import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "pred": 1, "s64": 8, "f64": 8}
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Collectives of a compiled program: kind -> (count, bytes of their results on one device)."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for shapes, kind in _LINE.findall(hlo):
        found[kind][0] += 1
        found[kind][1] += sum(_num_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(shapes))
    return {kind: (count, size) for kind, (count, size) in sorted(found.items())}


def _num_bytes(dtype: str, dims: str) -> int:
    return _BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d])) if dtype in _BYTES else 0


def describe(found: dict[str, tuple[int, int]]) -> str:
    """Collectives as text: `26 all-reduce 17.2 MB`."""
    return ", ".join(f"{count} {kind} {size / 1e6:.3g} MB" for kind, (count, size) in found.items()) or "none"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one entry with each program that JAX compiles."""
    found: list[str] = []

    def listen(event: str, duration_s: float, **_: Any) -> None:
        if event == _COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def captures() -> Iterator[mock.Mock]:
    """A mock whose `call_count` is the number of captures."""
    from torch_shard import _function

    with mock.patch.object(_function, "capture", wraps=_function.capture) as counted:
        yield counted
