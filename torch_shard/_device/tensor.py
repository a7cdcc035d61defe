"""The eager tensor of the jax device: a torch.Tensor whose data is a jax.Array, and the storage that views share."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from torch.multiprocessing.reductions import StorageWeakRef

from torch_shard._common.convert import host_array, to_host
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.simulated import wait_if_simulated
from torch_shard._common.types import Operator, PyTree
from torch_shard._hosts import exchange


class Source(Protocol):
    """Where the values of a tensor are while they are not its own: an entry of a train state."""

    shape: tuple[int, ...]
    dtype: np.dtype
    torch_dtype: torch.dtype
    content: object
    """What stands for the present values: another object as soon as they are others."""

    def read(self) -> jax.Array:
        """The present values."""
        ...

    def write(self, value: jax.Array) -> None:
        """Let these be the values, of the entry's shape and dtype."""
        ...

    def is_own(self, array: jax.Array) -> bool:
        """Tell whether an array lies in memory that a step takes back."""
        ...

    def refuse_missing_grad(self, asking: types.FrameType) -> None:
        """Raise where code that asks for a gradient would take None for what the step has computed."""
        ...


class Storage:
    """Storage that aliases share: an array, a way to read and write a part of another storage, or a source.

    Args:
        value: An array, or the shape and dtype of one before the first write.
        torch_dtype: As torch has it, where JAX holds 64 bits in 32.
    """

    def __init__(self, value: jax.Array | jax.ShapeDtypeStruct | None, torch_dtype: torch.dtype | None = None) -> None:
        self.value, self.source = value, None
        self._torch_dtype = torch_dtype
        if value is not None:
            self.shape, self.dtype = tuple(value.shape), value.dtype

    source: Source | None
    pickled: tuple[StorageWeakRef | None, object] = (None, None)
    """The memory of the copy on the CPU that was pickled last, as long as it is there, and of which values it is."""

    @classmethod
    def of(cls, source: Source) -> "Storage":
        """A storage without an array of its own."""
        storage = cls(None)
        storage.follow(source)
        return storage

    def follow(self, source: Source) -> None:
        """Have the values of a source from now on, for all aliases."""
        self.value, self.source = None, source
        self.shape, self.dtype, self._torch_dtype = source.shape, source.dtype, source.torch_dtype

    def leave(self) -> None:
        """Keep the values that the source has now, for all aliases."""
        value = self.read()
        self.value, self.source = jnp.copy(value), None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return torch_dtype(self.dtype) if self._torch_dtype is None else self._torch_dtype

    @property
    def is_written(self) -> bool:
        """Tell whether there are values yet."""
        return not isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def root(self) -> "Storage":
        """Where the elements are."""
        return self

    @property
    def strided(self) -> torch.Tensor:
        """A meta tensor with the strides that it has in torch, over those of the root."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    @property
    def content(self) -> object:
        """What stands for the present values: another object as soon as they are others."""
        return self.value if self.source is None else self.source.content

    def read(self) -> jax.Array:
        if self.source is not None:
            return self.source.read()
        if isinstance(self.value, jax.ShapeDtypeStruct):
            self.value = jnp.zeros(self.shape, self.dtype)
        assert self.value is not None
        return self.value

    def write(self, value: jax.Array) -> None:
        value = jnp.asarray(value, self.dtype)
        value = wait_if_simulated(value if value.shape == self.shape else jnp.broadcast_to(value, self.shape))
        if self.source is not None:
            self.source.write(value)
        else:
            self.value = value

    def keep(self, array: jax.Array) -> jax.Array:
        """An array that was read here, as one that stays when a step takes back its memory."""
        is_lent = self.source is not None and self.source.is_own(array)
        return jnp.copy(array) if is_lent else array


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
        self.dtype, self.source = base.dtype, None
        if strided is None:
            assert view is not None
            made = jax.eval_shape(view, jax.ShapeDtypeStruct(base.shape, base.dtype))
            self.shape, self.dtype = tuple(made.shape), made.dtype
        else:
            self.shape = tuple(strided.shape)
        self._torch_dtype = None if strided is None else strided.dtype

    @property
    def is_written(self) -> bool:
        return self.base.is_written

    @property
    def root(self) -> Storage:
        return self if self._strided is None else self.base.root

    @property
    def content(self) -> object:
        return self.base.content

    def keep(self, array: jax.Array) -> jax.Array:
        return self.base.keep(array)

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


_GRAD: Any = torch.Tensor.grad  # PyTorch's own descriptor, behind ours

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
            dtype=storage.torch_dtype,
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
        if (rearranged := _REARRANGED.get(func)) is not None:
            func = functools.partial(rearranged, func)
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
        # Of others, libraries would take it for the sign of a wrapper with tensors inside (huggingface_hub does).
        if self._moved_from is None or not _can_swap(self._moved_from):
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
        """The array itself, no copy; of an entry that a run trains, one that its next step takes back."""
        return self._storage.read()

    @property
    def source(self) -> Source | None:
        """What it has its values of, if it is an entry of a state."""
        return self._storage.source

    @property
    def content(self) -> object:
        """What stands for its present values: another object as soon as they are others."""
        return self._storage.content

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
        grad = _own_grad(self)
        replacement = value.detach().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            replacement = torch.nn.Parameter(replacement, requires_grad=self.requires_grad)
        replace_in_place(self, replacement)
        _GRAD.__set__(self, None if grad is None else grad.to(value.device))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of an eager backward pass."""
        grad, source = _own_grad(self), self._storage.source
        if grad is None and source is not None and self.requires_grad and vars(self).get("_is_param", False):
            source.refuse_missing_grad(sys._getframe(1))
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, None)

    def untyped_storage(self) -> "Memory":  # pyright: ignore[reportIncompatibleMethodOverride]
        """What libraries ask of a storage: whether two tensors share one, and its size."""
        return Memory(self)

    storage = untyped_storage

    def data_ptr(self) -> int:
        """A number that stands for where the first element is, as libraries compare it with that of the storage."""
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.element_size()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A copy of the global value on the host."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a tensor that requires grad. Use tensor.detach().numpy().")
        array = np.array(whole_on_host(self.jax()))
        array.flags.writeable = (
            self._storage.root.source is None
        )  # a write would not reach the run, as it does in torch
        return array

    def __array__(self, dtype: np.dtype | type | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(whole_on_host(self.jax()), dtype=dtype)

    def tolist(self) -> PyTree:
        return self.detach().numpy().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shown = repr(self.cpu_copy())
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{shown[:-1]}, device='{self.device}'{grad})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else format(repr(self), spec)

    def __copy__(self) -> "JaxTensor":
        """Another tensor of the same storage, as in torch."""
        return self._of(self._storage)

    def __deepcopy__(self, memo: dict) -> "JaxTensor":
        if id(self) not in memo:
            memo[id(self)] = self._of(Storage(self._storage.keep(self.jax()), self.dtype))
        return memo[id(self)]

    def _of(self, storage: Storage) -> "JaxTensor":
        """A leaf like this one, of another storage."""
        leaf = type(self)(storage, self.requires_grad)
        if getattr(self, "_is_param", False):
            leaf._is_param = True
        return leaf

    def cpu_copy(self) -> torch.Tensor:
        """An ordinary CPU tensor of the same values and dtype."""
        return to_host(whole_on_host(self.jax())).to(self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary CPU tensor, so that a file loads anywhere, with `weights_only=True` too."""
        host = self._to_be_pickled()
        if getattr(self, "_is_param", False):
            host = torch.nn.Parameter(host, requires_grad=self.requires_grad)
        return host.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _to_be_pickled(self) -> torch.Tensor:
        """A copy on the CPU; that of the other name of a tie, while it is still there."""
        storage = self._storage
        known, content = storage.pickled
        memory = None
        if known is not None and content is storage.content:
            memory = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
        if memory is not None:
            return torch.empty(0, dtype=self.dtype, device="cpu").set_(memory).view(self.shape)
        host = self.cpu_copy()
        storage.pickled = StorageWeakRef(host.untyped_storage()), storage.content
        return host


class Memory:
    """As much of a `torch.UntypedStorage` as libraries ask for, to find tensors that share one."""

    def __init__(self, tensor: JaxTensor) -> None:
        self._root, self.device = tensor._storage.root, tensor.device
        self._num_bytes = torch.Size(self._root.shape).numel() * self._root.torch_dtype.itemsize

    def data_ptr(self) -> int:
        """A number that tensors with one storage have in common."""
        return id(self._root)

    _data_ptr = data_ptr

    @property
    def _cdata(self) -> int:
        return id(self._root)

    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._num_bytes

    size = nbytes
    __len__ = nbytes


def whole_on_host(array: jax.Array) -> jax.Array:
    """An array of which this process has the whole; if it lies on several, all of them must ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    exchange(lambda: None)  # no process waits forever for one that does not ask
    return multihost_utils.process_allgather(array, tiled=True)


def _own_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(tensor)


def replace_in_place(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Let a tensor object be another tensor: all that hold it (names of a tie, an optimizer's groups) hold that then.

    As `torch.utils.swap_tensors`, which refuses a tensor that is weakly referenced (the weights of nn.LSTM, and what
    was captured) or that a graph of autograd holds. Hooks on the gradient stay. A backward pass through a graph of
    before is an error, as its gradients would go to a tensor that nobody has.

    Args:
        tensor: A leaf.
        new: Nobody else uses it; it is what `tensor` was, afterwards.
    """
    if _is_in_graph(tensor):
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_old_graph)
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._swap_tensor_impl(tensor, new)  # pyright: ignore[reportAttributeAccessIssue]
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(tensor, hooks, None)) is not None:
            setattr(
                tensor, hooks, registered
            )  # PyTorch calls those of the implementation, and finds them by the object


def _refuse_old_graph(cotangents: object) -> None:
    raise RuntimeError(
        "backward() goes through a graph that was made before the model moved to the jax device or off it (step.init, "
        "model.to), whose gradients would reach nobody. Run forward again."
    )


def _can_swap(tensor: torch.Tensor) -> bool:
    """Tell whether torch.utils.swap_tensors accepts a tensor: no autograd graph and no weak reference holds it."""
    count = tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    return count <= 1 and not weakref.getweakrefs(tensor)


def _may_take_data(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether `tensor.data = value` can be written, for Module.to."""
    if not isinstance(tensor, JaxTensor):
        return False
    if not isinstance(value, JaxTensor) and _is_in_graph(tensor):
        raise RuntimeError(
            "Module.to cannot take this parameter off the jax device while an autograd graph holds it: a loss or an "
            "output of the model is still alive. Let go of it (del loss), or keep loss.detach() instead."
        )
    return True


def _is_in_graph(tensor: torch.Tensor) -> bool:
    """Tell whether a graph of autograd holds a leaf, or a view of it is alive."""
    return tensor.requires_grad and tensor._use_count() > 1  # pyright: ignore[reportAttributeAccessIssue]


# Functions of PyTorch's that would give one of their own tensors another shape in place, which an array cannot have.


def _linear(func: Callable, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PyTree:
    return func(input[None], weight, bias)[0] if input.ndim == 1 else func(input, weight, bias)


def _recurrent(func: Callable, *args: Any) -> PyTree:
    """A recurrent net: of sequences that are not packed, the last argument is whether rows come before time."""
    is_packed = not isinstance(args[3], bool)
    if is_packed or not args[8]:
        return func(*args)
    output, *state = func(args[0].transpose(0, 1), *args[1:8], False)
    return output.transpose(0, 1), *state


_REARRANGED: dict[Any, Callable] = {
    torch.nn.functional.linear: _linear,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}


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
