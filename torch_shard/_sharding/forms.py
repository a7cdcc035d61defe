"""Stored forms: how an array is kept where torch's own shape cannot be split as asked.

`restore` is made of views and slices only, so what derives it gives gradients in the stored form.
"""

# JAX and PyTorch annotate some of their functions in part; what a module holds is in attributes with an underscore.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn.modules.conv import _ConvNd

from torch_shard._common.specs import axes_of
from torch_shard._common.types import PyTree
from torch_shard._common.validate import is_integer
from torch_shard._sharding.stack_rows import moved_struct

Shape: TypeAlias = tuple[int, ...]
A = TypeVar("A", torch.Tensor, jax.Array, np.ndarray)


@dataclass(frozen=True)
class Pieces:
    """A fused projection as its pieces: `(num * n, ...)` is kept as `(num, n, ...)`, each piece split alike.

    Args:
        num: How many pieces of one size the dim has, such as 3 of query, key and value.
        dim: The fused dim of torch's shape; from the end where it is negative.

    Raises:
        TypeError: One of them is no whole number.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> form = Pieces(3, dim=0)
        >>> form.stored_shape((12, 8)), form.stored_spec(P("model", None), ndim=2)
        ((3, 4, 8), P(None, 'model', None))
    """

    num: int
    dim: int

    def __post_init__(self) -> None:
        _check_integers(self)

    def find_fault(self, shape: Shape) -> str | None:
        """Say what keeps this form from an entry, and what to do; None if it fits.

        Args:
            shape: Torch's.
        """
        fault = _find_dim_fault(self, shape)
        if fault:
            return fault
        if self.num < 1:
            return f"{self}: an entry has at least one piece. Say how many the model cuts it into."
        size = shape[self.dim]
        if size % self.num:
            return f"{self}: dim {self.dim} = {size} is not {self.num} pieces of one size. Give the number that it has."
        return None

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape that is kept.

        Args:
            shape: Torch's.
        """
        dim = self.dim % len(shape)
        return (*shape[:dim], self.num, shape[dim] // self.num, *shape[dim + 1 :])

    def split_shape(self, shape: Shape) -> Shape:
        """The shape that a spec splits: of one piece.

        Args:
            shape: Torch's.
        """
        dim = self.dim % len(shape)
        return (*shape[:dim], shape[dim] // self.num, *shape[dim + 1 :])

    def stored_spec(self, spec: PartitionSpec, *, ndim: int) -> PartitionSpec:
        """The spec that is kept: what split the fused dim splits every piece.

        Args:
            spec: For torch's shape.
            ndim: Number of dims of that.
        """
        parts = _parts(spec, ndim)
        dim = self.dim % ndim
        return PartitionSpec(*parts[:dim], None, *parts[dim:])

    def store(self, array: A) -> A:
        """The stored form of an array.

        Args:
            array: In torch's shape.
        """
        return cast(A, array.reshape(self.stored_shape(tuple(array.shape))))

    def restore(self, array: A, shape: Shape) -> A:
        """The array in torch's shape of a stored one.

        Args:
            array: As `store` gives it.
            shape: Torch's.
        """
        return cast(A, array.reshape(shape))


@dataclass(frozen=True)
class Padded:
    """A dim that does not divide, with zeros at its end up to a size that does.

    Args:
        size: Of the dim as it is kept.
        dim: The padded dim; from the end where it is negative.

    Raises:
        TypeError: One of them is no whole number.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> Padded(50258, dim=0).stored_shape((50257, 768))
        (50258, 768)
    """

    size: int
    dim: int

    def __post_init__(self) -> None:
        _check_integers(self)

    def find_fault(self, shape: Shape) -> str | None:
        """Say what keeps this form from an entry, and what to do; None if it fits.

        Args:
            shape: Torch's.
        """
        fault = _find_dim_fault(self, shape)
        if fault:
            return fault
        size = shape[self.dim]
        if self.size < size:
            return f"{self}: dim {self.dim} = {size} is larger. Give a size of at least {size}."
        return None

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape that is kept.

        Args:
            shape: Torch's.
        """
        dim = self.dim % len(shape)
        return (*shape[:dim], self.size, *shape[dim + 1 :])

    def split_shape(self, shape: Shape) -> Shape:
        """The shape that a spec splits: the one that is kept.

        Args:
            shape: Torch's.
        """
        return self.stored_shape(shape)

    def stored_spec(self, spec: PartitionSpec, *, ndim: int) -> PartitionSpec:
        """The spec that is kept: the same.

        Args:
            spec: For torch's shape.
            ndim: Number of dims of that.
        """
        return PartitionSpec(*_parts(spec, ndim))

    def store(self, array: A) -> A:
        """The stored form of an array: zeros behind it.

        Args:
            array: In torch's shape.
        """
        dim = self.dim % array.ndim
        widths = [(0, 0)] * array.ndim
        widths[dim] = (0, self.size - array.shape[dim])

        if isinstance(array, torch.Tensor):
            # torch's widths begin at the last dim.
            flat_widths = [width for pair in reversed(widths) for width in pair]
            return torch.nn.functional.pad(array, flat_widths)
        pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
        return cast(A, pad(array, widths))

    def restore(self, array: A, shape: Shape) -> A:
        """The array in torch's shape of a stored one: without the padding.

        Args:
            array: As `store` gives it.
            shape: Torch's.
        """
        return cast(A, array[tuple(slice(size) for size in shape)])


@dataclass(frozen=True)
class KernelLast:
    """A kernel of a convolution in the order that XLA:TPU computes in: `(O, I, *space)` is kept as `(*space, I, O)`.

    A TPU lays the last two dims of an array out in tiles of 8 x 128. In torch's order these are the kernel's few
    pixels, so that every step would bring each kernel, and what an optimizer keeps for it, into another order and back.

    Args:
        ndim: Number of dims of torch's shape.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> form = KernelLast(4)
        >>> form.stored_shape((64, 16, 3, 3)), form.stored_spec(P("model", None, None, None), ndim=4)
        ((3, 3, 16, 64), P(None, None, None, 'model'))
    """

    ndim: int

    def find_fault(self, shape: Shape) -> str | None:
        """Say what keeps this form from an entry, and what to do; None if it fits."""
        if len(shape) == self.ndim > 2:
            return None
        return f"{self}: the entry has shape {shape}. Leave it out."

    def _order(self, ndim: int) -> list[int]:
        """Which dim of torch's shape each dim of what is kept is; those before a row's own stay in front."""
        out_channels = ndim - self.ndim
        in_channels = out_channels + 1
        stacked_dims = range(out_channels)
        space = range(in_channels + 1, ndim)
        return [*stacked_dims, *space, in_channels, out_channels]

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape that is kept."""
        return tuple(shape[dim] for dim in self._order(len(shape)))

    def stored_spec(self, spec: PartitionSpec, *, ndim: int) -> PartitionSpec:
        """The spec that is kept."""
        parts = _parts(spec, ndim)
        return PartitionSpec(*(parts[dim] for dim in self._order(ndim)))

    def restored_spec(self, spec: PartitionSpec, *, ndim: int) -> PartitionSpec:
        """The inverse."""
        parts = dict(zip(self._order(ndim), _parts(spec, ndim), strict=True))
        return PartitionSpec(*(parts[dim] for dim in range(ndim)))

    def store(self, array: A) -> A:
        """The stored form of an array."""
        return _permuted(array, self._order(array.ndim))

    def restore(self, array: A, shape: Shape) -> A:
        """The array in torch's shape of a stored one."""
        order = self._order(len(shape))
        return _permuted(array, [order.index(dim) for dim in range(len(shape))])


def _permuted(array: A, order: list[int]) -> A:
    if isinstance(array, torch.Tensor):
        return array.permute(order)
    return cast(A, array.transpose(order))


Form: TypeAlias = Pieces | Padded | KernelLast


def kernel_forms(model: torch.nn.Module | None, platform: str) -> dict[str, Form]:
    """The kernels of a model's convolutions, by name, in the form that devices of this platform compute with."""
    forms: dict[str, Form] = {}
    if platform != "tpu" or model is None:
        return forms

    for path, module in model.named_modules():
        # A weight that is computed (by weight_norm, say) is no parameter of the module.
        weight = module._parameters.get("weight")
        if isinstance(module, _ConvNd) and weight is not None:
            forms[f"{path}.weight" if path else "weight"] = KernelLast(weight.ndim)
    return forms


@dataclass(frozen=True)
class Kept:
    """An entry that is kept in another form: what its arrays, shapes and shardings are in either."""

    form: Form
    shape: Shape

    @functools.cached_property
    def _form(self) -> Form:
        """The form by its dim from the end, so that it is that of a stack of such rows too."""
        if isinstance(self.form, KernelLast):
            return self.form
        ndim = len(self.shape)
        return replace(self.form, dim=self.form.dim % ndim - ndim)

    @property
    def is_rearranged(self) -> bool:
        """Whether what is kept has the elements of torch's shape and no others, in other dims."""
        return not isinstance(self.form, Padded)

    @property
    def cut(self) -> tuple[int, int] | None:
        """Number of pieces, and the fused dim from the end; None if it is in one."""
        if not isinstance(self._form, Pieces):
            return None
        return self._form.num, self._form.dim

    @property
    def stored_shape(self) -> Shape:
        """The shape that is kept."""
        return self.form.stored_shape(self.shape)

    def stored_sharding(self, sharding: NamedSharding, *, is_stack: bool = False) -> NamedSharding:
        """The sharding that is kept, for that of torch's shape; of rows that are stacked, too."""
        ndim = len(self.shape) + is_stack
        return sharding.update(spec=self._form.stored_spec(sharding.spec, ndim=ndim))

    def restored_sharding(self, sharding: NamedSharding, *, is_stack: bool = False) -> NamedSharding:
        """The inverse, as far as torch's shape divides."""
        ndim = len(self.stored_shape) + is_stack
        if isinstance(self._form, KernelLast):
            return sharding.update(spec=self._form.restored_spec(sharding.spec, ndim=ndim))

        parts = _parts(sharding.spec, ndim)
        dim = self._form.dim
        if isinstance(self._form, Pieces):
            # The dim of the pieces, which stands before that of one piece.
            del parts[len(parts) + dim - 1]
        else:
            axes = axes_of((cast(Any, parts[dim]),))
            num_shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
            if self.shape[dim] % num_shards:
                parts[dim] = None
        return sharding.update(spec=PartitionSpec(*parts))

    def is_whole(self, leaf: object, *, is_stack: bool) -> bool:
        """Tell whether a leaf has torch's shape, or is a stack of such rows."""
        return _row_shape(leaf, is_stack=is_stack) == self.shape

    def is_stored(self, leaf: object, *, is_stack: bool) -> bool:
        """Tell whether a leaf has the shape that is kept, or is a stack of such rows."""
        return _row_shape(leaf, is_stack=is_stack) == self.stored_shape

    def store(self, leaf: PyTree, *, is_stack: bool = False) -> PyTree:
        """A tensor, array or struct in torch's shape, or a stack of such rows, as it is kept."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = self._form.stored_shape(leaf.shape)
            return moved_struct(leaf, shape, lambda sharding: self.stored_sharding(sharding, is_stack=is_stack))
        return self._form.store(leaf)

    def restore(self, leaf: PyTree, *, is_stack: bool = False) -> PyTree:
        """The inverse; each shard of an array stays where the spec of torch's shape has it, as far as that divides."""
        if isinstance(leaf, NamedSharding):
            return self.restored_sharding(leaf, is_stack=is_stack)
        # An optimizer has other things for each entry, such as a number of steps.
        if not self.is_stored(leaf, is_stack=is_stack):
            return leaf

        shape = (*leaf.shape[:is_stack], *self.shape)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return moved_struct(leaf, shape, lambda sharding: self.restored_sharding(sharding, is_stack=is_stack))
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_concrete and isinstance(leaf.sharding, NamedSharding):
            # Compiled, so that no device ever has the whole array.
            sharding = self.restored_sharding(leaf.sharding, is_stack=is_stack)
            return _restorer(self._form, shape, sharding)(leaf)
        return self._form.restore(cast(Any, leaf), shape)

    def in_program(self, leaf: PyTree, *, is_stack: bool = False) -> PyTree:
        """What is kept, as a program takes it: in pieces, or in torch's shape."""
        is_in_pieces = self.cut is not None
        return leaf if is_in_pieces else self.restore(leaf, is_stack=is_stack)


def _row_shape(leaf: object, *, is_stack: bool) -> Shape | None:
    """The shape of a leaf, or of one row of a stack; None for what has no shape."""
    if not hasattr(leaf, "shape"):
        return None
    return tuple(cast(Any, leaf).shape)[int(is_stack) :]


@functools.cache
def _restorer(form: Form, shape: Shape, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    def restore(array: jax.Array) -> jax.Array:
        return form.restore(array, shape)

    return jax.jit(restore, out_shardings=sharding)


def _check_integers(form: Form) -> None:
    for field in fields(form):
        value = getattr(form, field.name)
        if not is_integer(value):
            raise TypeError(f"{type(form).__name__}: {field.name} must be a whole number, got {value!r}.")


def _find_dim_fault(form: Pieces | Padded, shape: Shape) -> str | None:
    if -len(shape) <= form.dim < len(shape):
        return None
    return f"{form}: the entry has {len(shape)} dims, {shape}. Name one of them."


def _parts(spec: PartitionSpec, ndim: int) -> list[object]:
    """One part for each dim."""
    return [*spec, *[None] * (ndim - len(spec))]
