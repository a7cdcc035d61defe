"""Batches: their array leaves, and what a program depends on in them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch

from torch_shard._capture import Spec
from torch_shard._common.convert import flatten
from torch_shard._common.dtypes import captured_dtype, torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._common.validate import named
from torch_shard._loss.batch_objects import TakenApart, is_static, take_apart


@dataclasses.dataclass(frozen=True)
class BatchSignature:
    """The part of a batch that a program depends on: its structure, and per leaf a `Spec` or a plain value."""

    tree: object
    leaves: tuple[object, ...]
    """Of an object that JAX does not know a `TakenApart`, and its arrays after it."""
    order: Any = None
    """The keys of the batch's dicts in the order in which they were put in; JAX sorts them."""

    @property
    def specs(self) -> list[Spec]:
        """The array leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Spec)]

    @property
    def paths(self) -> list[str]:
        """Path of each array leaf, for messages."""
        return array_paths(self.rebuild([torch.empty(spec.shape, device="meta") for spec in self.specs]))

    @property
    def texts(self) -> list[str]:
        """Ids of rows, names of files and the like."""
        return [leaf for leaf in self.leaves if type(leaf) is str]

    @property
    def without_texts(self) -> "BatchSignature":
        """The same for all texts."""
        return self.with_texts([""] * len(texts)) if (texts := self.texts) else self

    def with_texts(self, texts: Iterable[object]) -> "BatchSignature":
        """The same with these texts in the places of its own."""
        given = iter(texts)
        leaves = (next(given) if type(leaf) is str else leaf for leaf in self.leaves)
        return dataclasses.replace(self, leaves=tuple(leaves))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        """The batch, with these tensors as its array leaves."""
        batch = jax.tree.unflatten(self.tree, list(self._rebuilt(tensors)))
        return _reordered(batch, self.order)

    def _rebuilt(self, tensors: Sequence[torch.Tensor]) -> Iterator[PyTree]:
        given, leaves = iter(tensors), iter(self.leaves)
        for leaf in leaves:
            if isinstance(leaf, TakenApart):
                yield leaf.rebuild([next(given) for _, _ in zip(leaf.holes, leaves, strict=False)])
            else:
                yield next(given) if isinstance(leaf, Spec) else leaf


def flatten_batch(batch: PyTree) -> tuple[list[PyTree], BatchSignature]:
    """The array leaves of a batch (tensors, arrays, numbers) and its signature."""
    leaves, tree = flatten(batch, _is_iterator)
    leaves = list(map(_number, leaves))
    found, kinds = list[PyTree](), list[object]()
    for number, leaf in enumerate(leaves):
        try:
            kind = _describe(leaf)
        except TypeError:
            with named(_paths(batch)[number]):
                raise
        if kind is None:
            apart, arrays = take_apart(leaf, _paths(batch)[number])
            kinds += [apart, *(_describe(array) for _, array in arrays)]
            found += [array for _, array in arrays]
        else:
            kinds.append(kind)
            found += [leaf] if isinstance(kind, Spec) else []
    return found, BatchSignature(tree, tuple(kinds), _order(batch))


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


def _number(leaf: PyTree) -> PyTree:
    """A number of NumPy as Python's, which torch takes it for beside a tensor."""
    return leaf.item() if isinstance(leaf, np.number) and not isinstance(leaf, np.timedelta64) else leaf


def _describe(leaf: PyTree) -> object:
    """What a program depends on in a leaf; None for an object to be taken apart."""
    if isinstance(leaf, torch.Tensor):
        return Spec(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return Spec(leaf.shape, torch_dtype(leaf.dtype))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return Spec(leaf.shape, captured_dtype(leaf.dtype))
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        return Spec((), torch.int64 if isinstance(leaf, int) else torch.float32)
    return leaf if is_static(leaf) else None


def array_paths(batch: PyTree) -> list[str]:
    """Path of each array leaf of a batch, for messages."""
    found: list[str] = []
    for path, leaf in zip(_paths(batch), jax.tree.leaves(batch, _is_iterator), strict=True):
        kind = _describe(_number(leaf))
        if kind is None:
            found += [path + inner for inner, _ in take_apart(leaf, path)[1]]
        elif isinstance(kind, Spec):
            found.append(path)
    return found


def _paths(batch: PyTree) -> list[str]:
    leaves = cast(list[tuple[tuple[object, ...], object]], jax.tree_util.tree_leaves_with_path(batch, _is_iterator))
    return ["batch" + jax.tree_util.keystr(path) for path, _ in leaves]


def _is_iterator(node: object) -> bool:
    """Tell what JAX is not to look into, nor to warn of."""
    return isinstance(node, Iterator)


class Text:
    """A text that notes whatever is asked of it; C code, which would leave no trace, finds no text and raises."""

    def __init__(self, value: str, read: list[str]) -> None:
        self._value, self._read = value, read

    @property
    def __class__(self) -> type:  # isinstance(text, str), which is so of all
        return str

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("__class__ of a text cannot be set")

    def __deepcopy__(self, memo: object) -> "Text":
        return self

    def __radd__(self, before: str) -> str:
        return before + self.__str__()


def _noting(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._read.append(self._value)
        return getattr(self._value, name)(*args, **kwargs)

    return call


_ASKED = [name for name, method in vars(str).items() if callable(method)]
_BY_C_CODE = ["__int__", "__index__", "__float__", "__complex__", "__bytes__", "__fspath__"]  # int(text), open(text)

for _name in {*_ASKED, *_BY_C_CODE} - {"__new__", "__getattribute__", "__sizeof__"}:
    setattr(Text, _name, _noting(_name))
