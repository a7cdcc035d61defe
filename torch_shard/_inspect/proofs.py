"""The table of proofs: a row for each layout, with how far each kind of value is from eager torch."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from torch_shard._common.caller import error_prefix
from torch_shard._common.printed import InNotebooks, printed
from torch_shard._train import Comparison, Difference

KINDS = ("loss", "metric", "gradient", "parameter", "buffer")


@dataclasses.dataclass(frozen=True)
class Proof:
    """One layout beside eager torch.

    Attributes:
        plan: Its name.
        mesh: Its axes with their sizes.
        dtype: In which both computed: "float64" where the rounding of "float32" hid too much; "float64, in part
            float32" where the model itself computes some of it in that.
        compared: All values; None where the layout does not fit the model or the batch.
        refused: Why it does not; else empty.
        need_not_fit: Whether it was tried as one of the usual layouts, and not asked for.

    Example:
        >>> import torch, torch_shard as ts
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> (row,) = ts.prove(torch.nn.Linear(4, 2), loss_fn, torch.ones(8, 4), plans="dp").rows
        >>> row.plan, row.mesh, row.dtype, row.worst("gradient").worst < 1e-5
        ('dp', '(batch=8)', 'float32', True)
    """

    plan: str
    mesh: str
    dtype: str
    compared: Comparison | None
    refused: str = ""
    need_not_fit: bool = False

    @property
    def holds(self) -> bool:
        """Whether every value is as close as rounding explains; what does not fit does not hold."""
        return self.compared is not None and all(row.worst <= self.compared.tolerance for row in self.compared.rows)

    def worst(self, kind: str | None = None) -> Difference | None:
        """Give the largest difference; None if there is no such value.

        Args:
            kind: "loss", "metric", "gradient", "parameter" or "buffer"; None for all.
        """
        rows = self.compared.rows if self.compared is not None else ()
        return next((row for row in rows if kind in (None, row.kind)), None)  # the largest comes first


@dataclasses.dataclass(frozen=True)
class Proofs(InNotebooks):
    """Findings of `ts.prove`; print them with `rich.print` or `print`.

    Attributes:
        rows: One for each layout.
        reference: What the others are compared with: "eager torch", or "one device" if the loss draws random numbers.
        steps: How many each of them has trained.

    Example:
        >>> import torch, torch_shard as ts
        >>> found = ts.prove(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     plans=["dp", "expert"], meshes=[ts.make_mesh(batch=2, model=2)],
        ... )
        >>> [(row.plan, row.holds, row.refused[:46]) for row in found.rows]
        [('dp', True, ''), ('expert', False, 'plans.expert: no entry of Linear holds several')]
    """

    rows: tuple[Proof, ...]
    reference: str
    steps: int

    @property
    def holds(self) -> bool:
        """Whether all hold: those that were asked for, and of the usual ones those that fit the model."""
        return not self._failed()

    def _failed(self) -> list[Proof]:
        return [row for row in self.rows if not row.holds and not (row.refused and row.need_not_fit)]

    @error_prefix("raise_if_different")
    def raise_if_different(self) -> None:
        """Raise if a value of any layout is further from its reference than rounding explains.

        Raises:
            AssertionError: With the layouts, the names and how far they are apart.
        """
        if not (failed := self._failed()):
            return
        lines = [f"  {row.plan} on {row.mesh}: {_said(row)}" for row in failed]
        raise AssertionError(f"these layouts do not give the numbers of {self.reference}:\n" + "\n".join(lines))

    def __rich__(self) -> Table:
        shown = [kind for kind in KINDS if any(row.worst(kind) for row in self.rows)]
        title = f"Largest differences from {self.reference} after {self.steps} step{'s' * (self.steps != 1)}"
        table = Table(title=title, caption="relative to the largest entry of the value")
        for column in ("plan", "mesh", *shown, "in", ""):
            table.add_column(column, justify="right" if column in KINDS else "left", overflow="fold")
        for row in self.rows:
            sizes = [f"{found.worst:.1e}" if (found := row.worst(kind)) else "" for kind in shown]
            colour = "green" if row.holds else "yellow" if row.need_not_fit else "red"
            verdict = "holds" if row.holds else _said(row)
            table.add_row(row.plan, row.mesh, *sizes, "" if row.refused else row.dtype, verdict, style=colour)
        return table

    def __str__(self) -> str:
        return printed(self, 140)


def _said(row: Proof) -> str:
    """What is wrong with a row, in a line."""
    if row.refused:
        return f"does not fit: {row.refused.partition('. ')[0]}"
    worst = row.worst()
    beyond = [found for found in row.compared.rows if not found.worst <= row.compared.tolerance] if row.compared else []
    more = f", and {len(beyond) - 1} more" if len(beyond) > 1 else ""
    return f"{worst.kind} {worst.name} is {worst.worst:.1e} apart{more}" if worst else ""
