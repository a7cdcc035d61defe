"""How far two runs are apart, value by value, as a table for people and an error for tests."""

import dataclasses
import io

from rich.console import Console
from rich.table import Table

MAX_ROWS = 30


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one value is from its reference, as `max |a - b|` over the largest entry of the reference.

    Attributes:
        kind: "loss", "metric", "gradient", "parameter" or "buffer".
        name: Of the parameter, buffer or metric.
        size: Largest absolute entry of the reference.
        one_device: Difference on a single device; None where that is the reference.
        mesh: Difference on the mesh.
    """

    kind: str
    name: str
    size: float
    one_device: float | None
    mesh: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.mesh, self.one_device or 0.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare_with_torch` found; print it with `rich.print` or `print`.

    Attributes:
        rows: One for each loss, metric, gradient, parameter and buffer, the largest difference first.
        reference: What the others are compared with: "eager torch", or "one device" if the loss draws random numbers.
        mesh: The mesh.
        tolerance: What rounding explains, by the lowest precision at work.
        losses: Of the reference, at each step.
    """

    rows: tuple[Difference, ...]
    reference: str
    mesh: str
    tolerance: float
    losses: tuple[float, ...]

    def raise_if_different(self, rtol: float | None = None) -> None:
        """Raise if anything differs by more than `rtol`, by default the tolerance.

        Raises:
            AssertionError: With the names and how far they are apart.
        """
        limit = self.tolerance if rtol is None else rtol
        beyond = [row for row in self.rows if not row.worst <= limit]
        if beyond:
            lines = [f"  {row.kind} {row.name}: {_where(row)}" for row in beyond[:MAX_ROWS]]
            raise AssertionError(
                f"{len(beyond)} of {len(self.rows)} values differ from {self.reference} by more than {limit:.0e} of "
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
        console = Console(file=io.StringIO(), width=110)
        console.print(self)
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def _where(row: Difference) -> str:
    if row.one_device is None:
        return f"{row.mesh:.1e} on the mesh"
    return f"{row.one_device:.1e} on one device, {row.mesh:.1e} on the mesh"
