"""Tensors across the border: a torch tensor on the `jax` device is a `jax.Array` with torch's face.

The device needs no mode. PyTorch's dispatcher brings every operator on such a tensor here, below PyTorch's own autograd
and autocast, and its lowering runs on the arrays. Views are exact: a view knows its base, and a write through it lands
in the base.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree
from torch.utils import backend_registration

from torch_shard._convert import host_array, to_host
from torch_shard._keys import GENERATOR, next_key
from torch_shard._ops import RANDOM, STORAGE_KWARGS, find_lowering, jax_dtype, torch_dtype

aten = torch.ops.aten


class JaxTensor(torch.Tensor):
    """A torch tensor whose data is a `jax.Array`; made by `torch_view`, `.to("jax")` or `device="jax"`."""

    _storage: "_Storage"

    @staticmethod
    def __new__(cls, storage: "_Storage", requires_grad: bool = False) -> "JaxTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, storage.shape, dtype=torch_dtype(storage.dtype), device="jax:0", requires_grad=requires_grad
        )
        tensor._storage = storage
        return tensor

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._has_compatible_shallow_copy_type:
            return True  # lets Module.to("cpu") keep each Parameter's identity, and so its ties; see `data`
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> Any:  # marks the class for torch.utils.swap_tensors in Module.to
        raise NotImplementedError("A jax-device tensor has no inner torch tensors.")

    __tensor_unflatten__ = __tensor_flatten__

    def jax(self) -> "jax.Array":
        """The array itself, no copy."""
        return self._storage.read()

    @property
    def sharding(self) -> "jax.sharding.Sharding":
        """Where the array lives."""
        return self.jax().sharding

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same data, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, JaxTensor):
            self._storage = value._storage
            return
        grad, self.grad = self.grad, None  # torch.utils.swap_tensors would swap the gradients too
        replacement = value.detach().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            replacement = torch.nn.Parameter(replacement, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, replacement)
        torch.Tensor.grad.__set__(self, None if grad is None else grad.to(value.device))  # pyright: ignore

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A copy of the global value on the host."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a tensor that requires grad. Use tensor.detach().numpy().")
        return np.array(self.jax())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.detach().jax(), dtype=dtype)

    def tolist(self) -> Any:
        return self.detach().numpy().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shown = repr(to_host(self.jax()))
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{shown[:-1]}, device='{self.device}'{grad})"

    def __deepcopy__(self, memo: dict) -> "JaxTensor":
        if id(self) not in memo:
            copied = JaxTensor(_Storage(self.jax()), self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary CPU tensor, so that a file loads anywhere, with `weights_only=True` too."""
        return to_host(self.jax()).requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class _Storage:
    """What tensors that alias each other share: an array, or a way to read and write a part of another storage."""

    def __init__(self, value: Any) -> None:
        self.value = value  # a jax.Array, or a ShapeDtypeStruct before the first write
        self.shape, self.dtype = tuple(value.shape), value.dtype

    def read(self) -> jax.Array:
        if isinstance(self.value, jax.ShapeDtypeStruct):
            self.value = jnp.zeros(self.shape, self.dtype)
        return self.value

    def write(self, value: jax.Array) -> None:
        value = jnp.asarray(value, self.dtype)
        self.value = value if value.shape == self.shape else jnp.broadcast_to(value, self.shape)


class _ViewStorage(_Storage):
    """A view: reads through the view operator; writes to the elements of the base that the operator selects."""

    def __init__(self, base: _Storage, view: Callable[[Any], Any]) -> None:
        self.base, self.view = base, view
        self.dtype = base.dtype
        self.shape = tuple(jax.eval_shape(view, jax.ShapeDtypeStruct(base.shape, base.dtype)).shape)

    def read(self) -> jax.Array:
        return self.view(self.base.read())

    def write(self, value: jax.Array) -> None:
        places = self.view(jnp.arange(int(np.prod(self.base.shape))).reshape(self.base.shape))
        value = jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape)
        flat = self.base.read().reshape(-1).at[places.reshape(-1)].set(value.reshape(-1))
        self.base.write(flat.reshape(self.base.shape))


def _dispatch(func: Any, args: Any, kwargs: dict) -> Any:
    """Run one ATen operator on jax-device tensors."""
    return _runner(func)(*args, **kwargs)


@functools.cache
def _runner(func: Any) -> Callable[..., Any]:
    """How to run an operator: by its special case, as one that writes, as a view, or by its lowering alone."""
    if func in _SPECIAL:
        return _SPECIAL[func]
    aliases = [a.alias_info for a in func._schema.arguments]
    if any(info is not None and info.is_write for info in aliases):
        return lambda *args, **kwargs: _write(func, args, kwargs)
    if aliases and aliases[0] is not None:
        return lambda *args, **kwargs: _view(func, args, kwargs)
    return lambda *args, **kwargs: wrap(_run(func, args, kwargs))


def _run(func: Any, args: Any, kwargs: dict) -> Any:
    """The operator on arrays; PyTorch's decomposition where there is no lowering."""
    lowering = find_lowering(func)
    if lowering is None:
        return _decompose(func, args, kwargs)
    args = [_operand(arg) for arg in args]
    kwargs = {name: _operand(value) for name, value in kwargs.items() if name not in STORAGE_KWARGS}
    key = (next_key(),) if func in RANDOM else ()
    return lowering(*key, *args, **kwargs)


def _operand(value: Any) -> Any:
    """An argument of an operator as its lowering takes it."""
    if isinstance(value, JaxTensor):
        return value.jax()
    if isinstance(value, (list, tuple)):
        return [_operand(v) for v in value]
    if isinstance(value, torch.dtype):
        return torch_dtype(jax_dtype(value))
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:  # torch lets CPU scalars meet tensors of any device
            return to_array(value)
        raise RuntimeError(
            f"A CPU tensor of shape {tuple(value.shape)} meets a tensor on the jax device. "
            "Move it first: tensor.to('jax')."
        )
    return value


def _decompose(func: Any, args: Any, kwargs: dict) -> Any:
    rule = torch._decomp.decomposition_table.get(func)
    result = rule(*args, **kwargs) if rule is not None else func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError(
            f"{func} has no lowering to JAX. Rewrite it with other operators, or run it on the CPU: .cpu()."
        )
    return torch_pytree.tree_map_only(JaxTensor, lambda t: t.jax(), result)


def wrap_array(array: jax.Array) -> JaxTensor:
    return JaxTensor(_Storage(array))


def wrap(tree: Any) -> Any:
    """Arrays of an operator's result as tensors."""
    if isinstance(tree, jax.Array):
        return wrap_array(tree)
    return [wrap(t) for t in tree] if isinstance(tree, (list, tuple)) else tree


def _view(func: Any, args: Any, kwargs: dict) -> Any:
    """A view operator: the result shares the storage of its base."""
    base = args[0]._storage

    def nth(index: int | None) -> Callable[[Any], Any]:
        def view(value: Any) -> Any:
            result = find_lowering(func)(value, *args[1:], **kwargs)  # pyright: ignore[reportOptionalCall]
            return result if index is None else result[index]

        return view

    if find_lowering(func) is None:
        return wrap(_decompose(func, args, kwargs))
    if func is aten.detach.default or func is aten.alias.default:
        return JaxTensor(base)
    shapes = jax.eval_shape(nth(None), jax.ShapeDtypeStruct(base.shape, base.dtype))
    if isinstance(shapes, (list, tuple)):
        return [JaxTensor(_ViewStorage(base, nth(i))) for i in range(len(shapes))]
    return JaxTensor(_ViewStorage(base, nth(None)))


def _write(func: Any, args: Any, kwargs: dict) -> Any:
    """An operator that writes in place or to `out=`: run its functional form, then write."""
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    result = _run(_functional(func), args, {k: v for k, v in kwargs.items() if k not in written})
    results = result if isinstance(result, (list, tuple)) else [result]
    for name, value in zip(written, results, strict=True):
        values[name]._storage.write(value)
    return values[written[0]] if len(written) == 1 else tuple(values[w] for w in written)


_FUNCTIONAL = {aten.normal_.default: aten.normal_functional.default, aten.bernoulli_.float: aten.bernoulli.p}


def _functional(func: Any) -> Any:
    """The overload that returns what `func` writes."""
    if func in _FUNCTIONAL:
        return _FUNCTIONAL[func]
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"))
    inputs = [a.name for a in func._schema.arguments if not a.is_out]
    for overload in (func._overloadname, *packet.overloads()):
        found = getattr(packet, overload) if overload in packet.overloads() else None
        if found and not found._schema.is_mutable and [a.name for a in found._schema.arguments] == inputs:
            return found
    raise NotImplementedError(f"{func} has no form that does not write; use one that returns its result.")


def _empty(size: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> JaxTensor:
    return JaxTensor(_Storage(jax.ShapeDtypeStruct(tuple(size), jax_dtype(dtype or torch.get_default_dtype()))))


def _empty_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Any:
    if device is not None and torch.device(device).type != "jax":
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=device)
    return _empty(x.shape, dtype=dtype or x.dtype)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, JaxTensor):
        return target.copy_(to_host(source.jax()))  # pyright: ignore[reportAttributeAccessIssue]
    target._storage.write(source.jax() if isinstance(source, JaxTensor) else to_array(source))
    return target


def _to_copy(x: torch.Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    on_jax = torch.device(device).type == "jax" if device is not None else isinstance(x, JaxTensor)
    if not on_jax:
        host = to_host(x.jax()) if isinstance(x, JaxTensor) else x
        return host.to(device=device, dtype=dtype or host.dtype)
    array = x.jax() if isinstance(x, JaxTensor) else to_array(x)
    return wrap_array(array if dtype is None else array.astype(jax_dtype(dtype)))


def _item(x: JaxTensor) -> Any:
    return x.jax().item()


_SPECIAL: dict[Any, Callable] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
    aten.set_data.default: lambda x, value: setattr(x, "data", value),
}


def to_array(value: Any) -> jax.Array:
    """A torch tensor, numpy array or Python scalar as a JAX array of the same value.

    64-bit integers become 32-bit while `jax_enable_x64` is off, if every value fits.

    Raises:
        OverflowError: An integer does not fit 32 bits.
        TypeError: float64 or complex128 while `jax_enable_x64` is off; a sparse or quantised tensor.
    """
    if isinstance(value, JaxTensor):
        return value.jax()
    if isinstance(value, jax.Array):
        return value
    return jnp.array(host_array(value))


class _DeviceModule:
    """What torch asks of a device type. It says that no device is there: that keeps CPU torch as it is."""

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

    def get_rng_state(self, device: Any = None) -> list:
        return []

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _register_device() -> None:
    """Give torch the device type `jax`. torchax registers one on import: ours takes its place."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    import torchax  # noqa: F401

    torch.backends.mha.set_fastpath_enabled(fastpath)  # torchax switches it off for everyone
    del torch.jax  # pyright: ignore[reportAttributeAccessIssue]
    torch._register_device_module("jax", _DeviceModule())
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _FALLBACK.fallback(lambda func, *args, **kwargs: _dispatch(func, args, kwargs), "PrivateUse1")
    for op in _FACTORIES:
        _KERNELS.impl(op, lambda *args, op=op, **kwargs: wrap(_run(op, args, kwargs)), "PrivateUse1")
    _KERNELS.impl(aten.copy_.default, _copy_, "PrivateUse1")  # torch.tensor(..., device="jax") gets no further


# PyTorch builds these by resizing an empty tensor, which an array cannot do.
_FACTORIES = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.randperm.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
)
_FALLBACK = torch.library.Library("_", "IMPL")
_KERNELS = torch.library.Library("aten", "IMPL")
_register_device()
