"""Which program serves the values that Python asks for: one that is there, a more general one, or a new one."""

import functools
import logging
import time
from collections.abc import Callable, Iterable

from torch_shard._capture import Mismatch
from torch_shard._common.caller import caller
from torch_shard._loss.host_values import HostValues, refuse_microbatches
from torch_shard._loss.program import LossProgram

logger = logging.getLogger(__name__)

MANY = 16
"""So many answers of one program that a warning tells of them."""


def program_for(
    programs: Iterable[LossProgram], values: HostValues, capture: Callable[[int], LossProgram]
) -> LossProgram:
    """The program for these values: one of those there are, one that is more general than one of them, or a new one."""
    capture = functools.cache(capture)
    for program in programs:
        found = _serving(program, values, capture)
        if not isinstance(found, Mismatch):
            return found
    found = _serving(capture(0), values, capture)
    if isinstance(found, Mismatch):
        raise refuse_microbatches(found, found.microbatch)
    return found


def _serving(program: LossProgram, values: HostValues, capture: Callable[[int], LossProgram]) -> LossProgram | Mismatch:
    """A program that serves these values and what this one serves; or what needs another one."""
    seen = set[int]()
    while isinstance(found := program.fit(values), Mismatch):
        if found.microbatch in seen:  # a buffer, or the batch, that is being written to
            raise NotImplementedError(f"{caller()}: {found}, while it was captured. Ask for what nobody writes to.")
        seen.add(found.microbatch)
        start = time.perf_counter()
        if (wider := program.carrying(capture(found.microbatch))) is None:
            return found
        if wider is program:
            _tell(found, program.answers.num, time.perf_counter() - start)
        program = wider
    return program


def _tell(found: Mismatch, number: int, seconds: float) -> None:
    """Say once that a program is traced again and again."""
    logger.log(
        logging.WARNING if number == MANY else logging.DEBUG,
        "%s: %s. This is value %d: the loss is captured again for each (%.1f s), and nothing is compiled; a value that "
        "comes back costs nothing. Where it never does, work on it as a tensor, or pass it as data, in the batch.",
        caller(),
        found,
        number,
        seconds,
    )
