"""Values of a step beside their references: how far apart they are, as a table."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from jax.typing import ArrayLike
from rich.table import Table
from torch.utils import _pytree as torch_pytree

from torch_shard._common.caller import error_prefix
from torch_shard._common.convert import host_array
from torch_shard._common.printed import InNotebooks, printed
from torch_shard._common.specs import describe_mesh
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_number
from torch_shard._device import to_cpu

logger = logging.getLogger(__name__)

_S = TypeVar("_S")

_T = TypeVar("_T")

MAX_ROWS = 30

MAGNIFIED = 1e-4
"""A difference that shrinks to this part of itself in float64 is rounding, which shrinks by 2**29; others stay."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Distance of one value from its reference, as `max |a - b|` over the largest entry of the reference.

    Attributes:
        kind: "loss", "metric", "gradient", "parameter" or "buffer".
        name: Of the parameter, buffer or metric.
        size: Largest absolute entry of the reference.
        one_device: Difference on a single device; None where that is the reference.
        mesh: Difference on the mesh.
        in_float64: Difference on the mesh in float64, where that was asked because the others are large.
    """

    kind: str
    name: str
    size: float
    one_device: float | None
    mesh: float
    in_float64: float | None = None

    @property
    def worst(self) -> float:
        """The larger of the two; nothing where float64 shows that they are rounding, which the model magnifies."""
        found = max(self.mesh, self.one_device or 0.0)
        is_rounding = self.in_float64 is not None and self.in_float64 <= MAGNIFIED * found < math.inf
        return 0.0 if is_rounding else found


@dataclasses.dataclass(frozen=True)
class Comparison(InNotebooks):
    """Differences that `compare_with_torch` found; print it with `rich.print` or `print`.

    Attributes:
        rows: One for each loss, metric, gradient, parameter and buffer, the largest difference first.
        reference: What the others are compared with: "eager torch", or "one device" if the loss draws random numbers.
        mesh: The mesh.
        tolerance: What rounding explains, by the lowest precision at work.
        losses: Of the reference, at each step.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> found = ts.compare_with_torch(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> found.reference, sorted({row.kind for row in found.rows}), found.rows[0].worst <= found.tolerance
        ('eager torch', ['gradient', 'loss', 'parameter'], True)
    """

    rows: tuple[Difference, ...]
    reference: str
    mesh: str
    tolerance: float
    losses: tuple[float, ...]

    @error_prefix("raise_if_different")
    def raise_if_different(self, rtol: float | None = None) -> None:
        """Raise if anything differs by more than `rtol`.

        Args:
            rtol: The largest difference that is allowed, relative to the largest entry of the reference; by default
                `tolerance`.

        Raises:
            AssertionError: With the names and how far they are apart.
        """
        if rtol is not None:
            check_number("rtol", rtol)
        limit = self.tolerance if rtol is None else rtol
        if wrong := beyond(self.rows, limit):
            lines = [f"  {row.kind} {row.name}: {_where(row)}" for row in wrong[:MAX_ROWS]]
            raise AssertionError(
                f"{len(wrong)} of {len(self.rows)} values differ from {self.reference} by more than {limit:.0e} of "
                f"their largest entry:\n" + "\n".join(lines)
            )

    def __rich__(self) -> Table:
        table = Table(title=f"Differences from {self.reference}, relative to the largest entry")
        for column in ("", "name", "largest entry", "one device", self.mesh):
            table.add_column(column, justify="left" if column in ("", "name") else "right", overflow="fold")
        for row in self.rows[:MAX_ROWS]:
            colour = "green" if row.worst <= self.tolerance else "red"
            one = "-" if row.one_device is None else f"{row.one_device:.1e}"
            table.add_row(row.kind, row.name, f"{row.size:.2e}", one, f"{row.mesh:.1e}", style=colour)
        if len(self.rows) > MAX_ROWS:
            table.caption = f"and {len(self.rows) - MAX_ROWS} more with smaller differences"
        return table

    def __str__(self) -> str:
        return printed(self, 110)


def beyond(rows: Iterable[Difference], limit: float) -> list[Difference]:
    """The rows that differ by more."""
    return [row for row in rows if not row.worst <= limit]


def _where(row: Difference) -> str:
    if row.one_device is None:
        return f"{row.mesh:.1e} on the mesh"
    return f"{row.one_device:.1e} on one device, {row.mesh:.1e} on the mesh"


def rounding_of(dtype: torch.dtype) -> float:
    """The relative difference that the order of sums explains, by the lowest precision at work."""
    return {torch.bfloat16: 3e-2, torch.float16: 1e-2}.get(dtype, 1e-4)


Values = dict[tuple[str, str], np.ndarray]  # by kind and name


def array_of(value: torch.Tensor | ArrayLike) -> np.ndarray:
    """A value on the host."""
    if isinstance(value, jax.Array | torch.Tensor):
        value = to_cpu(value).detach()
        return np.array(host_array(value.to_dense() if value.is_sparse else value, rounds=True))
    return np.array(value)


def numbers_of(loss: ArrayLike | torch.Tensor, metrics: Mapping[str, PyTree]) -> Values:
    """Loss and metrics, these by path, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(metrics))
    paths = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    found = {("loss", "loss"): loss, **{("metric", name): leaf for name, leaf in paths.items()}}
    return {key: array_of(value) for key, value in found.items()}


def differences(reference: Sequence[Values], one: Sequence[Values] | None, mesh: Sequence[Values]) -> list[Difference]:
    """Each value beside its reference; of several steps the worst."""

    def apart(key: tuple[str, str], found: Sequence[Values]) -> float:
        return max(_apart(key, r, v) for r, v in zip(reference, found, strict=True))

    return [
        Difference(
            *key,
            size=max(_largest(values.get(key, np.zeros(0))) for values in reference),
            one_device=None if one is None else apart(key, one),
            mesh=apart(key, mesh),
        )
        for key in {**reference[-1], **mesh[-1]}
    ]


def compared(
    rows: Iterable[Difference], name: str, mesh: Mesh, tolerance: float, reference: Sequence[Values]
) -> Comparison:
    """The table of these rows, with the name of the reference and what it is after each step."""
    ordered = tuple(sorted(rows, key=lambda row: -row.worst))
    losses = tuple(float(values["loss", "loss"]) for values in reference)
    return Comparison(ordered, name, f"mesh {describe_mesh(mesh)}", tolerance, losses)


def precision_of(model: torch.nn.Module, compute_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype at work that rounds most."""
    at_work = {p.dtype for p in model.parameters() if p.is_floating_point()} | {compute_dtype}
    return max((d for d in at_work if d is not None), key=lambda d: torch.finfo(d).eps, default=torch.float32)


def told_apart(
    rows: list[Difference], widen: Callable[[], _S], compare: Callable[[_S], Sequence[Difference]]
) -> list[Difference]:
    """The rows, with what their differences are in float64 if some are large: rounding shrinks there, and errors stay.

    Args:
        rows: In float32.
        widen: As `repeated_in_float64` takes it.
        compare: Gives the rows.
    """
    if not beyond(rows, rounding_of(torch.float32)):
        return rows
    exact = {(row.kind, row.name): row.mesh for row in repeated_in_float64(widen, compare) or ()}
    return [dataclasses.replace(row, in_float64=exact.get((row.kind, row.name))) for row in rows]


def repeated_in_float64(widen: Callable[[], _S], repeat: Callable[[_S], _T]) -> _T | None:
    """What something gives in float64; None if the loss cannot be computed so."""
    try:
        wide = widen()
        with jax.enable_x64(True):
            return repeat(wide)
    except Exception:
        logger.info("The loss cannot be repeated in float64.", exc_info=True)
        return None


def in_float64(batch: PyTree) -> PyTree:
    """A batch with tensors of float64 in place of those of float32."""

    def widened(leaf: PyTree) -> PyTree:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

    return torch_pytree.tree_map(widened, batch)


def _apart(key: tuple[str, str], reference: Values, found: Values) -> float:
    """Relative to the value's own largest entry; what is nothing but rounding is measured by the largest of its kind.

    (A bias before a batch norm has a gradient of zero; what is left of it is the rounding of other gradients.)
    """
    if key not in reference or key not in found:
        return math.inf
    wanted, got = (np.asarray(v[key], np.complex128) for v in (reference, found))
    if wanted.shape != got.shape:
        return math.inf
    alike = (wanted == got) | (np.isnan(wanted) & np.isnan(got)) | (np.isfinite(wanted) & np.isfinite(got))
    if not alike.all():
        return math.inf
    largest_of_kind = max(_largest(v) for (kind, _), v in reference.items() if kind == key[0])
    finite = np.isfinite(wanted)
    distance = np.abs(wanted[finite] - got[finite]).max(initial=0)
    return 0.0 if distance == 0 else float(distance / max(_largest(wanted), 1e-2 * largest_of_kind))


def _largest(value: np.ndarray) -> float:
    array = np.abs(np.asarray(value, np.complex128))
    return float(array[np.isfinite(array)].max(initial=0))
