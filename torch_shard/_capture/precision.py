"""Mixed precision as a scope around a loss: by `torch.autocast`, or with whole activations in the lower precision.

The second casts every parameter where it is used, as FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` does,
so that nothing but norms and losses is computed in float32. It is one mode for captures and for eager torch alike.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._common.autocast_policy import LOSSES, NORMS, PRODUCTS, RECURRENT
from torch_shard._common.types import PyTree

MixedPrecision = Literal["autocast", "params"]

_ALL = frozenset(
    {*PRODUCTS, *RECURRENT, "__matmul__", "__rmatmul__", "einsum", "tensordot", "bilinear", "_grouped_mm"}
    | {"multi_head_attention_forward"}  # no mode sees the products within it
)

_ABOUT = frozenset(
    {"__get__", "__set__", "__delete__", "size", "stride", "dim", "numel", "data_ptr", "is_floating_point", "backward"}
    | {
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "type",
        "element_size",
        "is_complex",
        "is_contiguous",
        "__len__",
    }
    | {"batch_norm", "instance_norm"}  # which have statistics in float32 beside their weights
)

_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
)

_DTYPE = torch.Tensor.dtype.__get__  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a loss is computed in.

    Attributes:
        dtype: The lower precision, or None for what torch gives.
        mode: What is cast to it: the factors of products, by autocast, or parameters.
    """

    dtype: torch.dtype | None = None
    mode: MixedPrecision = "autocast"

    def active(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """The scope, for tensors on this type of device."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.dtype) if self.mode == "autocast" else _cast_parameters(self.dtype)


@contextlib.contextmanager
def _cast_parameters(dtype: torch.dtype) -> Iterator[None]:
    def cast_inputs(module: nn.Module, args: PyTree) -> PyTree:  # which these modules check before they compute
        if not isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return None
        packed = nn.utils.rnn.PackedSequence  # a tuple of more than its data
        return tuple(arg.to(dtype) if isinstance(arg, packed) else _mapped(arg, _is_wide, dtype) for arg in args)

    hook = nn.modules.module.register_module_forward_pre_hook(cast_inputs)
    try:
        with _CastParameters(dtype):
            yield
    finally:
        hook.remove()


class _CastParameters(TorchFunctionMode):
    """Products take all that is wide in the lower precision, other functions parameters alone.

    Norms and losses compute in float32: the result of a norm is again what its input was, that of a loss stays.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == _DTYPE:
            return self._dtype if _is_wide_parameter(args[0]) else func(*args)
        if name in LOSSES or name in NORMS:
            wide, named = _mapped((args, kwargs), self._is_narrow, torch.float32)
            result = func(*wide, **named)
            return result.to(self._dtype) if name in NORMS and self._is_narrow(_first(args, kwargs)) else result
        if name == "embedding":  # the same rows, and a gradient that adds up in float32
            result = func(*args, **kwargs)
            return result.to(self._dtype) if _is_wide(result) else result
        if not _reads(func, name, kwargs):
            return func(*args, **kwargs)
        chosen = _is_wide if name in _ALL else _is_wide_parameter
        args, kwargs = _mapped((args, kwargs), chosen, self._dtype)
        return func(*args, **kwargs)

    def _is_narrow(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self._dtype


def _first(args: PyTree, kwargs: PyTree) -> torch.Tensor:
    return next(t for t in torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))


def _mapped(values: PyTree, chosen: Callable[[torch.Tensor], bool], dtype: torch.dtype) -> PyTree:
    return torch_pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if chosen(t) else t, values)


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32


def _is_wide_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32


def _reads(func: Callable[..., Any], name: str, kwargs: dict[str, object]) -> bool:
    """Tell whether a function reads the values of its arguments, and writes to none of them."""
    is_about = name in _ABOUT or getattr(func, "__module__", "").startswith("torch.autograd")
    writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or kwargs.get("out") is not None
    return not is_about and not writes
