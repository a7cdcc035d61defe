"""What the modules of a step return, in numbers: largest, mean, share of zeros, of outputs and of their gradients."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import math
import os
from collections.abc import Sequence

import torch

from torch_shard._common.caller import error_prefix
from torch_shard._common.printed import MARGIN, Picture, aligned, save_svg, width_of
from torch_shard._state import TrainState
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import GradientStep, ModuleCalls, Replay, numbers_in


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
        rows = [(row.name, row.kind, *_cells(row.output), *_cells(row.gradient)) for row in self.rows]
        return "\n".join(aligned([head, *rows]))

    @error_prefix("StepStats.save")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the largest entries of outputs and gradients, module by module, as an SVG.

        Args:
            path: Of the picture, which ends in `.svg`.
        """
        save_svg(_draw(self.rows), path)


_LINE, _DOT, _LETTERS, _WIDTH = 16.0, 8.0, 11.0, 480.0
"""In pixels: height of a row and of a dot, size of letters, width of the scale."""


def _draw(rows: Sequence[ModuleStats]) -> Picture:
    """Two dots for each row on a logarithmic scale; zeros at its left end, at its right what is not finite."""
    picture, left = Picture(), MARGIN + max((width_of(row.name, _LETTERS) for row in rows), default=0) + _LINE
    dots = [(at, "one", row.output.largest) for at, row in enumerate(rows)]
    dots += [(at, "two", row.gradient.largest) for at, row in enumerate(rows) if row.gradient is not None]
    powers = [math.log10(size) for _, _, size in dots if 0 < size < math.inf]
    low, high = math.floor(min(powers, default=0)), math.floor(max(powers, default=0)) + 1
    step = _WIDTH / (high - low)
    picture.text("largest entry of the output", left, MARGIN, size=_LETTERS, style="one bold")
    picture.text("and of its gradient", left + _WIDTH / 2, MARGIN, size=_LETTERS, style="two bold")
    for power in range(low, high + 1, -(-(high - low) // 8)):
        x = left + (power - low) * step
        picture.box(x, MARGIN + 2 * _LINE, 1, _LINE * len(rows), style="line")
        picture.text(f"1e{power}", x, MARGIN + 1.3 * _LINE, size=_LETTERS, style="faint", anchor="middle")
    for at, row in enumerate(rows):
        y = MARGIN + (at + 2.5) * _LINE
        picture.text(row.name, left - _LINE, y, size=_LETTERS, style="text", anchor="end")
    for at, style, size in dots:
        power = math.log10(size) if 0 < size < math.inf else high if size else low
        x, y = left + (power - low) * step, MARGIN + (at + 2.5) * _LINE
        picture.box(x - _DOT / 2, y - _DOT / 2, _DOT, _DOT, style=style)
    return picture


def _cells(numbers: Numbers | None) -> tuple[str, str, str]:
    if numbers is None:
        return "", "", ""
    return f"{numbers.largest:.4g}", f"{numbers.mean:.3g}", f"{numbers.zeros:.1%}"


def stats_of(step: GradientStep, state: TrainState, placed: ShardedBatch) -> StepStats:
    """Repeat a step in eager torch, and look at what each module returns; see `TrainStep.stats`."""
    rows, replay = list[ModuleStats](), Replay(step, state, placed)

    def left(name: str, kind: str, outputs: list[torch.Tensor]) -> None:
        if not outputs or (found := Numbers.of(outputs[0])) is None:
            return
        at = len(rows)
        rows.append(ModuleStats(name, kind, found, None))

        def arrived(grad: torch.Tensor) -> None:
            rows[at] = dataclasses.replace(rows[at], gradient=Numbers.of(grad))

        if outputs[0].requires_grad:
            outputs[0].register_hook(arrived)

    for microbatch in replay:
        with ModuleCalls(replay.model, left).active():
            loss, _ = replay.forward(microbatch)
        replay.backward(loss)
    return StepStats(tuple(rows))
