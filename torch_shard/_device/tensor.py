"""The eager tensor of the jax device: a torch.Tensor whose data is a jax.Array, and the storage that views share."""

import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from torch_shard._common.convert import host_array, to_host
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.simulated import wait_if_simulated
from torch_shard._common.types import Operator, PyTree


class Storage:
    """Storage that aliases share: an array, or a way to read and write a part of another storage."""

    def __init__(self, value: jax.Array | jax.ShapeDtypeStruct) -> None:
        self.value = value  # a jax.Array, or a ShapeDtypeStruct before the first write
        self.shape, self.dtype = tuple(value.shape), value.dtype

    @property
    def is_written(self) -> bool:
        """Tell whether there are values yet."""
        return isinstance(self.value, jax.Array)

    @property
    def root(self) -> "Storage":
        """Where the elements are."""
        return self

    @property
    def strided(self) -> torch.Tensor:
        """A meta tensor with the strides that it has in torch, over those of the root."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device="meta")

    def read(self) -> jax.Array:
        if isinstance(self.value, jax.ShapeDtypeStruct):
            self.value = jnp.zeros(self.shape, self.dtype)
        return self.value

    def write(self, value: jax.Array) -> None:
        value = jnp.asarray(value, self.dtype)
        self.value = wait_if_simulated(value if value.shape == self.shape else jnp.broadcast_to(value, self.shape))


class ViewStorage(Storage):
    """A view: reads through the view operator; writes to the elements of the base that the operator selects.

    Args:
        base: What it is a view of.
        view: The operator; None to read by strides.
        strided: Its result for `base.strided`; None if the elements are made of those of the base, as of `z.real`.
    """

    def __init__(
        self, base: Storage, view: Callable[[jax.Array], jax.Array] | None, strided: torch.Tensor | None
    ) -> None:
        self.base, self.view, self._strided = base, view, strided
        self.dtype = base.dtype
        if strided is None:
            assert view is not None
            made = jax.eval_shape(view, jax.ShapeDtypeStruct(base.shape, base.dtype))
            self.shape, self.dtype = tuple(made.shape), made.dtype
        else:
            self.shape = tuple(strided.shape)

    @property
    def is_written(self) -> bool:
        return self.base.is_written

    @property
    def root(self) -> Storage:
        return self if self._strided is None else self.base.root

    @property
    def strided(self) -> torch.Tensor:
        return super().strided if self._strided is None else self._strided

    def read(self) -> jax.Array:
        if self.view is None:
            return self.root.read().reshape(-1)[self._places()]
        return self.view(self.base.read())

    def write(self, value: jax.Array) -> None:
        places, strides = self._places(), self.strided.stride()
        if any(size > 1 and stride == 0 for size, stride in zip(self.shape, strides, strict=True)):
            raise RuntimeError(
                f"Several elements of this view of shape {self.shape} are one element of its base (expand), and cannot "
                "be written to. Write to a clone()."
            )
        whole = self.root.read()
        flat = whole.reshape(-1).at[places].set(jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape))
        written = flat.reshape(whole.shape)
        is_placed = not isinstance(whole, Tracer) and isinstance(whole.sharding, NamedSharding)
        self.root.write(jax.device_put(written, whole.sharding) if is_placed else written)

    def _places(self) -> jax.Array:
        """Where each element is in the root, in order."""
        if self._strided is None:
            raise NotImplementedError(
                f"This view of shape {self.shape} has numbers of its own on the jax device, made of those of its base "
                "(z.real, z.conj(), x.t().view(-1)), and so cannot be written to. Write to the base "
                "(z = torch.complex(real, imag)), or to a clone()."
            )
        places = jnp.full(self.shape, int(self._strided.storage_offset()))
        for dim, (size, stride) in enumerate(zip(self.shape, self._strided.stride(), strict=True)):
            places += (jnp.arange(size) * stride).reshape(size, *[1] * (len(self.shape) - dim - 1))
        return places


DEVICE = torch.device("privateuseone", 0)  # `jax:0`, once `register` has named it


class JaxTensor(torch.Tensor):
    """A torch tensor whose data is a `jax.Array`; made by `torch_view`, `.to("jax")` or `device="jax"`."""

    _storage: Storage
    run_operator: ClassVar[Callable[[Operator], Callable[..., PyTree]]]
    """The way in which an ATen operator runs on these tensors; `dispatch` sets it."""

    @staticmethod
    def __new__(cls, storage: Storage, requires_grad: bool = False) -> "JaxTensor":
        strided = storage.strided if isinstance(storage, ViewStorage) else None
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            storage.shape,
            strides=None if strided is None else strided.stride(),
            storage_offset=None if strided is None else int(strided.storage_offset()),
            dtype=torch_dtype(storage.dtype),
            device=DEVICE,
            requires_grad=requires_grad,
        )
        tensor._storage = storage
        return tensor

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func is torch._has_compatible_shallow_copy_type:  # pyright: ignore[reportPrivateImportUsage]
            return _may_take_data(*args)  # if so, Module.to writes `data`, and so keeps each Parameter
        if func is torch.Tensor.detach and args[0]._moved_from is not None and _is_called_by_parameter():
            return args[0]._counterpart()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Operator, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        return cls.run_operator(func)(*args, **(kwargs or {}))

    # Module.to("jax") swaps a Parameter with its new tensor in place (torch.utils.swap_tensors) if the new one has
    # these two attributes. That keeps identity and ties, but fails while an autograd graph holds the Parameter; then
    # Module.to makes a new Parameter for each name, and the names of a tie must get the same one.
    _moved_from: torch.Tensor | None = None

    @property
    def __tensor_flatten__(self) -> Callable[[], tuple[list[str], object]]:
        source = self._moved_from if self._moved_from is not None else self
        if not _can_swap(source):
            raise AttributeError("__tensor_flatten__")
        return self._flatten

    __tensor_unflatten__ = __tensor_flatten__

    def _flatten(self) -> tuple[list[str], object]:
        raise NotImplementedError("A jax-device tensor has no inner torch tensors.")

    def _counterpart(self) -> "JaxTensor":
        """The one tensor for all names of the parameter that this one was moved from."""
        source = self._moved_from
        version, tensor = vars(source).get("_jax_counterpart", (None, None))
        if version != source._version:  # pyright: ignore[reportOptionalMemberAccess]
            tensor = JaxTensor(self._storage)
            vars(source)["_jax_counterpart"] = (source._version, tensor)  # pyright: ignore[reportOptionalMemberAccess]
        return tensor  # pyright: ignore[reportReturnType]

    def jax(self) -> "jax.Array":
        """The array itself, no copy."""
        return self._storage.read()

    @property
    def sharding(self) -> "jax.sharding.Sharding":
        """The sharding of the array."""
        return self.jax().sharding

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same data, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, JaxTensor):
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.data.__set__(self, value.detach())  # pyright: ignore[reportAttributeAccessIssue]
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

    def __array__(self, dtype: np.dtype | type | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.jax(), dtype=dtype)

    def tolist(self) -> PyTree:
        return self.detach().numpy().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shown = repr(to_host(self.jax()))
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{shown[:-1]}, device='{self.device}'{grad})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else format(repr(self), spec)

    def __deepcopy__(self, memo: dict) -> "JaxTensor":
        if id(self) not in memo:
            copied = JaxTensor(Storage(self.jax()), self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary CPU tensor, so that a file loads anywhere, with `weights_only=True` too."""
        return to_host(self.jax()).requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _can_swap(tensor: torch.Tensor) -> bool:
    """Tell whether torch.utils.swap_tensors accepts a tensor: no autograd graph and no weak reference holds it."""
    count = tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    return count <= 1 and not weakref.getweakrefs(tensor)


def _may_take_data(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether `tensor.data = value` can be written, for Module.to."""
    if not isinstance(tensor, JaxTensor):
        return False
    if not isinstance(value, JaxTensor) and not _can_swap(tensor):
        raise RuntimeError(
            "Module.to cannot take this parameter off the jax device while an autograd graph holds it: a loss or an "
            "output of the model is still alive. Let go of it (del loss), or keep loss.detach() instead."
        )
    return True


def _is_called_by_parameter() -> bool:
    """Tell whether the caller's caller is the constructor of `nn.Parameter`."""
    return sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__


def wrap_array(array: jax.Array) -> JaxTensor:
    """An array as a tensor, no copy."""
    return JaxTensor(Storage(wait_if_simulated(array)))


def to_array(value: torch.Tensor | ArrayLike, *, rounds: bool = False) -> jax.Array:
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
    return jnp.array(host_array(value, rounds=rounds))
