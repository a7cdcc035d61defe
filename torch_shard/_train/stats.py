"""What the modules of a step return, in numbers: largest, mean, share of zeros, of outputs and of their gradients."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import contextlib
import dataclasses
import math
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from torch_shard._common.caller import error_prefix
from torch_shard._common.fx import tensors_in
from torch_shard._common.printed import MARGIN, Picture, aligned, save_svg, width_of
from torch_shard._state import TrainState
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.replay import GradientStep, Replay


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """The entries of a tensor as a plain tensor of floating point; None of integers, and of what cannot be read."""
    from_torch: Any = tensor.detach()
    if not (from_torch.is_floating_point() or from_torch.is_complex()) or from_torch.is_meta:
        return None
    try:
        if from_torch.is_nested or from_torch.layout is not torch.strided:
            from_torch = from_torch.coalesce() if from_torch.layout is torch.sparse_coo else from_torch
            from_torch = from_torch.values()
        from_torch = from_torch.float() if from_torch.dtype.itemsize == 1 else from_torch
        from_torch.isfinite().all().item()  # refused within torch.vmap, where a tensor stands for many
    except RuntimeError:
        return None
    return from_torch if from_torch.numel() else None


@contextlib.contextmanager
def unseen() -> Generator[None]:
    """Operators within are neither calls of the user's nor recorded for derivatives."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Entries of a tensor in short.

    Attributes:
        largest: Largest absolute entry; NaN or infinity if there is one.
        mean: Of the entries.
        zeros: Share of entries that are zero, from 0 to 1.
        num: Of entries.
        shape: Of the tensor; empty if it is nested.
        dtype: Of the tensor.
    """

    largest: float
    mean: float
    zeros: float
    num: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    @unseen()
    def of(cls, tensor: torch.Tensor) -> "Numbers | None":
        """Those of a tensor; None if it has none of floating point."""
        numbers = numbers_in(tensor)
        if numbers is None:
            return None
        own = numbers.abs().float() if numbers.is_complex() else numbers.float()
        about = own.numel(), () if tensor.is_nested else tuple(tensor.shape), tensor.dtype
        return cls(float(own.abs().max()), float(own.mean()), float((own == 0).float().mean()), *about)


@dataclasses.dataclass(frozen=True)
class ModuleStats:
    """One module at one call.

    Attributes:
        name: In the model, such as `layers.17.mlp`.
        kind: Its class.
        output: Of the first tensor of floating point that it returned.
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


class ModuleCalls:
    """Follows the modules of a model while they run: which one is running, what each returns, and its gradient."""

    def __init__(self, model: nn.Module) -> None:
        named = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
        self._names = {id(module): name for name, module in named}
        self._running = list[str]()
        self.rows = list[ModuleStats]()
        """In the order in which their calls ended."""

    @property
    def current(self) -> str:
        """The innermost module that is running."""
        return self._running[-1] if self._running else "loss_fn"

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Follow them within."""
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._names.get(id(module), "") or type(module).__name__)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        name, at = self._running.pop(), len(self.rows)
        found = next(((t, numbers) for t in tensors_in(output) if (numbers := Numbers.of(t))), None)
        if found is None:
            return
        tensor, numbers = found
        self.rows.append(ModuleStats(name, type(module).__name__, numbers, None))

        def arrived(grad: torch.Tensor) -> None:
            self.rows[at] = dataclasses.replace(self.rows[at], gradient=Numbers.of(grad))

        if tensor.requires_grad:
            tensor.register_hook(arrived)


def stats_of(step: GradientStep, state: TrainState, placed: ShardedBatch) -> StepStats:
    """Repeat a step in eager torch, and look at what each module returns; see `TrainStep.stats`."""
    replay = Replay(step, state, placed)
    calls = ModuleCalls(replay.model)
    for microbatch in replay:
        with calls.active():
            loss, _ = replay.forward(microbatch)
        replay.backward(loss)
    return StepStats(tuple(calls.rows))
