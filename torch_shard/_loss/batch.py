"""Batches: their array leaves, and what a program depends on in them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch

from torch_shard._capture import Spec
from torch_shard._common.caller import caller
from torch_shard._common.convert import Static, flatten
from torch_shard._common.dtypes import captured_dtype, torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._common.validate import named
from torch_shard._loss.records import Record, is_static, open_record


@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree of JAX without its leaves.

    Attributes:
        tree: As JAX has it.
        num_leaves: How many leaves it has.
        order: The keys of its dicts in the order in which they were put in; JAX sorts them.
    """

    tree: Any
    num_leaves: int
    order: Any

    def filled(self, leaves: Sequence[PyTree]) -> PyTree:
        """The tree with these leaves."""
        return _reordered(jax.tree.unflatten(self.tree, leaves), self.order)


@dataclasses.dataclass(frozen=True)
class OpenRecord:
    """Stands among the leaves of a signature before those of a record: its class, and the tree of each of its parts."""

    record: Record
    parts: tuple[Structure, ...]

    def __str__(self) -> str:
        return f"{self.record.kind.__name__} of {len(self.parts)} parts"


@dataclasses.dataclass(frozen=True)
class BatchSignature:
    """The part of a batch that a program depends on: its structure, and per leaf a `Spec` or a plain value."""

    structure: Structure
    leaves: tuple[object, ...]
    """Of a record an `OpenRecord`, and its leaves after it."""

    @property
    def tree(self) -> object:
        """The structure, as JAX has it."""
        return self.structure.tree

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
        texts = self.texts
        return self.with_texts([""] * len(texts)) if texts else self

    def with_texts(self, texts: Iterable[object]) -> "BatchSignature":
        """The same with these texts in the places of its own."""
        texts = iter(texts)
        leaves = tuple(next(texts) if type(leaf) is str else leaf for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        """The batch, with these tensors as its array leaves."""
        return _rebuilt(self.structure, iter(self.leaves), iter(tensors))


def _rebuilt(structure: Structure, leaves: Iterator[object], tensors: Iterator[torch.Tensor]) -> PyTree:
    """A tree, which takes as many of these leaves and tensors as it has."""
    values: list[PyTree] = []
    for _ in range(structure.num_leaves):
        leaf = next(leaves)
        if isinstance(leaf, Spec):
            values.append(next(tensors))
        elif isinstance(leaf, OpenRecord):
            parts = [_rebuilt(part, leaves, tensors) for part in leaf.parts]
            values.append(leaf.record.fill(parts))
        else:
            values.append(leaf.value if isinstance(leaf, Static) else leaf)
    return structure.filled(values)


class _Flattened:
    """The leaves of a batch in order, those of records too.

    Attributes:
        arrays: Tensors, arrays and numbers.
        paths: Those of the arrays, if they are asked for.
        kinds: What a program depends on, of each leaf.
    """

    def __init__(self, *, with_paths: bool = False) -> None:
        self._with_paths = with_paths
        self.arrays: list[PyTree] = []
        self.paths: list[str] = []
        self.kinds: list[object] = []

    def add(self, tree: PyTree, path: str, *, in_record: bool = False) -> Structure:
        """Add the leaves of a tree at this path."""
        leaves, structure = flatten(tree, _is_iterator)
        paths = _paths(tree, path) if self._with_paths else []
        for number, leaf in enumerate(map(_number, leaves)):
            try:
                kind = _describe(leaf, in_record)
            except TypeError:
                with named(_paths(tree, path)[number]):
                    raise
            if kind is None:
                self._add_record(leaf, _paths(tree, path)[number])
                continue

            self.kinds.append(kind)
            if isinstance(kind, Spec):
                self.arrays.append(leaf)
                self.paths += paths[number : number + 1]
        return Structure(structure, len(leaves), _order(tree))

    def _add_record(self, leaf: PyTree, path: str) -> None:
        opened = open_record(leaf, path)
        if opened is None:
            raise TypeError(
                f"{caller()}: {path} is of type {type(leaf).__name__}, which is neither an array nor a dict, a tuple "
                "or a dataclass. Pass its arrays in one of these."
            )
        record, parts = opened

        # The record stands before its leaves, and knows the trees of its parts once these have been added.
        position = len(self.kinds)
        self.kinds.append(None)
        structures = tuple(self.add(part, path + end, in_record=True) for end, part in parts)
        self.kinds[position] = OpenRecord(record, structures)


def flatten_batch(batch: PyTree) -> tuple[list[PyTree], BatchSignature]:
    """The array leaves of a batch (tensors, arrays, numbers) and its signature."""
    flattened = _Flattened()
    structure = flattened.add(batch, "batch")
    return flattened.arrays, BatchSignature(structure, tuple(flattened.kinds))


def array_paths(batch: PyTree) -> list[str]:
    """Path of each array leaf of a batch, for messages."""
    flattened = _Flattened(with_paths=True)
    flattened.add(batch, "batch")
    return flattened.paths


def _paths(tree: PyTree, start: str) -> list[str]:
    leaves = cast(list[tuple[tuple[object, ...], object]], jax.tree_util.tree_leaves_with_path(tree, _is_iterator))
    return [start + jax.tree_util.keystr(path) for path, _ in leaves]


def _order(batch: Any) -> Any:
    """The order of keys of a batch and of the containers in it."""
    if type(batch) is dict:
        return tuple((key, _order(value)) for key, value in cast(dict[object, PyTree], batch).items())
    return tuple(map(_order, batch)) if type(batch) in (list, tuple) else None


def _reordered(batch: Any, order: Any) -> Any:
    """A batch with the keys of its dicts in this order, in which the loss may go through them."""
    if type(batch) is dict:
        return {key: _reordered(batch[key], inner) for key, inner in order}
    if type(batch) in (list, tuple):
        return type(batch)(_reordered(value, inner) for value, inner in zip(batch, order, strict=True))
    return batch


def _number(leaf: PyTree) -> PyTree:
    """A number of NumPy as Python's, which torch takes it for beside a tensor."""
    return leaf.item() if isinstance(leaf, np.number) and not isinstance(leaf, np.timedelta64) else leaf


def _describe(leaf: PyTree, in_record: bool) -> object:
    """What a program depends on in a leaf; None for a record."""
    if isinstance(leaf, torch.Tensor):
        return Spec(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return Spec(leaf.shape, torch_dtype(leaf.dtype))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return Spec(leaf.shape, captured_dtype(leaf.dtype))
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        # In a record they are sizes and settings, which methods of the record work with as Python's numbers.
        return Static(leaf) if in_record else Spec((), torch.int64 if isinstance(leaf, int) else torch.float32)
    return leaf if is_static(leaf) else None


def _is_iterator(node: object) -> bool:
    """Tell what JAX is not to look into, nor to warn of."""
    return isinstance(node, Iterator)


class Text:
    """A text that notes whatever is asked of it; C code, which would leave no trace, finds no text and raises."""

    def __init__(self, value: str, read: list[str]) -> None:
        self._value, self._read = value, read

    # isinstance(text, str) is asked of all texts alike, so that its answer is no part of this one.
    @property
    def __class__(self) -> type:
        return str

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("__class__ of a text cannot be set")

    # A copy notes to the same list, and a text never changes.
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

# What int(text), float(text) or open(text) look for: there they raise, and the capture is refused the text.
_BY_C_CODE = ["__int__", "__index__", "__float__", "__complex__", "__bytes__", "__fspath__"]

for _name in {*_ASKED, *_BY_C_CODE} - {"__new__", "__getattribute__", "__sizeof__"}:
    setattr(Text, _name, _noting(_name))
