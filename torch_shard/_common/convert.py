"""Values across the border: torch tensors, numpy arrays and Python numbers as JAX holds them, and back."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike
from torch.utils import _pytree as torch_pytree

from torch_shard._common.caller import caller
from torch_shard._common.dtypes import is_of_numpy, jax_dtype, torch_dtype
from torch_shard._common.types import PyTree

T = TypeVar("T")


@jax.tree_util.register_static
class Static(Generic[T]):
    """A hashable Python value that rides in a pytree; to be equal, types must be too (2, 2.0 and True are not)."""

    def __init__(self, value: T) -> None:
        self.value, self._exact = value, _exact(value)

    def __hash__(self) -> int:
        return hash(self._exact)

    def __repr__(self) -> str:
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._exact == other._exact


def _exact(value: object) -> object:
    """A key that is equal only for values that mean the same to a program."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind, *(_exact(item) for item in cast(tuple[object, ...], value))
    return kind, repr(value) if isinstance(value, float | complex) else value  # -0.0 is not 0.0, nan is nan


_SCALAR_DTYPES = {float: np.float32, complex: np.complex64}

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}  # dtypes that numpy lacks travel as these


def host_array(value: torch.Tensor | ArrayLike, *, rounds: bool = False) -> np.ndarray:
    """A CPU tensor, numpy array or Python scalar as a numpy array in the dtype that JAX will hold; it may alias."""
    if isinstance(value, torch.Tensor):
        value = tensor_to_numpy(value)
    elif isinstance(value, (bool, int, float, complex)):
        value = np.asarray(value, _SCALAR_DTYPES.get(type(value)))
    return narrow(np.asarray(value), rounds=rounds)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a numpy array of the same dtype; it may alias."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"A {tensor.layout} tensor cannot move to the jax device; use .to_dense() or .dequantize().")
    if is_of_numpy(tensor.dtype):
        return tensor.numpy(force=True)
    dtype = np.dtype(jax_dtype(tensor.dtype))
    return tensor.detach().contiguous().view(_BITS[dtype.itemsize][0]).numpy().view(dtype)


def narrow(array: np.ndarray, *, rounds: bool = False) -> np.ndarray:
    """`array` in the dtype that JAX will hold, refused where that would change a value."""
    if array.dtype == object:  # an int that numpy has no dtype for, or a list of anything
        raise OverflowError(f"{array.tolist()!r:.99} does not fit 64 bits. Give numbers of fewer digits, or floats.")
    target = jax.dtypes.canonicalize_dtype(array.dtype)
    if target == array.dtype:
        return array
    is_inexact = array.dtype.kind in "fc"
    if is_inexact and not rounds:
        raise TypeError(
            f"A {array.dtype} array of shape {array.shape} needs 64 bits, and JAX has them switched off. Convert it "
            "(tensor.float(), array.astype('float32')), or jax.config.update('jax_enable_x64', True) at the start."
        )
    with np.errstate(over="ignore"):
        narrowed = array.astype(target)
    fits = np.isfinite(narrowed) == np.isfinite(array) if is_inexact else narrowed == array
    if not np.all(fits):
        finite, article = array[np.isfinite(array)], "An" if array.dtype.kind == "i" else "A"
        raise OverflowError(
            f"{article} {array.dtype} array of shape {array.shape} has values from {finite.min()} to {finite.max()}, "
            f"which do not fit {target}, and JAX has 64 bits switched off. "
            "jax.config.update('jax_enable_x64', True) at the start of the program keeps them."
        )
    return narrowed


def to_host(array: jax.Array) -> torch.Tensor:
    """An ordinary CPU tensor with a copy of the global value."""
    host = np.array(array)
    if is_of_numpy(dtype := torch_dtype(host.dtype)):
        return torch.from_numpy(host)
    return torch.from_numpy(host.view(_BITS[host.dtype.itemsize][1])).view(dtype)


def struct_of(value: torch.Tensor | jax.ShapeDtypeStruct | ArrayLike) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor, array or number as JAX holds it; of a JAX array its sharding too."""
    if isinstance(value, torch.Tensor):
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(jax_dtype(value.dtype)))
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(value))
    return jax.ShapeDtypeStruct(jnp.shape(value), dtype, sharding=getattr(value, "sharding", None))


def flatten(tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None) -> tuple[list[PyTree], object]:
    """`jax.tree.flatten`, with an error of ours where a dict has keys that cannot be put in order."""
    try:
        return cast(tuple[list[PyTree], object], jax.tree.flatten(tree, is_leaf))
    except ValueError as error:
        keys = _unsortable(tree)
        if keys is None:
            raise
        raise TypeError(
            f"{caller()}: a dict has the keys {', '.join(map(repr, keys))}, which cannot be put in order, as JAX does. "
            "Give it keys of one type."
        ) from error


_GAP = object()


class Rest:
    """A tree without some of its leaves, in whose places others go.

    Attributes:
        structure: Of the tree.
        leaves: Those that stay, with a gap for each other one: equal for trees that differ in what was taken out alone.
    """

    def __init__(self, structure: object, leaves: tuple[PyTree, ...]) -> None:
        self.structure, self.leaves = structure, leaves

    def filled(self, values: Iterable[PyTree]) -> PyTree:
        """The tree with these leaves, of which it takes as many as there are gaps."""
        given = iter(values)
        return jax.tree.unflatten(self.structure, [next(given) if leaf is _GAP else leaf for leaf in self.leaves])


def take_out(tree: PyTree, *kinds: type) -> tuple[list[PyTree], Rest]:
    """The leaves of a tree that are of these kinds, and the rest."""
    leaves, structure = flatten(tree)
    taken = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    return taken, Rest(structure, tuple(_GAP if isinstance(leaf, kinds) else leaf for leaf in leaves))


def _unsortable(node: Any) -> list[object] | None:
    """Find the keys of a dict in a tree that cannot be sorted."""
    inner = list(cast(list[object], node)) if isinstance(node, list | tuple) else []
    if isinstance(node, dict):
        held = cast(dict[Any, object], node)
        try:
            sorted(held)
        except TypeError:
            return list(held)
        inner = list(held.values())
    return next((keys for keys in map(_unsortable, inner) if keys is not None), None)


def adopt_torch_nodes(tree: PyTree) -> None:
    """Teach JAX the container classes in `tree` that torch's pytrees know (Hugging Face's outputs, for example)."""
    for leaf in flatten(tree)[0]:
        kind = type(cast(object, leaf))
        node = torch_pytree.SUPPORTED_NODES.get(kind)
        if node is not None:
            jax.tree_util.register_pytree_node(kind, node.flatten_fn, functools.partial(_unflatten, node))
            adopt_torch_nodes(leaf)


def _unflatten(node: torch_pytree.NodeDef, context: PyTree, children: Iterable[PyTree]) -> PyTree:
    return node.unflatten_fn(children, context)


def spread_prefix(prefix: PyTree, tree: Any) -> list[Any]:
    """What may stand for whole subtrees of this structure, as one for each leaf; None is one too."""
    leaves = jax.tree.unflatten(tree, range(tree.num_leaves))
    return tree.flatten_up_to(jax.tree.broadcast(prefix, leaves, is_leaf=lambda each: each is None))
