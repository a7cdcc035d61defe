"""`torch.autocast` for accelerators, in captures: PyTorch's policy for CUDA, which the jax device takes over.

Products run in the lower precision, as CPU autocast has it; norms, softmax, losses and what else loses digits run in
float32. Source: "Ops that can autocast to float32" in PyTorch's documentation of `torch.amp`.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as torch_pytree

from torch_shard._common.autocast_policy import FLOAT32, LOWER
from torch_shard._common.patching import patched
from torch_shard._common.types import PyTree


class _Active(threading.local):
    depth = 0
    """Number of autocast regions of an accelerator that are entered in the capture of this thread."""
    capturing = False


_ACTIVE = _Active()


@functools.cache
def _float32_functions() -> frozenset[Callable[..., object]]:
    owners = (torch, F, torch.Tensor, torch.special)
    return frozenset(getattr(owner, name) for owner in owners for name in FLOAT32 if hasattr(owner, name))


def widened(func: Callable[..., object], args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """The arguments of a torch call as an autocast region of an accelerator passes them on, if one is active."""
    active = _ACTIVE.depth > 0 and torch.is_autocast_enabled("cpu")
    if not active or func not in _float32_functions():
        return args, kwargs
    return torch_pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in LOWER else t, (args, kwargs))


@contextlib.contextmanager
def autocast_on_fakes() -> Iterator[None]:
    """Let regions of `torch.autocast` for any device act on the CPU tensors of a capture, also one entered outside."""
    if _ACTIVE.capturing:  # a capture within a capture: they do, and one that is active is so within
        yield
        return
    outside = [d for d in ("jax", "cuda") if torch.is_autocast_enabled(d)]
    _ACTIVE.depth, _ACTIVE.capturing = 0, True
    methods = {"__init__": _init, "__enter__": _enter, "__exit__": _exit}
    try:
        with contextlib.ExitStack() as stack:
            for name, wrap in methods.items():
                stack.enter_context(patched(torch.autocast, name, wrap))
            dtype = torch.get_autocast_dtype(outside[0]) if outside else None
            with torch.autocast("jax", dtype) if outside else contextlib.nullcontext():
                yield
    finally:
        _ACTIVE.depth, _ACTIVE.capturing = 0, False


def _init(original: Callable[..., object]) -> Callable[..., object]:
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self._is_accelerator = device_type.split(":")[0] != "cpu"
        if self._is_accelerator:
            dtype = dtype or torch.get_autocast_dtype(device_type)
            device_type = "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    return init


def _enter(original: Callable[..., object]) -> Callable[..., object]:
    def enter(self: torch.autocast) -> object:
        _ACTIVE.depth += getattr(self, "_is_accelerator", False)
        return original(self)

    return enter


def _exit(original: Callable[..., object]) -> Callable[..., object]:
    def leave(self: torch.autocast, *error: object) -> object:
        _ACTIVE.depth -= getattr(self, "_is_accelerator", False)
        return original(self, *error)

    return leave


def casting() -> list[str]:
    """The kinds of devices for which autocast is on."""
    return [device for device in ("cpu", "jax", "cuda") if torch.is_autocast_enabled(device)]


@contextlib.contextmanager
def autocast_only(devices: Collection[str] = ()) -> Iterator[None]:
    """Leave autocast on for these kinds of devices, and no others."""
    with contextlib.ExitStack() as stack:
        for device in casting():
            if device not in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclasses.dataclass(frozen=True)
class ActiveRegions:
    """Regions of autocast that were active once: kind of device and dtype of each."""

    active: tuple[tuple[str, torch.dtype], ...]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A scope in which these are active, and no others."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast_only())
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def active_regions() -> ActiveRegions:
    """The regions of autocast here, inside or outside of a capture."""
    names = {"cpu": "jax"} if _ACTIVE.depth > 0 else {}
    return ActiveRegions(tuple((names.get(device, device), torch.get_autocast_dtype(device)) for device in casting()))
