"""What the modules of a step return, in numbers: largest, mean, share of zeros, of outputs and of their gradients."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import os
from typing import TYPE_CHECKING

import torch

from torch_shard._state import TrainState
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import ModuleCalls, Replay, numbers_in

if TYPE_CHECKING:
    from torch_shard._train.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Entries of a tensor in short.

    Attributes:
        largest: Largest absolute entry; NaN or infinity if there is one.
        mean: Of the entries.
        zeros: Share of entries that are zero, from 0 to 1.
        num: Of entries.
    """

    largest: float
    mean: float
    zeros: float
    num: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Numbers | None":
        """Those of a tensor; None if it has none of floating point."""
        with torch.no_grad():
            numbers = numbers_in(tensor)
            if numbers is None:
                return None
            own = numbers.abs().float() if numbers.is_complex() else numbers.float()
            return cls(float(own.abs().max()), float(own.mean()), float((own == 0).float().mean()), own.numel())


@dataclasses.dataclass(frozen=True)
class ModuleStats:
    """One module at one call.

    Attributes:
        name: In the model, such as `layers.17.mlp`.
        kind: Its class.
        output: Of the first tensor that it returned.
        gradient: Of the gradient of that; None if none arrived.
    """

    name: str
    kind: str
    output: Numbers
    gradient: Numbers | None


@dataclasses.dataclass(frozen=True)
class StepStats:
    """The modules of a step, in the order in which their calls ended, microbatch after microbatch.

    Attributes:
        rows: One for each call of a module.
    """

    rows: tuple[ModuleStats, ...]

    def __str__(self) -> str:
        head = ("module", "", "output: largest", "mean", "zeros", "gradient: largest", "mean", "zeros")
        lines = [head, *((row.name, row.kind, *_cells(row.output), *_cells(row.gradient)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in shown)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the largest entries of outputs and gradients, module by module, with matplotlib.

        Args:
            path: Of the picture; its suffix says the format: `.svg`, `.png`, `.pdf`.
        """
        from matplotlib.figure import Figure  # takes time to import, and is for those who ask

        places = range(len(self.rows), 0, -1)
        figure = Figure(figsize=(8, 1 + 0.2 * len(self.rows)), layout="constrained")
        axes = figure.subplots()
        outputs = [row.output.largest for row in self.rows]
        gradients = [row.gradient.largest if row.gradient else 0.0 for row in self.rows]
        axes.plot(outputs, places, "o", label="output", markersize=4)
        axes.plot(gradients, places, "s", label="its gradient", markersize=4)
        axes.set_yticks(places, [row.name for row in self.rows], fontsize=7)
        axes.set(xscale="symlog", xlabel="largest absolute entry")
        axes.set_xscale("symlog", linthresh=max(min((g for g in gradients if g > 0), default=1e-6), 1e-12))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)


def _cells(numbers: Numbers | None) -> tuple[str, str, str]:
    if numbers is None:
        return "", "", ""
    return f"{numbers.largest:.4g}", f"{numbers.mean:.3g}", f"{numbers.zeros:.1%}"


def stats_of(step: "TrainStep", state: TrainState, placed: ShardedBatch) -> StepStats:
    """Repeat a step in eager torch, and look at what each module returns; see `TrainStep.stats`."""
    rows: list[ModuleStats | None] = []
    replay = Replay(step, state, placed)

    def left(name: str, kind: str, outputs: list[torch.Tensor]) -> None:
        if not outputs or (found := Numbers.of(outputs[0])) is None:
            return
        at = len(rows)
        rows.append(ModuleStats(name, kind, found, None))

        def arrived(grad: torch.Tensor) -> None:
            row = rows[at]
            assert row is not None
            rows[at] = dataclasses.replace(row, gradient=Numbers.of(grad))

        if outputs[0].requires_grad:
            outputs[0].register_hook(arrived)

    for run in replay:
        calls = ModuleCalls(replay.model, left)
        with calls.active():
            loss, _ = run.forward()
        run.backward(loss)
    return StepStats(tuple(row for row in rows if row is not None))
