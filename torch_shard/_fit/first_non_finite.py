"""The place where a bad step stopped being finite, and what is kept of it for later."""

import logging
import math
from pathlib import Path

import jax

from torch_shard._inspect import find_nan, replay, save_bad_batch
from torch_shard._state import TrainState
from torch_shard._train import ShardedBatch, TrainStep

logger = logging.getLogger(__name__)

_MOST_WORK = 1e12
"""Parameters times numbers of a batch: more would take eager torch on a CPU minutes."""

_UNKNOWN = "Where it began is not known"


def first_non_finite(step: TrainStep, placed: ShardedBatch, state: TrainState) -> str:
    """Say where the first value that is not finite came from, or that it is not known; one sentence."""
    work = sum(p.numel() for p in step.model.parameters()) * sum(math.prod(array.shape) for array in placed.arrays)
    if jax.process_count() > 1 or work > _MOST_WORK:
        return f"{_UNKNOWN}: repeating the batch in eager torch would take long"
    try:
        found = replay(step, state, placed)
    except Exception as error:
        logger.info("fit: the batch of a bad step cannot be repeated in eager torch.", exc_info=True)
        return f"{_UNKNOWN}: eager torch ends this batch with {type(error).__name__}: {error}".rstrip(".")
    if not found:
        return f"{_UNKNOWN}: in eager torch on the CPU all values of this batch are finite"
    return ". ".join([found.sentence, *(note.rstrip(".") for note in found.notes)])


def explained(step: TrainStep, placed: ShardedBatch, state: TrainState, directory: Path | None) -> str:
    """Say all that `find_nan` does, and keep the batch."""
    kept = ""
    if directory is not None:
        path = save_bad_batch(step, placed, directory)
        kept = f"\n\nThe batch is in {path}: torch-shard replay FILE.py {directory} says this again"
    return f"\n\n{find_nan(step, state, placed)}{kept}"
