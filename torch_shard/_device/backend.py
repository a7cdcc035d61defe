"""The module `torch.jax`: the functions that PyTorch asks of a device type."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._common.autocast_policy import FLOAT32, LOWER, PRODUCTS
from torch_shard._common.random import GENERATOR
from torch_shard._common.types import Operator, PyTree


class DeviceModule:
    """Functions that torch asks of a device type. They say that no device is there: that keeps CPU torch as it is."""

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        GENERATOR.seed(seed)

    _initialized = True  # torch.utils.checkpoint then keeps the state of the generator

    def device(self, device: torch.device | int | str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return GENERATOR.state

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        GENERATOR.state = state

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def same_accelerator() -> Generator[None, None, None]:
    """Let torch's accelerator be what it was, where the spare backend gets its name within.

    `is_privateuse1_backend_registered` in c10/core/DeviceType.h asks for that name alone: to torch, a backend that has
    one is the accelerator of the process, before CUDA, and whether or not a device of it is available. `fully_shard`,
    `torch.get_device_module` and `DataLoader(pin_memory=True)` then take `jax` where they mean the CPU or a GPU.
    """
    bindings: Any = torch._C
    if bindings._get_privateuse1_backend_name() == "jax":  # by the user's own import of torchax, or an earlier call
        yield
        return
    accelerator, or_cpu = bindings._accelerator_getAccelerator(), bindings._get_accelerator()
    yield

    def get_accelerator(check: bool | None = None) -> torch.device:
        if check and accelerator is None:
            raise RuntimeError("Cannot access accelerator device when none is available.")  # torch's own words
        return or_cpu

    bindings._get_accelerator, bindings._accelerator_getAccelerator = get_accelerator, lambda: accelerator


_KEY = "AutocastPrivateUse1"

FALLBACK = torch.library.Library("_", "IMPL")

KERNELS = torch.library.Library("aten", "IMPL")


def register_autocast() -> None:
    """Give the device `jax` an autocast policy, that of `_common.autocast_policy`."""
    FALLBACK.fallback(torch.library.fallthrough_kernel, _KEY)
    for names in (PRODUCTS, FLOAT32):
        for op in (op for name in names for op in _overloads(name)):
            KERNELS.impl(op, functools.partial(_run, op, names is PRODUCTS), _KEY)


def _overloads(name: str) -> list[Operator]:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [op for op in overloads if not op._schema.is_mutable and "out" not in op._overloadname]


def _run(op: Operator, is_product: bool, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Run an operator as autocast does: products in the lower precision, the float32 operators in float32."""
    wanted = torch.get_autocast_dtype("jax") if is_product else torch.float32

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.device.type == "jax" and tensor.dtype in (torch.float32, *LOWER)
        return tensor.to(wanted) if is_cast else tensor

    args, kwargs = torch_pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    with torch.amp.autocast("jax", enabled=False):
        return op(*args, **kwargs)


def enable_globally() -> None:
    """Do nothing: accepted for programs written for torchax. Tensors on the jax device always work.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.enable_globally()
        >>> torch.ones(2).to("jax").sum().item()
        2.0
    """


def disable_globally() -> None:
    """Do nothing: accepted for programs written for torchax. Tensors on the jax device still work.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.disable_globally()
        >>> torch.ones(2).to("jax").sum().item()
        2.0
    """


def jax_device() -> contextlib.AbstractContextManager[None]:
    """Open a scope that does nothing: accepted for programs written for torchax.

    Returns:
        A context manager. Eager work on jax-device tensors needs none, inside it or outside.

    Example:
        >>> import torch, torch_shard as ts
        >>> with ts.jax_device():
        ...     torch.ones(2).to("jax").sum().item()
        2.0
    """
    return contextlib.nullcontext()
