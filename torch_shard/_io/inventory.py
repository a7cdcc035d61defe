"""What a checkpoint holds, as a table for people."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from torch_shard._io.manifest import HEAD, TENSORS, Head, SavedArray, find_steps, read_head, step_path


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest of a directory of them."""
    if (path / HEAD).exists():
        return path

    steps = find_steps(path)
    if not steps:
        below = sorted({head.parent.parent for head in path.glob(f"*/step_*/{HEAD}")})
        there = f" Below it are some: {', '.join(map(str, below))}." if below else ""
        raise FileNotFoundError(
            f"{path} is not a checkpoint and holds none (directories such as step_00000100).{there}"
        )
    return step_path(path, steps[-1])


def inventory(path: Path) -> Group:
    """Contents of a checkpoint, for people."""
    head = read_head(path)
    size = decimal(sum(stored.num_bytes for stored in head.stored))
    metrics = "".join(f", {name} {value:.6g}" for name, value in head.metrics.items())
    axes = ", ".join(f"{axis}={size}" for axis, size in head.mesh.items())
    summary = f"{path}: step {head.step}, {head.num_batches} batches seen, {size}{metrics}, on mesh ({axes})"

    table = Table()
    for heading in ("name", "kind", "shape", "dtype", "spec", "bytes", "stored"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "bytes" else "left")
    for row in _rows(head):
        table.add_row(*(Text(str(cell)) for cell in row))
    return Group(Text(summary), table)


def _rows(head: Head) -> Iterator[tuple[object, ...]]:
    """A row for each parameter and buffer, and one for each place in the rest of the state."""
    rest: dict[str, list[SavedArray]] = {}
    for stored in head.stored:
        if stored.where != TENSORS:
            rest.setdefault(stored.where, []).append(stored)
            continue

        shape, dtype = stored.entry_type
        count = len(stored.names)
        for number, name in enumerate(stored.names):
            kind = f"{stored.kind}, not in state_dict" if name in head.unsaved else stored.kind
            place = f"row {number} of {count}" if count > 1 else ""
            yield name, kind, shape, dtype, stored.spec, decimal(stored.num_bytes // count), place

    # Moments of an optimizer, and its numbers, which have no names.
    for where, arrays in rest.items():
        num_entries = sum(len(stored.names) for stored in arrays)
        num_bytes = sum(stored.num_bytes for stored in arrays)
        dtypes = ", ".join(dict.fromkeys(stored.dtype for stored in arrays))
        kind = f"{num_entries} entries" if num_entries else ""
        shape = "by name" if num_entries else arrays[0].shape
        yield where, kind, shape, dtypes, "", decimal(num_bytes), ""
