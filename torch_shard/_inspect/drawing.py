"""Shardings of arrays, modules and states, drawn as grids of devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sized

import jax
import torch
from jax.core import Tracer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from torch_shard._capture import is_fake
from torch_shard._common.caller import error_prefix, public
from torch_shard._common.convert import struct_of
from torch_shard._common.printed import InNotebooks, printed, save_svg
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, unwrapped
from torch_shard._device import JaxTensor
from torch_shard._inspect.grid import DrawnArray, Grid, describe_names, make_grids, paint
from torch_shard._sharding import ResolvedEntry, ResolvedPlan, named_tensors
from torch_shard._state import TrainState


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing(InNotebooks):
    """A picture of which devices hold what: printed by rich or as a string, saved as a file, shown by a notebook.

    Attributes:
        heading: What is drawn, where that is more than one array; else empty.
        grids: One for all arrays that lie alike.

    Example:
        >>> import jax, torch_shard as ts
        >>> drawing = ts.visualize_sharding(jax.numpy.zeros(2), name="w")
        >>> print(drawing)
        w (2,) float32
        ┌───────┐
        │ CPU 0 │
        │ [:]   │
        └───────┘
    """

    heading: str
    grids: tuple[Grid, ...]

    def __rich__(self) -> Group:
        if not self.heading:
            return Group(*_print_grid(self.grids[0]))
        parts = (part for grid in self.grids for part in (Text(), *_print_grid(grid)))
        return Group(Text(self.heading, style="bold"), *parts)

    def __str__(self) -> str:
        # So wide that no name is folded.
        return "\n".join(line.rstrip() for line in printed(self, 10_000).splitlines())

    def __repr__(self) -> str:
        return f"Drawing({self.heading or ', '.join(self.grids[0].lines[0])})"

    @error_prefix("Drawing.save")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing as an SVG, whole or not at all.

        Args:
            path: Of the file, which ends in `.svg`.

        Raises:
            TypeError: It is no path.
            ValueError: Another suffix, or no file can have such a name.
            IsADirectoryError: A directory is there.
            NotADirectoryError: It lies below a file.
        """
        save_svg(self._repr_svg_(), path)

    def _repr_svg_(self) -> str:
        return paint(self.heading, self.grids)


@public
def visualize_sharding(subject: PyTree, *, name: str = "") -> Drawing:
    """Draw which devices hold which part of an array, or of everything that a module or a state holds.

    A cell is a shard: the devices that hold it (several, where it is replicated) and its range of global
    indices. Columns are the parts of the last dim that is split, rows those of all other split dims.

    Of several arrays, those that lie alike (the same spec on the same mesh) are one grid under all their names;
    where their shapes differ, a cell says `1 of 2` in place of a range. Names that differ in one part are written as
    `blocks.{0..7}.up.weight`. A tie is one array; a state has it under the first of its names.

    Args:
        subject: A `jax.Array`, a tensor on the jax device, or a `jax.ShapeDtypeStruct` with a sharding; a dict of these
            by name, such as a `state_dict`; a module on the jax device; a `TrainState` (its parameters and
            buffers; the optimiser's moments lie like them); or what `plan.resolve(model, mesh)` gives, for a module
            that is still on the CPU.
        name: What to call it in the title.

    Returns:
        A drawing: `rich.print(drawing)`, `drawing.save("weights.svg")`.

    Raises:
        TypeError: Something has no sharding, as a CPU tensor has none; the error has all the names.
        ValueError: There is nothing to draw, or more shards than can be drawn.

    Example:
        >>> import jax, rich, torch_shard as ts
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> sharding = NamedSharding(ts.make_mesh(batch=4, model=2), P(None, "model"))
        >>> rich.print(visualize_sharding(jax.ShapeDtypeStruct((4, 6), "float32", sharding=sharding), name="w"))
        w (4, 6) float32 P(None, 'model') on (batch=4, model=2)
        ┌────────────────┬────────────────┐
        │ CPU 0, 2, 4, 6 │ CPU 1, 3, 5, 7 │
        │ [:, 0:3]       │ [:, 3:6]       │
        └────────────────┴────────────────┘
    """
    check_kind("name", name, str)
    held = _find_held(subject)
    if held is None:
        return Drawing("", make_grids(_read_entries({name: subject}, type(subject).__name__, alone=True)))
    name = name or type(subject).__name__
    if not held:
        raise ValueError(f"visualize_sharding: {name} has no entries, so there is nothing to draw.")
    entries = list(_read_entries(held, name))
    grids = make_grids(entries)
    return Drawing(f"{name}: {_count(entries, 'array')}, {_count(grids, 'layout')}", grids)


def _find_held(subject: object) -> Mapping[str, PyTree] | None:
    """Entries of `subject` by name; None if it is not a collection."""
    if isinstance(subject, torch.nn.Module):
        return named_tensors(unwrapped(subject))
    if isinstance(subject, ResolvedPlan):
        return subject.entries
    if isinstance(subject, TrainState):
        # Structs, as each row of stacked layers would be sliced; and a donated state still says where it lay.
        return jax.tree.map(struct_of, subject.tensors)
    return subject if isinstance(subject, Mapping) else None


def _read_entries(held: Mapping[str, PyTree], owner: str, *, alone: bool = False) -> Iterator[DrawnArray]:
    """Arrays that are to be drawn, a tie once."""
    arrays = {name: value.jax() if isinstance(value, JaxTensor) else value for name, value in held.items()}
    _check_placed(arrays, owner, alone=alone)
    ties: dict[object, list[str]] = {}
    for name, array in arrays.items():
        tie = array.tied_to or name if isinstance(array, ResolvedEntry) else id(array)
        ties.setdefault(name if isinstance(array, jax.ShapeDtypeStruct) else tie, []).append(name)
    for names in ties.values():
        array = arrays[names[0]]
        dtype = "" if array.dtype is None else str(array.dtype).removeprefix("torch.")
        shape = array.placed_shape if isinstance(array, ResolvedEntry) else array.shape
        yield DrawnArray(tuple(map(str, names)), tuple(shape), dtype, array.sharding)


def _check_placed(arrays: Mapping[str, PyTree], owner: str, *, alone: bool) -> None:
    """Refuse what has no sharding, all of it in one error."""
    bare = [name for name, array in arrays.items() if getattr(array, "sharding", None) is None]
    if not bare:
        return
    if any(is_fake(array) or isinstance(array, Tracer) for array in arrays.values()):
        raise TypeError(
            "visualize_sharding: within a compiled function, tensors have no place yet. Draw what the function "
            "returns, or what it is called with."
        )
    if alone:
        raise TypeError(
            f"visualize_sharding: expected a jax.Array or a tensor on the jax device, got {owner}, which has no "
            "sharding. Place it first: torch_shard.place(model, mesh, plan), or jax.device_put(array, sharding)."
        )
    kinds = ", ".join(dict.fromkeys(_describe_bare(arrays[name]) for name in bare))
    raise TypeError(
        f"visualize_sharding: {len(bare)} of the {len(arrays)} names in {owner} have no sharding ({kinds}): "
        f"{', '.join(describe_names((str(name),) for name in bare))}. Place them first, "
        "torch_shard.place(model, mesh, plan), or draw what a plan would do, "
        "visualize_sharding(plan.resolve(model, mesh))."
    )


def _describe_bare(value: object) -> str:
    on = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
    return f"{type(value).__name__}{on}"


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def _print_grid(grid: Grid) -> Iterator[RenderableType]:
    if len(grid.lines) == 1:
        names, kind = grid.lines[0]
        words = [names, kind, grid.spec]
        yield Text(" ".join(filter(None, words)))
    else:
        names = Table.grid(*(Column(overflow="fold") for _ in range(2)), padding=(0, 2, 0, 0))
        for line in grid.lines:
            names.add_row(*map(Text, line))
        yield names
        yield Text(grid.spec)
    cells = Table(box=box.SQUARE, show_header=False, show_lines=True)
    for row in grid.rows:
        cells.add_row(*(Text(f"{cell.owner}\n{cell.part}", style=f"bold white on {cell.colour}") for cell in row))
    yield cells
