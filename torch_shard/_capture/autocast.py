"""`torch.autocast` for accelerators, in captures: PyTorch's policy for CUDA, which the jax device takes over.

Products run in the lower precision, as CPU autocast has it; norms, softmax, losses and what else loses digits run in
float32. Source: "Ops that can autocast to float32" in PyTorch's documentation of `torch.amp`.

Also mixed precision as a scope around a loss: by `torch.autocast`, or with whole activations in the lower precision,
which casts every parameter where it is used, as FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` does, so
that nothing but norms and losses is computed in float32. It is one mode for captures and for eager torch alike.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.provenance import current_user_line
from torch_shard._common.autocast_policy import FLOAT32, LOSSES, LOWER, NORMS, PRODUCTS, RECURRENT, MixedPrecision
from torch_shard._common.overrides import instead_of_attribute, is_transformed
from torch_shard._common.patching import having, patched
from torch_shard._common.types import PyTree


class _Active(threading.local):
    depth = 0
    """Number of autocast regions of an accelerator that are entered in the capture of this thread."""
    entered: tuple[torch.autocast, ...] = ()
    """Those that stand in the capture for the regions that are entered."""
    refuses_float16 = False


_ACTIVE = _Active()


def _functions(names: Collection[str]) -> frozenset[Callable[..., object]]:
    owners = (torch, F, torch.Tensor, torch.special)
    return frozenset(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))


_IN_FLOAT32 = _functions(FLOAT32)

_CAST_ONCE = _functions(("linear", "matmul", "__matmul__", "mm", "bmm", "conv1d", "conv2d", "conv3d"))


def widened(func: Callable[..., object], args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """The arguments of a torch call as an autocast region of an accelerator passes them on, if one is active."""
    active = _ACTIVE.depth > 0 and torch.is_autocast_enabled("cpu")
    if not active or func not in _IN_FLOAT32:
        return args, kwargs
    return _mapped((args, kwargs), lambda t: t.dtype in LOWER, torch.float32)


@dataclasses.dataclass(frozen=True)
class SharedCast:
    """A tensor that several products read, in the lower precision of an autocast region.

    PyTorch casts it for each of them, so that gradients by way of each are brought to float32 before they are added: on
    a mesh each is then summed over devices by itself. Cast once, they are added as they are computed.
    """

    wide: torch.Tensor
    version: int
    narrow: torch.Tensor

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether it is this tensor's, which nobody has written to since."""
        return tensor is self.wide and tensor._version == self.version


def cast_once(func: Callable[..., object], args: PyTree, last: SharedCast | None) -> tuple[PyTree, SharedCast | None]:
    """The arguments of a product, of which the first is cast once for products that follow one another."""
    if func not in _CAST_ONCE or not args or _ACTIVE.depth == 0 or not torch.is_autocast_enabled("cpu"):
        return args, last
    x, *others = args
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32 or x.is_leaf or is_transformed([x]):
        return args, last
    if last is None or not last.is_of(x):
        last = SharedCast(x, x._version, x.to(torch.get_autocast_dtype("cpu")))
    return (last.narrow, *others), last


@contextlib.contextmanager
def autocast_on_fakes() -> Iterator[None]:
    """Let regions of `torch.autocast` for any device act on the CPU tensors of a capture, also one entered outside."""
    outside = [d for d in ("jax", "cuda") if torch.is_autocast_enabled(d)]
    with having(_ACTIVE, depth=0, entered=()), contextlib.ExitStack() as stack:
        for name, wrap in (("__init__", _init), ("__enter__", _enter), ("__exit__", _exit)):
            stack.enter_context(patched(torch.autocast, name, wrap))
        dtype = torch.get_autocast_dtype(outside[0]) if outside else None
        with torch.autocast("jax", dtype) if outside else contextlib.nullcontext():
            yield


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
    def enter(self: Any) -> object:
        region: Any = self
        if not hasattr(self, "_is_accelerator"):  # it was made before the capture
            region = torch.autocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        if region._enabled and region.fast_dtype is torch.float16:
            _refuse_float16()
        _ACTIVE.depth += region._is_accelerator
        _ACTIVE.entered = (*_ACTIVE.entered, region)
        original(region)
        return self

    return enter


def _exit(original: Callable[..., object]) -> Callable[..., object]:
    def leave(self: torch.autocast, *error: object) -> object:
        *entered, region = _ACTIVE.entered
        _ACTIVE.entered = tuple(entered)
        _ACTIVE.depth -= getattr(region, "_is_accelerator", False)
        return original(region, *error)

    return leave


def _refuse_float16() -> None:
    if _ACTIVE.refuses_float16 and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{current_user_line()}\nHere torch.autocast computes in float16 (its default for cuda), whose small "
            "gradients are zero unless the loss is scaled, and a compiled step has no GradScaler. Write bfloat16, "
            "which has the range of float32: torch.autocast(device_type, dtype=torch.bfloat16), or leave the region "
            "out and give the step compute_dtype=torch.bfloat16."
        )


@instead_of_attribute(torch.amp.GradScaler, "scale")
def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    """`GradScaler.scale`, which nothing takes back where the gradients are those of a compiled program."""
    if scaler.is_enabled():
        raise NotImplementedError(
            f"{current_user_line()}\nHere a GradScaler scales the loss, and nothing would unscale the gradients of a "
            "compiled program. Return the loss itself and delete the scaler (or make it with enabled=False): bfloat16, "
            "as in compute_dtype=torch.bfloat16, needs none."
        )
    return outputs


def _casting() -> list[str]:
    """The kinds of devices for which autocast is on."""
    return [device for device in ("cpu", "jax", "cuda") if torch.is_autocast_enabled(device)]


@contextlib.contextmanager
def autocast_only(devices: Collection[str] = ()) -> Iterator[None]:
    """Leave autocast on for these kinds of devices, and no others."""
    with contextlib.ExitStack() as stack:
        for device in _casting():
            if device not in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclasses.dataclass(frozen=True)
class ActiveRegions:
    """Regions of autocast that were active once: kind of device and dtype of each."""

    active: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def here(cls) -> "ActiveRegions":
        """Those inside or outside of a capture."""
        # A region of an accelerator acts as one of the CPU while a capture runs.
        names = {"cpu": "jax"} if _ACTIVE.depth > 0 else {}
        return cls(tuple((names.get(device, device), torch.get_autocast_dtype(device)) for device in _casting()))

    @staticmethod
    def devices() -> list[str]:
        """The kinds of devices for which autocast is on, as they are named here."""
        return _casting()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A scope in which these are active, and no others."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast_only())
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype))
            yield


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

    @staticmethod
    @contextlib.contextmanager
    def without_float16() -> Iterator[None]:
        """Refuse float16 autocast in a loss whose gradient is taken: small gradients would be zero."""
        with having(_ACTIVE, refuses_float16=True):
            if any(torch.get_autocast_dtype(device) is torch.float16 for device in _casting()):
                _refuse_float16()
            yield


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
