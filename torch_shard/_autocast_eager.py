"""`torch.autocast("jax")` for eager operators on the jax device: kernels that cast, then run the operator itself."""

import functools
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._common.autocast_policy import FLOAT32, LOWER, PRODUCTS

_KEY = "AutocastPrivateUse1"
_PRODUCT, _WIDE = object(), object()
_FALLBACK = torch.library.Library("_", "IMPL")
_KERNELS = torch.library.Library("aten", "IMPL")


def register_autocast() -> None:
    """Give the device `jax` an autocast policy, that of `_autocast`."""
    _FALLBACK.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, policy in ((PRODUCTS, _PRODUCT), (FLOAT32, _WIDE)):
        for op in (op for name in names for op in _overloads(name)):
            _KERNELS.impl(op, functools.partial(_run, op, policy), _KEY)


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [op for op in overloads if not op._schema.is_mutable and "out" not in op._overloadname]


def _run(op: Any, policy: object, *args: Any, **kwargs: Any) -> Any:
    """What autocast does: products in the lower precision, the float32 operators in float32."""
    wanted = torch.get_autocast_dtype("jax") if policy is _PRODUCT else torch.float32
    changes = (torch.float32,) if policy is _PRODUCT else LOWER

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if tensor.device.type == "jax" and tensor.dtype in (*changes, *LOWER) else tensor

    args, kwargs = torch_pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    with torch.amp.autocast("jax", enabled=False):
        return op(*args, **kwargs)
