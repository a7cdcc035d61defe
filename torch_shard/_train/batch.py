"""Batches: their array leaves, and what a program depends on in them."""

# JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import Spec
from torch_shard._common.caller import caller
from torch_shard._common.convert import adopt_torch_nodes, flatten
from torch_shard._common.dtypes import captured_dtype, torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._common.validate import named


@dataclasses.dataclass(frozen=True)
class BatchSignature:
    """The part of a batch that a program depends on: its structure, and per leaf a `Spec` or a plain value."""

    tree: object
    leaves: tuple[object, ...]
    order: Any = None
    """The keys of the batch's dicts in the order in which they were put in; JAX sorts them."""

    @property
    def specs(self) -> list[Spec]:
        """The array leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Spec)]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        """The batch, with these tensors as its array leaves."""
        given = iter(tensors)
        batch = jax.tree.unflatten(self.tree, [next(given) if isinstance(x, Spec) else x for x in self.leaves])
        return _reordered(batch, self.order)


def flatten_batch(batch: PyTree) -> tuple[list[PyTree], BatchSignature]:
    """The array leaves of a batch (tensors, arrays, numbers) and its signature."""
    leaves, tree = flatten(batch)
    if any(type(leaf) in torch_pytree.SUPPORTED_NODES for leaf in leaves):
        adopt_torch_nodes(batch)
        leaves, tree = cast(tuple[list[PyTree], object], jax.tree.flatten(batch))
    _check_leaves(leaves)
    try:
        described = tuple(map(_describe, leaves))
    except TypeError:
        for leaf, path in zip(leaves, _leaf_paths(batch), strict=True):
            with named(path):
                _describe(leaf)
        raise
    signature = BatchSignature(tree, described, _order(batch))
    return [x for x, kind in zip(leaves, signature.leaves, strict=True) if isinstance(kind, Spec)], signature


def _order(batch: Any) -> Any:
    """The order of keys of a batch and of the containers in it."""
    if type(batch) is dict:
        return tuple((key, _order(value)) for key, value in cast(dict[object, PyTree], batch).items())
    return tuple(map(_order, batch)) if type(batch) in (list, tuple) else None


def _reordered(batch: Any, order: Any) -> Any:
    if type(batch) is dict:
        return {key: _reordered(batch[key], inner) for key, inner in order}
    if type(batch) in (list, tuple):
        return type(batch)(_reordered(value, inner) for value, inner in zip(batch, order, strict=True))
    return batch


def _check_leaves(leaves: list[object]) -> None:
    for leaf in leaves:
        if type(leaf).__hash__ is None and not isinstance(leaf, np.ndarray | jax.Array):
            kind = type(leaf).__name__
            hint = f"jax.tree_util.register_dataclass({kind}) once" if dataclasses.is_dataclass(leaf) else "a dict"
            raise TypeError(
                f"{caller()}: the batch has a leaf of type {kind}, which is neither an array nor a container that JAX "
                f"knows. Pass its parts in a tuple or a dict, or make it known: {hint}."
            )


def _describe(leaf: PyTree) -> object:
    if isinstance(leaf, torch.Tensor):
        return Spec(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return Spec(leaf.shape, torch_dtype(leaf.dtype))
    if isinstance(leaf, jax.Array):
        return Spec(leaf.shape, captured_dtype(leaf.dtype))
    if isinstance(leaf, (int, float, np.number)) and not isinstance(leaf, bool):
        return Spec((), torch.int64 if isinstance(leaf, (int, np.integer)) else torch.float32)
    return leaf


def _leaf_paths(batch: PyTree) -> list[str]:
    """Path of each leaf of a batch, for messages."""
    leaves = cast(list[tuple[tuple[object, ...], object]], jax.tree_util.tree_leaves_with_path(batch))
    return ["batch" + jax.tree_util.keystr(path) for path, _ in leaves]


def array_paths(batch: PyTree, signature: BatchSignature) -> list[str]:
    """Path of each array leaf."""
    pairs = zip(_leaf_paths(batch), signature.leaves, strict=True)
    return [path for path, kind in pairs if isinstance(kind, Spec)]
