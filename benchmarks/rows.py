"""What a section yields: rows of the table and points of the curves."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.timing import Ratio, summary


@dataclasses.dataclass(frozen=True)
class Row:
    """A ratio of two programs.

    Attributes:
        name: What is measured.
        ours: Our number, with its unit.
        rival: The rival's.
        ratio: The number that the target is about, ours over the rival's unless the name says otherwise; None where
            it was not measured.
        quartiles: Of the paired ratios, where there are pairs.
        target: The ratio is to be at most this, where there is a target.
        at_least: The target is a lower bound instead.
        note: What a reader should know.
    """

    name: str
    ours: str = ""
    rival: str = ""
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    target: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the target is reached; None without one, or without a measurement."""
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of a curve: `figure` is a file, `panel` its y axis with the unit, `line` a side."""

    figure: str
    panel: str
    line: str
    x_label: str
    x: float
    y: float


def timed(name: str, ours: np.ndarray, rival: np.ndarray, target: float | None = None, note: str = "") -> Row:
    """The row of two sides run in turn, seconds of each."""
    ratio: Ratio = summary(np.stack([ours, rival], -1))
    return Row(
        name, clock(ratio.ours_s), clock(ratio.rival_s), ratio.median, (ratio.low, ratio.high), target, note=note
    )


def sized(name: str, ours: float, rival: float, target: float | None = None, note: str = "") -> Row:
    """The row of two exact sizes in bytes; without a rival's, there is no ratio."""
    ratio = ours / rival if rival else None
    return Row(name, f"{ours / 1e6:.4g} MB", f"{rival / 1e6:.4g} MB", ratio, target=target, note=note)


def clock(seconds: float) -> str:
    """Seconds as text in a fitting unit."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of the known names that were asked for; all of them, if none was."""
    if unknown := set(names) - set(known):
        raise ValueError(f"no model {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [name for name in known if not names or name in names]
