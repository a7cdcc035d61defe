"""A sharding as a grid of cells, which devices hold which part; arrays that lie alike are one grid."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable

from jax.sharding import NamedSharding, Sharding

from torch_shard._common.types import Device
from torch_shard._sharding import describe_mesh, describe_spec

MAX_CELLS = 64

# In turn over the shards; all readable under bold white. An odd number: in a grid of eight columns, neighbours differ.
COLOURS = ("#3367a8", "#2f7d4f", "#8a4a9e", "#b35a1f", "#1f7a8c", "#a83a48", "#5a55a6", "#5f666d", "#7a6a1e")

Part = tuple[tuple[int, int], ...]
"""A range of global indices per dim."""


@dataclasses.dataclass(frozen=True)
class DrawnArray:
    """An array to be drawn: its name, or the names of a tie; global shape, dtype, and where it lies."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding

    @property
    def kind(self) -> str:
        """Shape and dtype."""
        return f"{self.shape} {self.dtype}".rstrip()

    @property
    def spec(self) -> str:
        """Spec and mesh; empty where the sharding has none."""
        if not isinstance(self.sharding, NamedSharding):
            return ""
        return f"{describe_spec(self.sharding.spec)} on {describe_mesh(self.sharding.mesh)}"  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Cell:
    """A shard: the devices that hold it, by id, and which part of the array it is, in words."""

    devices: tuple[Device, ...]
    part: str

    @property
    def owner(self) -> str:
        """The devices in few words."""
        platform, ids = self.devices[0].platform.upper(), [str(device.id) for device in self.devices]
        if len(ids) <= 8:
            return f"{platform} {', '.join(ids)}"
        return f"{platform} {ids[0]}, {ids[1]}, ... {ids[-1]} ({len(ids)} devices)"


Cells = tuple[tuple[Cell, ...], ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Arrays that lie alike.

    Attributes:
        lines: Pairs of names and their shape and dtype.
        spec: Spec and mesh; empty where the sharding has none.
        rows: The cells.
    """

    lines: tuple[tuple[str, str], ...]
    spec: str
    rows: Cells

    @property
    def coloured_rows(self) -> list[list[tuple[Cell, str]]]:
        """The cells, each with a colour, as in `#3367a8`; more cells than colours take them in turn."""
        colours = itertools.cycle(COLOURS)
        return [[(cell, next(colours)) for cell in row] for row in self.rows]


def make_grids(entries: Iterable[DrawnArray]) -> tuple[Grid, ...]:
    """One grid for all entries with the same devices in the same places by the same mesh and spec.

    Raises:
        ValueError: An entry has more shards than can be drawn, or its sharding does not fit its shape.
    """
    alike: dict[tuple[Hashable, Cells], list[tuple[DrawnArray, Cells]]] = {}
    for entry in entries:
        holders = _find_holders(entry)
        places = _fill_cells(entry.shape, holders, _by_place(list(holders)))
        indices = _fill_cells(entry.shape, holders, _by_indices(entry.shape))
        alike.setdefault((_mesh_and_spec(entry.sharding), places), []).append((entry, indices))
    return tuple(_make_grid(places, members) for (_, places), members in alike.items())


def _mesh_and_spec(sharding: Sharding) -> Hashable:
    """A key that tells layouts apart: P("model") and P("model", None) are one to a matrix."""
    if not isinstance(sharding, NamedSharding):
        return None
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.mesh, tuple(spec)


def _make_grid(places: Cells, members: list[tuple[DrawnArray, Cells]]) -> Grid:
    first, indices = members[0]
    one_shape = all(entry.shape == first.shape for entry, _ in members)
    names: dict[str, list[tuple[str, ...]]] = {}
    for entry, _ in members:
        shard = entry.sharding.shard_shape(entry.shape)
        each = "" if one_shape or shard == entry.shape else f", each shard {shard}"
        names.setdefault(entry.kind + each, []).append(entry.names)
    lines = ((line, kind) for kind, ties in names.items() for line in describe_names(ties))
    return Grid(tuple(lines), first.spec, indices if one_shape else places)


def _find_holders(entry: DrawnArray) -> dict[Part, tuple[Device, ...]]:
    """The devices that hold each part."""
    holders: dict[Part, list[Device]] = {}
    try:
        placed = entry.sharding.devices_indices_map(entry.shape)
    except ValueError as error:  # JAX's error does not have the name
        raise ValueError(f"visualize_sharding: {entry.names[0]} {entry.kind}: {error}") from error
    for device, index in placed.items():
        part = tuple(piece.indices(size)[:2] for piece, size in zip(index, entry.shape, strict=True))
        holders.setdefault(part, []).append(device)
    if len(holders) > MAX_CELLS:
        of = f" of {entry.names[0]}" if entry.names[0] else ""
        raise ValueError(f"visualize_sharding: {len(holders)} shards{of} are more than can be drawn ({MAX_CELLS}).")
    return {part: tuple(sorted(holders[part], key=lambda device: device.id)) for part in sorted(holders)}


def _fill_cells(
    shape: tuple[int, ...], holders: dict[Part, tuple[Device, ...]], describe: Callable[[Part], str]
) -> Cells:
    """The parts in rows, the last split dim running along a row."""
    split = [dim for dim in range(len(shape)) if len({part[dim] for part in holders}) > 1]
    # A matrix that is split by rows alone is drawn as rows; a vector always lies down.
    across = split[-1] if split and (split[-1] > 0 or len(shape) == 1) else None
    rows: dict[object, list[Cell]] = {}
    for part, devices in holders.items():
        rest = tuple(r for dim, r in enumerate(part) if dim != across)
        rows.setdefault(rest, []).append(Cell(devices, describe(part)))
    return tuple(map(tuple, rows.values()))


def _by_indices(shape: tuple[int, ...]) -> Callable[[Part], str]:
    """Parts as ranges of global indices: `[0:2, :]`."""

    def describe(part: Part) -> str:
        pairs = zip(part, shape, strict=True)
        return _bracketed(":" if piece == (0, size) else f"{piece[0]}:{piece[1]}" for piece, size in pairs)

    return describe


def _by_place(parts: list[Part]) -> Callable[[Part], str]:
    """Parts by their place among all, for arrays of any size: `[1 of 2, :]`."""
    if len(parts) == 1:
        return lambda part: "whole"
    ranges = [sorted(set(pieces)) for pieces in zip(*parts, strict=True)]

    def describe(part: Part) -> str:
        pairs = zip(part, ranges, strict=True)
        return _bracketed(":" if len(all_) == 1 else f"{all_.index(piece) + 1} of {len(all_)}" for piece, all_ in pairs)

    return describe


def _bracketed(words: Iterable[str]) -> str:
    return f"[{', '.join(words)}]"


def describe_names(ties: Iterable[tuple[str, ...]]) -> list[str]:
    """Names in few words, which a shell would spell out again; the names of a tie stand together.

    Example:
        >>> describe_names([("0.q",), ("1.q",), ("2.q",), ("tokens.weight", "head.weight")])
        ['{0..2}.q', '{tokens,head}.weight (tied)']
    """
    ties = list(ties)
    single = _fold([names[0] for names in ties if len(names) == 1])
    return single + [f"{' = '.join(_fold(names))} (tied)" for names in ties if len(names) > 1]


def _fold(names: Iterable[str]) -> list[str]:
    """Merge names that differ in one component, and again what came of it, until nothing is left to merge."""
    folded: list[tuple[tuple[str, ...], ...]] = [tuple((part,) for part in name.split(".")) for name in names]
    for position in reversed(range(max(map(len, folded), default=0))):
        merged: dict[object, list[tuple[tuple[str, ...], ...]]] = {}
        for name in folded:
            # A name of one component is said whole: {tokens,head} reads worse than two names.
            rest = (name[:position], name[position + 1 :]) if 1 < len(name) > position else name
            merged.setdefault(rest, []).append(name)
        folded = [_merge(group, position) for group in merged.values()]
    return [".".join(map(_brace, name)) for name in folded]


def _merge(group: list[tuple[tuple[str, ...], ...]], position: int) -> tuple[tuple[str, ...], ...]:
    if len(group) == 1:
        return group[0]
    options = tuple(option for name in group for option in name[position])
    return (*group[0][:position], options, *group[0][position + 1 :])


def _brace(options: tuple[str, ...]) -> str:
    if len(options) == 1:
        return options[0]
    numbers = [int(option) for option in options if option.isdecimal()]
    if len(numbers) == len(options) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{options[0]}..{options[-1]}}}"
    return f"{{{','.join(options)}}}"
