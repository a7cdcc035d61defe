"""What lies where: the sharding of one array, drawn as a grid of devices."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torch_shard._bridge import JaxTensor
from torch_shard._mesh import describe_mesh, describe_spec

# In turn over the shards; all readable under bold white.
COLOURS = ("blue", "dark_green", "dark_magenta", "dark_orange3", "deep_sky_blue4", "red", "purple4", "grey35")
MAX_CELLS = 64

Range = tuple[int, int]


def visualize_sharding(array_or_tensor: Any, *, name: str = "") -> Group:
    """Draw which devices hold which part of one array.

    A cell is a shard: the devices that hold it (several, where it is replicated) and its range of global
    indices. Columns are the parts of the last dim that is split, rows those of all other split dims.

    Args:
        array_or_tensor: A `jax.Array`, a tensor on the jax device, or a `jax.ShapeDtypeStruct` with a sharding.
        name: What to call it in the title.

    Returns:
        A rich renderable: `rich.print(visualize_sharding(x))`.

    Raises:
        TypeError: It has no sharding, as a CPU tensor has none.
        ValueError: It has more shards than can be drawn.

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
    array = array_or_tensor.jax() if isinstance(array_or_tensor, JaxTensor) else array_or_tensor
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        raise TypeError(
            "visualize_sharding: expected a jax.Array or a tensor on the jax device, got "
            f"{type(array_or_tensor).__name__}, which has no sharding. Place it first: "
            "torch_shard.place(model, mesh, plan), or jax.device_put(array, sharding)."
        )
    shape = tuple(array.shape)
    holders = _find_holders(sharding, shape)
    if len(holders) > MAX_CELLS:
        raise ValueError(f"visualize_sharding: {len(holders)} shards are more than can be drawn ({MAX_CELLS}).")
    table = Table(box=box.SQUARE, show_header=False, show_lines=True)
    colours = dict(zip(holders, itertools.cycle(COLOURS)))
    for row in _arrange(list(holders), shape):
        cells = (f"{_describe_devices(holders[part])}\n{_describe_part(part, shape)}" for part in row)
        styles = (f"bold white on {colours[part]}" for part in row)
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return Group(_title(name, array), table)


def _find_holders(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[tuple[Range, ...], list[Any]]:
    """The devices that hold each part, a part being a range per dim."""
    holders: dict[tuple[Range, ...], list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        part = tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        holders.setdefault(part, []).append(device)
    return dict(sorted(holders.items()))


def _arrange(parts: list[tuple[Range, ...]], shape: tuple[int, ...]) -> Iterable[list[tuple[Range, ...]]]:
    """Lay sorted parts out in rows, the last split dim running along a row."""
    split = [dim for dim in range(len(shape)) if len({part[dim] for part in parts}) > 1]
    # A matrix that is split by rows alone is drawn as rows; a vector always lies down.
    across = split[-1] if split and (split[-1] > 0 or len(shape) == 1) else None
    rows: dict[Any, list[tuple[Range, ...]]] = {}
    for part in parts:
        rows.setdefault(tuple(r for dim, r in enumerate(part) if dim != across), []).append(part)
    return rows.values()


def _title(name: str, array: Any) -> Text:
    words = [name, str(tuple(array.shape)), str(array.dtype)]
    if isinstance(array.sharding, NamedSharding):
        words += [describe_spec(array.sharding.spec), "on", describe_mesh(array.sharding.mesh)]  # pyright: ignore
    return Text(" ".join(filter(None, words)))


def _describe_devices(devices: list[Any]) -> str:
    platform, ids = devices[0].platform.upper(), sorted(device.id for device in devices)
    if len(ids) <= 8:
        return f"{platform} {', '.join(map(str, ids))}"
    return f"{platform} {ids[0]}, {ids[1]}, ... {ids[-1]} ({len(ids)} devices)"


def _describe_part(part: tuple[Range, ...], shape: tuple[int, ...]) -> str:
    ranges = (
        ":" if (start, stop) == (0, size) else f"{start}:{stop}"
        for (start, stop), size in zip(part, shape, strict=True)
    )
    return f"[{', '.join(ranges)}]"
