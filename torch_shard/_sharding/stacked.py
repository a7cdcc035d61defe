"""Arrays by name, some of them stored together: one array for the same entry of every repeated layer."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from torch_shard._common.types import PyTree
from torch_shard._sharding.forms import Kept
from torch_shard._sharding.pipeline import Stages
from torch_shard._sharding.stack_rows import stack_struct, take_row

Group = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Groups of names that are stored together, and the order in which all names stand.

    Attributes:
        groups: The names in each stored array: a 1-tuple is stored in its own shape, n >= 2 names as `(n, *shape)`.
        names: All names, in the module's order.
        kept: Those whose arrays are kept in another form than torch's; of a group all or none.
        stages: Over which the rows of some groups are split.
    """

    groups: tuple[Group, ...]
    names: tuple[str, ...]
    kept: tuple[tuple[str, Kept], ...] = ()
    stages: Stages | None = None

    @classmethod
    def of(
        cls,
        groups: Iterable[Group],
        names: Iterable[str] | None = None,
        kept: Mapping[str, Kept] | None = None,
        *,
        stages: Stages | None = None,
    ) -> "Layout":
        """The layout of these groups; all other `names` stand alone.

        Raises:
            ValueError: A name stands in two groups, or in none of `names`.
        """
        groups = tuple(map(tuple, groups))
        grouped = [name for group in groups for name in group]
        names = tuple(grouped if names is None else names)
        group_of = {name: group for group in groups for name in group}
        if len(group_of) < len(grouped) or not group_of.keys() <= set(names):
            raise ValueError(f"Layout: each name stands in one group and among the names, got {groups} of {names}.")

        ordered_groups = dict.fromkeys(group_of.get(name, (name,)) for name in names)
        forms: list[tuple[str, Kept]] = []
        for name in names:
            if kept and name in kept:
                forms.append((name, kept[name]))
        return cls(tuple(ordered_groups), names, tuple(forms), stages)

    @functools.cached_property
    def forms(self) -> dict[str, Kept]:
        """By name, how entries are kept that are not kept in torch's form."""
        return dict(self.kept)

    @functools.cached_property
    def plain(self) -> "Layout":
        """The same for arrays in torch's form."""
        return dataclasses.replace(self, kept=())

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int | None]]:
        """For each name the number of its stored array, and its row there (None if it stands alone)."""
        places: dict[str, tuple[int, int | None]] = {}
        for number, group in enumerate(self.groups):
            is_stack = len(group) > 1
            for row, name in enumerate(group):
                places[name] = number, row if is_stack else None
        return {name: places[name] for name in self.names}

    def restricted(self, names: Iterable[str]) -> "Layout":
        """The layout of some of the names; a group of which one is missing falls apart."""
        names = dict.fromkeys(names)
        whole_groups = [group for group in self.groups if names.keys() >= set(group)]
        return Layout.of(whole_groups, names, self.forms, stages=self.stages)

    def axis_of(self, group: Group) -> str | None:
        """The axis over which the rows of a group are split, if they are."""
        if self.stages is None or not self.stages.has(group):
            return None
        return self.stages.axis

    def __add__(self, other: "Layout") -> "Layout":
        stages = self.stages or other.stages
        return Layout(self.groups + other.groups, self.names + other.names, self.kept + other.kept, stages)


@jax.tree_util.register_pytree_with_keys_class
class Stacks(Mapping[str, PyTree]):
    """A mapping from names to arrays that stores the same entry of repeated layers as rows of one array.

    It reads like a dict: `stacks[name]` is the entry in torch's shape, sliced when asked for. As a pytree its leaves
    are the stored arrays.

    Attributes:
        layout: Which names are stored together.
        arrays: The stored arrays, one for each group of the layout.

    Example:
        >>> import jax.numpy as jnp
        >>> stacks = Stacks.from_dict({"0.w": jnp.zeros(3), "1.w": jnp.ones(3)}, (("0.w", "1.w"),))
        >>> stacks["1.w"].shape, stacks.stacked(("0.w", "1.w")).shape
        ((3,), (2, 3))
    """

    __slots__ = ("arrays", "layout")

    def __init__(self, layout: Layout, arrays: Iterable[PyTree]) -> None:
        self.layout = layout
        self.arrays = tuple(arrays)

    def __setitem__(self, name: str, value: object) -> None:
        raise TypeError(
            f"A state is not written to: {name} cannot be assigned. Make another one, as in dataclasses.replace(state, "
            f"params={{**state.params, {name!r}: array}}), which a step takes."
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, PyTree], layout: Layout | Iterable[Group]) -> "Stacks":
        """Store `values` in a layout.

        Args:
            values: An array for each name of the layout; what has `stacked(names)`, as a `Stacks` has, gives its
                pieces as they are.
            layout: A `Layout`, or its groups.
        """
        layout = layout if isinstance(layout, Layout) else Layout.of(layout)
        if isinstance(values, Stacks) and values.layout == layout:
            return values
        return cls(layout, (_gathered(values, group, layout) for group in layout.groups))

    @classmethod
    def merged(cls, *parts: Mapping[str, PyTree]) -> "Stacks":
        """Several mappings without a name in common as one; each keeps its layout."""
        layout = Layout((), ())
        arrays: list[PyTree] = []
        for part in parts:
            stacks = part if isinstance(part, Stacks) else cls.from_dict(part, [(name,) for name in part])
            layout += stacks.layout
            arrays += stacks.arrays
        return cls(layout, arrays)

    def part(self, names: Iterable[str]) -> "Stacks":
        """The entries of some of the names."""
        return Stacks.from_dict(self, self.layout.restricted(names))

    def updated(self, values: Mapping[str, PyTree]) -> "Stacks":
        """With other values for those names that it has; what has none keeps its stored array."""
        arrays: list[PyTree] = []
        for group, array in zip(self.layout.groups, self.arrays, strict=True):
            if not values.keys().isdisjoint(group):
                entries = {name: values[name] if name in values else self[name] for name in group}
                array = _gathered(entries, group, self.layout)
            arrays.append(array)
        return Stacks(self.layout, arrays)

    def stacked(self, names: Group) -> PyTree:
        """The entries `names`, of one shape, as an array `(n, *shape)`: as it is stored, where it is stored so."""
        rows = self.kept_rows(names)
        form = self.layout.forms.get(names[0])
        return rows if form is None else form.restore(rows, is_stack=True)

    def kept_rows(self, names: Group) -> PyTree:
        """The same in the form in which they are kept."""
        pieces = [self._rows(number, start, stop) for number, start, stop in _runs(self.layout, names)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else jnp.concatenate(pieces)

    def kept(self, name: str) -> PyTree:
        """An entry in the form in which it is kept."""
        number, row = self.layout.places[name]
        return self.arrays[number] if row is None else take_row(self.arrays[number], row)

    def row(self, name: str) -> tuple[PyTree, int] | None:
        """The stored array of which an entry is a row, and which; None if it stands alone."""
        number, row = self.layout.places[name]
        return None if row is None else (self.arrays[number], row)

    @property
    def forms(self) -> Mapping[str, Kept]:
        """Those of entries that are kept in another form than torch's."""
        return self.layout.forms

    def in_program(self, name: str) -> PyTree:
        """An entry, as a program takes it: in pieces, if it is kept so."""
        array = self.kept(name)
        form = self.layout.forms.get(name)
        return array if form is None else form.in_program(array)

    def whole(self, *, but_rearranged: bool = False) -> "Stacks":
        """The same in torch's form; with `but_rearranged`, what has the same elements in other dims as it is kept."""
        if not self.layout.kept:
            return self

        arrays: list[PyTree] = []
        for group, array in zip(self.layout.groups, self.arrays, strict=True):
            form = self.layout.forms.get(group[0])
            if form is not None and not (but_rearranged and form.is_rearranged):
                array = form.restore(array, is_stack=len(group) > 1)
            arrays.append(array)
        return Stacks(self.layout.plain, arrays)

    def _rows(self, number: int, start: int, stop: int) -> PyTree:
        array = self.arrays[number]
        num_rows = len(self.layout.groups[number])
        if num_rows == 1:
            return array[None]
        # A slice of all rows would be a copy.
        return array if stop - start == num_rows else array[start:stop]

    def __getitem__(self, name: str) -> PyTree:
        array = self.kept(name)
        form = self.layout.forms.get(name)
        return array if form is None else form.restore(array)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def __repr__(self) -> str:
        entries: list[str] = []
        for group, array in zip(self.layout.groups, self.arrays, strict=True):
            entries.append(f"{describe_group(group)}: {_describe(array)}")
        return "Stacks({" + ", ".join(entries) + "})"

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[object, PyTree]], Layout]:
        """For JAX: the stored arrays, and the layout."""
        # The paths of errors and of checkpoints name the entries by these keys.
        keys = [jax.tree_util.DictKey(describe_group(group)) for group in self.layout.groups]
        return tuple(zip(keys, self.arrays, strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[PyTree, ...], Layout]:
        """Leaves and structure, without keys."""
        return self.arrays, self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, arrays: Iterable[PyTree]) -> "Stacks":
        """The inverse."""
        return cls(layout, arrays)


def describe_group(group: Group) -> str:
    """The names of a stored array in few words."""
    return group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}"


def _describe(array: PyTree) -> str:
    if hasattr(array, "dtype") and hasattr(array, "shape"):
        return f"{array.dtype}{list(array.shape)}"
    return repr(array)


def _runs(layout: Layout, names: Group) -> list[tuple[int, int, int]]:
    """`names` as stretches `(number, start, stop)` of stored arrays."""
    runs: list[tuple[int, int, int]] = []
    for name in names:
        number, row_or_none = layout.places[name]
        row = row_or_none or 0

        if runs:
            last_number, start, stop = runs[-1]
            if (last_number, stop) == (number, row):
                runs[-1] = number, start, row + 1
                continue
        runs.append((number, row, row + 1))
    return runs


def _gathered(values: Mapping[str, PyTree], group: Group, layout: Layout) -> PyTree:
    """Gather what a layout stores for a group."""
    first, *_ = group
    form = layout.forms.get(first)
    if form is None:
        return _gathered_whole(values, group, layout.axis_of(group))

    # What has the entries in this form already gives them so. It need not be a `Stacks`: a state reads like one.
    is_stack = len(group) > 1
    forms: Mapping[str, Kept] = getattr(values, "forms", {})
    if all(forms.get(name) == form for name in group):
        source: PyTree = values
        if is_stack:
            return source.kept_rows(group)
        return source.kept(first)

    whole = _gathered_whole(values, group, layout.axis_of(group))
    return form.store(whole, is_stack=is_stack)


def _gathered_whole(values: Mapping[str, PyTree], group: Group, axis: str | None) -> PyTree:
    if len(group) == 1:
        return values[group[0]]
    stacked = getattr(values, "stacked", None)
    if stacked is not None:
        return stacked(group)

    rows = [values[name] for name in group]
    if isinstance(rows[0], jax.ShapeDtypeStruct):
        return stack_struct(rows, axis)
    return jnp.stack(rows)


def as_dicts(tree: PyTree) -> PyTree:
    """A pytree with plain dicts in place of `Stacks`."""
    return _map_stacks(dict, tree)


def keep_as(stacks: Stacks, layout: Layout, *, but_rearranged: bool = False) -> Stacks:
    """Arrays in torch's form, in the form that a layout has for their names, if they have torch's shape."""
    forms: dict[str, Kept] = {}
    arrays: list[PyTree] = []
    for group, array in zip(stacks.layout.groups, stacks.arrays, strict=True):
        form = layout.forms.get(group[0])
        is_stack = len(group) > 1
        if form is None:
            arrays.append(array)
        elif but_rearranged and form.is_rearranged:
            arrays.append(array)
            if form.is_stored(array, is_stack=is_stack):
                forms |= dict.fromkeys(group, form)
        elif form.is_whole(array, is_stack=is_stack):
            arrays.append(form.store(array, is_stack=is_stack))
            forms |= dict.fromkeys(group, form)
        else:
            # Such as the factors of a second moment, which have other shapes than their entry.
            arrays.append(array)
    return Stacks(Layout.of(stacks.layout.groups, stacks.layout.names, forms, stages=layout.stages), arrays)


def whole_stacks(tree: PyTree, *, but_rearranged: bool = False) -> PyTree:
    """A pytree with its `Stacks` as `Stacks.whole` gives each."""
    return _map_stacks(lambda stacks: stacks.whole(but_rearranged=but_rearranged), tree)


def keep_stacks(tree: PyTree, layout: Layout, *, but_rearranged: bool = False) -> PyTree:
    """A pytree with its `Stacks` as `keep_as` gives each."""
    return _map_stacks(lambda stacks: keep_as(stacks, layout, but_rearranged=but_rearranged), tree)


def _map_stacks(change: Callable[[Stacks], PyTree], tree: PyTree) -> PyTree:
    def changed(node: PyTree) -> PyTree:
        return change(node) if isinstance(node, Stacks) else node

    return jax.tree.map(changed, tree, is_leaf=lambda node: isinstance(node, Stacks))


def stack_dicts(tree: PyTree, layout: Layout, stack: Callable[[list[PyTree]], PyTree] | None = None) -> PyTree:
    """A pytree with `Stacks` in place of dicts whose keys are all names of a layout.

    Args:
        tree: Its leaves have a shape and a dtype; they may differ from those of the layout's own arrays.
        layout: A group is stored together if the dict has all its names, with leaves of one shape and dtype. What is
            in torch's shape is kept in the layout's form.
        stack: Makes the stored leaf from its rows; of structs by default.
    """

    def is_by_name(node: object) -> bool:
        return type(node) is dict and bool(node) and cast(dict[object, object], node).keys() <= layout.places.keys()

    def are_alike(values: list[PyTree]) -> bool:
        if not jax.tree_util.all_leaves(values):
            return False
        return len({(value.shape, value.dtype) for value in values}) == 1

    def stacked(node: PyTree) -> PyTree:
        if not is_by_name(node):
            return node

        node_layout = layout.restricted(name for name in layout.names if name in node)
        groups = [group for group in node_layout.groups if are_alike([node[name] for name in group])]
        node_layout = Layout.of(groups, node_layout.names, stages=layout.stages)

        arrays: list[PyTree] = []
        for group in node_layout.groups:
            rows = [node[name] for name in group]
            if len(rows) == 1:
                arrays.append(rows[0])
            elif stack is None:
                arrays.append(stack_struct(rows, node_layout.axis_of(group)))
            else:
                arrays.append(stack(rows))
        return keep_as(Stacks(node_layout, arrays), layout)

    return jax.tree.map(stacked, tree, is_leaf=is_by_name)
