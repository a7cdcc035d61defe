"""A sharding as a grid of cells, which devices hold which part, and as an SVG; arrays that lie alike are one grid."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Hashable, Iterable

from jax.sharding import NamedSharding, Sharding

from torch_shard._common.printed import MARGIN, Picture, width_of
from torch_shard._common.types import Device
from torch_shard._sharding import describe_mesh, describe_spec

MAX_CELLS = 64

# In turn over the shards; all readable under bold white. An odd number: in a grid of eight columns, neighbours differ.
COLOURS = ("#3367a8", "#2f7d4f", "#8a4a9e", "#b35a1f", "#1f7a8c", "#a83a48", "#5a55a6", "#5f666d", "#7a6a1e")

Part = tuple[tuple[int, int], ...]
"""A range of global indices per dim."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A shard: the devices that hold it, which part of the array it is, both in words, and a colour, as `#3367a8`."""

    owner: str
    part: str
    colour: str


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
    rows: tuple[tuple[Cell, ...], ...]


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

    @functools.cached_property
    def holders(self) -> dict[Part, tuple[Device, ...]]:
        """The devices that hold each part."""
        found: dict[Part, list[Device]] = {}
        try:
            placed = self.sharding.devices_indices_map(self.shape)
        except ValueError as error:  # JAX's error does not have the name
            raise ValueError(f"visualize_sharding: {self.names[0]} {self.kind}: {error}") from error
        for device, index in placed.items():
            part = tuple(piece.indices(size)[:2] for piece, size in zip(index, self.shape, strict=True))
            found.setdefault(part, []).append(device)
        if len(found) > MAX_CELLS:
            of = f" of {self.names[0]}" if self.names[0] else ""
            raise ValueError(f"visualize_sharding: {len(found)} shards{of} are more than can be drawn ({MAX_CELLS}).")
        return {part: tuple(sorted(found[part], key=lambda device: device.id)) for part in sorted(found)}

    @functools.cached_property
    def ranges(self) -> list[list[tuple[int, int]]]:
        """The ranges into which each dim is cut."""
        return [sorted(set(pieces)) for pieces in zip(*self.holders, strict=True)]

    @property
    def layout(self) -> Hashable:
        """The same for arrays that lie alike: P("model") and P("model", None) are one to a matrix."""
        placed, spec = self.sharding, list[object]()
        if isinstance(placed, NamedSharding):
            spec = [placed.mesh, *placed.spec]
            while spec[-1] is None:
                spec.pop()
        cuts = () if len(self.holders) == 1 else tuple(map(len, self.ranges))
        return tuple(spec), cuts, tuple(self.holders.values())

    def cells(self, *, by_place: bool) -> tuple[tuple[Cell, ...], ...]:
        """The parts in rows, the last dim that is split running along a row.

        Args:
            by_place: Whether a part is `[1 of 2, :]`, as for arrays of any size, and not `[0:16, :]`.
        """
        split = [dim for dim, ranges in enumerate(self.ranges) if len(ranges) > 1]
        # A matrix that is split by rows alone is drawn as rows; a vector always lies down.
        across = split[-1] if split and (split[-1] > 0 or len(self.shape) == 1) else None
        rows: dict[object, list[Cell]] = {}
        for (part, devices), colour in zip(self.holders.items(), itertools.cycle(COLOURS), strict=False):
            row = tuple(piece for dim, piece in enumerate(part) if dim != across)
            words = "whole" if by_place and not split else f"[{', '.join(self._words(part, by_place=by_place))}]"
            rows.setdefault(row, []).append(Cell(_owner(devices), words, colour))
        return tuple(map(tuple, rows.values()))

    def _words(self, part: Part, *, by_place: bool) -> Iterable[str]:
        for piece, ranges in zip(part, self.ranges, strict=True):
            if len(ranges) == 1:
                yield ":"
            else:
                yield f"{ranges.index(piece) + 1} of {len(ranges)}" if by_place else f"{piece[0]}:{piece[1]}"


def _owner(devices: tuple[Device, ...]) -> str:
    """The devices in few words."""
    platform, ids = devices[0].platform.upper(), [str(device.id) for device in devices]
    if len(ids) <= 8:
        return f"{platform} {', '.join(ids)}"
    return f"{platform} {ids[0]}, {ids[1]}, ... {ids[-1]} ({len(ids)} devices)"


def make_grids(entries: Iterable[DrawnArray]) -> tuple[Grid, ...]:
    """One grid for all entries with the same devices in the same places by the same mesh and spec."""
    alike: dict[Hashable, list[DrawnArray]] = {}
    for entry in entries:
        alike.setdefault(entry.layout, []).append(entry)
    return tuple(map(_make_grid, alike.values()))


def _make_grid(members: list[DrawnArray]) -> Grid:
    first = members[0]
    one_shape = all(entry.shape == first.shape for entry in members)
    names: dict[str, list[tuple[str, ...]]] = {}
    for entry in members:
        shard = entry.sharding.shard_shape(entry.shape)
        each = "" if one_shape or shard == entry.shape else f", each shard {shard}"
        names.setdefault(entry.kind + each, []).append(entry.names)
    lines = ((line, kind) for kind, ties in names.items() for line in describe_names(ties))
    return Grid(tuple(lines), first.spec, first.cells(by_place=not one_shape))


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
    folded: list[tuple[str, ...]] = [tuple(name.split(".")) for name in names]
    for at in reversed(range(max(map(len, folded), default=0))):
        alike: dict[tuple[str | None, ...], list[str]] = {}
        for name in folded:
            # A name of one component is said whole: {tokens,head} reads worse than two names.
            merges = 1 < len(name) > at
            rest = (*name[:at], None, *name[at + 1 :]) if merges else name
            alike.setdefault(rest, []).append(name[at] if merges else "")
        folded = [tuple(part or _brace(options) for part in rest) for rest, options in alike.items()]
    return [".".join(name) for name in folded]


def _brace(options: list[str]) -> str:
    if len(options) == 1:
        return options[0]
    numbers = [int(option) for option in options if option.isdecimal()]
    if len(numbers) == len(options) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{options[0]}..{options[-1]}}}"
    return f"{{{','.join(options)}}}"


# In pixels; y runs down the page.
LINE, CELL_HEIGHT, GAP, PADDING, SPACE = 20.0, 56.0, 4.0, 12.0, 40.0

MIN_CELL_WIDTH, MAX_WIDTH = 88.0, 1150.0  # panels stand side by side up to that width

MAX_LETTERS = 90  # of a line of names

HEADING, NAME, PLAIN, PART = 15.0, 13.0, 12.0, 11.0
"""Sizes of letters."""


def paint(heading: str, grids: Iterable[Grid]) -> str:
    """Paint grids as panels, side by side as far as they fit."""
    picture, x, y = Picture(), MARGIN, MARGIN
    if heading:
        picture.text(heading, x, y + LINE / 2, size=HEADING, style="text bold")
        y += 2 * LINE
    for grid in grids:
        lines = [line for names, kind in grid.lines for line in _wrap(names, kind)]
        kinds_at = max(width_of(name, NAME) for name, _ in lines) + PADDING * any(name for name, _ in lines)
        widest = max(max(width_of(cell.owner, PLAIN), width_of(cell.part, PART)) for row in grid.rows for cell in row)
        cell_width = max(MIN_CELL_WIDTH, widest + 2 * PADDING)
        above = max(width_of(grid.spec, PLAIN), *(kinds_at + width_of(kind, PLAIN) for _, kind in lines))
        width = max(above, cell_width * max(map(len, grid.rows)))
        if x > MARGIN and x + width > MAX_WIDTH:
            x, y = MARGIN, picture.height + SPACE
        below = y
        for name, kind in [*lines, ("", grid.spec)] if grid.spec else lines:
            picture.text(name, x, below + LINE / 2, size=NAME, style="text bold")
            picture.text(kind, x + (kinds_at if name else 0), below + LINE / 2, size=PLAIN, style="faint")
            below += LINE
        _cells(picture, x, below + GAP, grid, cell_width)
        x += width + SPACE
    return str(picture)


def _cells(picture: Picture, x: float, y: float, grid: Grid, cell_width: float) -> None:
    for i, row in enumerate(grid.rows):
        for j, cell in enumerate(row):
            left, top = x + j * cell_width, y + i * CELL_HEIGHT
            picture.box(left, top, cell_width - GAP, CELL_HEIGHT - GAP, fill=cell.colour)
            middle = left + (cell_width - GAP) / 2
            picture.text(cell.owner, middle, top + 18, size=PLAIN, style="white bold", anchor="middle")
            picture.text(cell.part, middle, top + 35, size=PART, style="white", anchor="middle")


def _wrap(names: str, kind: str) -> list[tuple[str, str]]:
    """A line of names as several that are not too long, the kind beside the first."""
    lines = [""]
    for piece in re.findall(r".+?(?:[,=]|$)", names):
        if lines[-1] and len(lines[-1] + piece) > MAX_LETTERS:
            lines.append("")
        lines[-1] += piece
    return [(line, "" if i else kind) for i, line in enumerate(lines)]
