"""Checkpoints: what a step costs that starts an asynchronous save, and restoring onto another mesh."""

import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import torch_shard as ts
from benchmarks import cases, models
from benchmarks.rows import Row, timed
from benchmarks.sides import Ours
from benchmarks.timing import round_robin


def rows(quick: bool) -> Iterator[Row]:
    """A GPT of 6 layers, 256 wide, on 32 rows of 128 tokens, with AdamW."""
    case, rounds = cases.gpt(quick), 3 if quick else 15
    batch = case.batch if quick else models.token_batch(32, 128, 512)

    def ours(**sizes: int) -> Ours:
        return Ours(case.model, case.loss_fn, ts.make_mesh(**sizes), case.specs)

    same, other = ours(batch=4, model=2), ours(batch=2, model=4)
    with tempfile.TemporaryDirectory() as folder, ts.Checkpointer(Path(folder) / "run", keep=2) as checkpointer:
        same(batch)
        times = np.array([_pair(same, batch, checkpointer, turn) for turn in range(rounds + 1)])[1:]
        yield timed(
            "step that starts a save ÷ plain step, GPT on (4,2)",
            times[:, 0],
            times[:, 1],
            1.2,
            "it waits for the step, copies the state to the host, and returns",
        )
        sides = {
            name: functools.partial(lambda side: jax.block_until_ready(checkpointer.restore(side.step)), side)
            for name, side in (("other", other), ("same", same))
        }
        found = round_robin(sides, rounds)
        yield timed("restore onto (2,4) ÷ onto (4,2), GPT saved on (4,2)", found["other"], found["same"], 1.3)


def _pair(side: Ours, batch: Any, checkpointer: ts.Checkpointer, turn: int) -> tuple[float, float]:
    """Seconds of a step with a save and of one without, in turn; nothing is written while either is timed."""
    times = {}
    for saves in (True, False) if turn % 2 else (False, True):
        start = time.perf_counter()
        side(batch)
        if saves:
            checkpointer.save(side.state)
        times[saves] = time.perf_counter() - start
        checkpointer.wait()
    return times[True], times[False]
