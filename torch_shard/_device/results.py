"""What PyTorch says of the result of an eager operator: shape and dtype, by running it on meta tensors."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.types import Operator, PyTree
from torch_shard._device.tensor import JaxTensor

_KEPT = 4096


def result_of(func: Operator, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
    """Meta tensors like the results of an operator; None where PyTorch cannot tell them from shapes and dtypes."""
    try:
        return _result(func, _outline(args), tuple(kwargs), _outline(kwargs.values()), torch.get_default_dtype())
    except TypeError:  # an argument that cannot be hashed
        return None


@functools.lru_cache(maxsize=_KEPT)
def _result(func: Operator, args: Any, names: tuple[str, ...], values: Any, default: torch.dtype) -> PyTree:
    try:
        return func(*map(_on_meta, args), **dict(zip(names, map(_on_meta, values), strict=True)))
    except Exception:  # it has no such kernel, or its result depends on values
        return None


def view_of(func: Operator, base: torch.Tensor, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
    """The result of a view operator on a meta tensor; None where elements are not those of its base, in its places."""
    try:
        found = func(base, *args, **kwargs)
    except Exception:  # torch cannot view these strides so, and an array can be reshaped always
        return None
    views = found if isinstance(found, (list, tuple)) else [found]
    return found if all(v.dtype == base.dtype and not (v.is_conj() or v.is_neg()) for v in views) else None


def _outline(values: Any) -> Any:
    """For each value, its kind and what matters: 1, 1.0 and True are equal, and promote differently."""
    return tuple(
        (JaxTensor, value._storage.shape, value._storage.dtype)
        if isinstance(value, JaxTensor)
        else (torch.Tensor, value.shape, value.dtype)
        if isinstance(value, torch.Tensor)
        else (list, _outline(value))
        if isinstance(value, (list, tuple))
        else (type(value), value)
        for value in values
    )


def _on_meta(outline: Any) -> Any:
    kind, value, *dtype = outline
    if dtype:
        found = torch_dtype(dtype[0]) if kind is JaxTensor else dtype[0]
        return torch.empty(value, dtype=found, device="meta")
    if kind is list:
        return list(map(_on_meta, value))
    return torch.device("meta") if kind is torch.device else value
