"""Seconds until the first step is done: capture, tracing, compilation and one run, as the model grows deeper.

Each depth of each side has a process of its own, so that none finds what another has cached; a step of a single linear
layer goes before, so that no side pays for imports and for starting XLA. Building the model is not counted.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optax
import torch

import torch_shard as ts
from benchmarks import handwritten_models as by_hand
from benchmarks import models, sides
from benchmarks.handwritten import HandwrittenStep
from benchmarks.processes import isolated
from benchmarks.rows import Point, Row, timed
from benchmarks.sides import Side

WIDTH, HEADS, VOCAB, ROWS, LENGTH = 128, 4, 512, 8, 64
DEPTHS, LONGEST = (4, 12, 24, 48), {"JAX, unrolled": 24}
OURS, UNROLLED, TORCHAX = "ours", "ours, scan_layers=False", "torchax"


def rows(quick: bool) -> Iterator[Row | Point]:
    """Every side at every depth, in turn."""
    depths, rounds = ((2, 6), 1) if quick else (DEPTHS, 3)
    names = [OURS, TORCHAX, "JAX, scan"] if quick else list(SIDES)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for depth in depths:
            for name in names:
                if depth <= LONGEST.get(name, depth):
                    took = isolated("benchmarks.compile:first_step", side=name, depth=depth)
                    found.setdefault((name, depth), []).append(took)
    times = {key: np.array(values) for key, values in found.items()}
    for (name, depth), values in times.items():
        yield Point("compile", "first step, seconds", name, "layers", depth, float(np.median(values)))
        if name not in (OURS, TORCHAX):
            yield timed(f"first step, {depth} layers ÷ {name}", times[OURS, depth], values)
    first, last, middle = depths[0], depths[-1], depths[-2]
    yield timed(f"ours, first step, {last} layers ÷ {first} layers", times[OURS, last], times[OURS, first], 1.5)
    for depth in depths:
        inverse = timed(f"torchax ÷ ours, first step, {depth} layers", times[TORCHAX, depth], times[OURS, depth])
        yield at_least(inverse, 8 if depth == middle else None)


def at_least(row: Row, target: float | None) -> Row:
    """A row of a rival over ours: columns as the table has them, ours first."""
    return Row(row.name, row.rival, row.ours, row.ratio, row.quartiles, target, at_least=True)


def first_step(side: str, depth: int) -> float:
    """Seconds of the first step of one side in this process."""
    SIDES[side](torch.nn.Sequential(torch.nn.Linear(4, 10)), models.class_loss)(models.class_batch(8, 4))
    torch.manual_seed(0)
    model, batch = models.GPT(depth, WIDTH, HEADS, VOCAB, LENGTH), models.token_batch(ROWS, LENGTH, VOCAB)
    start = time.perf_counter()
    SIDES[side](model, models.token_loss)(batch)
    return time.perf_counter() - start


def _ours(scan: Any) -> Callable[..., Side]:
    return lambda model, loss_fn: sides.Ours(model, loss_fn, ts.make_mesh(batch=1), {}, scan_layers=scan)


def _by_hand(scan: bool) -> Callable[..., Side]:
    def side(model: torch.nn.Module, loss_fn: Any) -> Side:
        is_gpt = isinstance(model, models.GPT)
        rival = by_hand.gpt(HEADS, scan=scan) if is_gpt else by_hand.mlp()
        start = sides.start_of(model)
        return HandwrittenStep(rival, optax.adamw(sides.LEARNING_RATE), ts.make_mesh(batch=1), start)

    return side


SIDES: dict[str, Callable[..., Side]] = {
    OURS: _ours("auto"),
    UNROLLED: _ours(False),
    TORCHAX: sides.torchax_step,
    "JAX, scan": _by_hand(scan=True),
    "JAX, unrolled": _by_hand(scan=False),
}
