"""Contents of a checkpoint as a table: names, shapes, how they were split, bytes."""

from pathlib import Path

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from torch_shard._io.manifest import HEAD, TENSORS, Head, SavedArray, find_steps, read_head, step_path


def holds_checkpoint(path: Path) -> bool:
    """Tell whether it is a checkpoint, or a directory of them."""
    return (path / HEAD).exists() or bool(find_steps(path))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest of a directory of them."""
    if (path / HEAD).exists():
        return path
    if not (steps := find_steps(path)):
        below = sorted({found.parent.parent for found in path.glob(f"*/step_*/{HEAD}")})
        there = f" Below it are some: {', '.join(map(str, below))}." if below else ""
        raise FileNotFoundError(
            f"{path} is not a checkpoint and holds none (directories such as step_00000100).{there}"
        )
    return step_path(path, steps[-1])


def inventory(path: Path) -> Group:
    """Contents of a checkpoint, for people."""
    head = read_head(path)
    rest = _table("State of the run", ("where", "entries", "shape", "dtype", "bytes"))
    for where in dict.fromkeys(stored.where for stored in head.stored if stored.where != TENSORS):
        _add_row(rest, _row_of(where, [stored for stored in head.stored if stored.where == where]))
    tensors = _table(
        f"Parameters and buffers, on mesh ({', '.join(f'{axis}={size}' for axis, size in head.mesh.items())})",
        ("name", "kind", "shape", "dtype", "spec", "bytes", "stored"),
    )
    for stored in (stored for stored in head.stored if stored.where == TENSORS):
        for number, name in enumerate(stored.names):
            _add_row(tensors, _tensor_row(stored, number, name, head.unsaved))
    return Group(Text(_summary(path, head)), tensors, rest)


def _summary(path: Path, head: Head) -> str:
    size = decimal(sum(stored.num_bytes for stored in head.stored))
    metrics = "".join(f", {name} {value:.6g}" for name, value in head.metrics.items())
    return f"{path}: step {head.step}, {head.num_batches} batches seen, {size}{metrics}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading == "bytes" else "left")
    return table


def _add_row(table: Table, cells: tuple[object, ...]) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _tensor_row(stored: SavedArray, number: int, name: str, unsaved: tuple[str, ...]) -> tuple[object, ...]:
    shape, dtype = stored.entry_type
    num_rows = len(stored.names)
    kind = f"{stored.kind}, not in state_dict" if name in unsaved else stored.kind
    place = f"row {number} of {num_rows}" if num_rows > 1 else ""
    return name, kind, shape, dtype, stored.spec, decimal(stored.num_bytes // num_rows), place


def _row_of(where: str, stored: list[SavedArray]) -> tuple[object, ...]:
    num_bytes = decimal(sum(one.num_bytes for one in stored))
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in stored))
    if not stored[0].names:
        return where, "", stored[0].shape, dtypes, num_bytes
    return where, sum(len(one.names) for one in stored), "by name", dtypes, num_bytes
