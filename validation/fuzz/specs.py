"""Random meshes, and specs that divide a shape over one."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

Sizes = tuple[tuple[str, int], ...]
"""Axes of a mesh, in order."""

THREE_AXES = [(("extra", 2), ("batch", 2), ("model", 2))]
OTHERS = [
    (("batch", 2), ("model", 4)),
    (("batch", 4), ("model", 2)),
    (("batch", 8),),
    (("batch", 2), ("model", 2)),
    (("batch", 1), ("model", 8)),
    (("model", 4),),
]


def draw_mesh(r: random.Random) -> Sizes:
    """Axes in any order; a third of all meshes has three."""
    sizes = list(r.choice(THREE_AXES) if r.random() < 0.4 else r.choice(OTHERS))
    r.shuffle(sizes)
    return tuple(sizes)


def draw_spec(r: random.Random, shape: Sequence[int], sizes: Mapping[str, int], *, odds: float = 0.75) -> P:
    """Any spec that divides: each axis on any dim, in any order.

    Args:
        r: Draws.
        shape: Any.
        sizes: Of the mesh, by axis.
        odds: Of each axis to be used.
    """
    parts: list[list[str]] = [[] for _ in shape]
    for axis in r.sample(list(sizes), len(sizes)):
        if shape and r.random() < odds:
            dim = r.randrange(len(shape))
            if shape[dim] % math.prod(sizes[a] for a in [*parts[dim], axis]) == 0:
                parts[dim].append(axis)
    return as_spec(parts)


def as_spec(parts: Sequence[Sequence[str]]) -> P:
    """A spec of the axes of each dim."""
    return P(*(None if not part else part[0] if len(part) == 1 else tuple(part) for part in parts))


def all_specs(ndim: int, axes: Sequence[str]) -> Iterator[P]:
    """Every spec for that many dims: each axis on one dim or on none, in each order."""
    for dims in itertools.product(range(-1, ndim), repeat=len(axes)):
        parts = [[axis for axis, dim in zip(axes, dims, strict=True) if dim == at] for at in range(ndim)]
        for orders in itertools.product(*(itertools.permutations(part) for part in parts)):
            yield as_spec(orders)
