"""Callbacks that look at how fast a run is."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import collections
import os
import time
import weakref
from typing import Any

import jax

from torch_shard._common.caller import caller
from torch_shard._common.validate import check_count, check_directory
from torch_shard._fit.callbacks import Callback, Run


class Profile(Callback):
    """Trace some steps with JAX's profiler, for TensorBoard or Perfetto.

    Args:
        directory: Where the trace goes.
        start: The batch before the first that is traced; not the first, which compiles.
        num_steps: How many steps are traced.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> import tempfile, torch_shard as ts
        >>> profile = ts.Profile(tempfile.mkdtemp(), start=10, num_steps=3)
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int = 10, num_steps: int = 5) -> None:
        self._directory = check_directory("directory", directory)
        check_count("start", start)
        check_count("num_steps", num_steps)
        self._start, self._left, self._is_on = start, num_steps, False

    def on_step(self, run: Run) -> None:
        """Begin and end the trace.

        Args:
            run: The run.
        """
        if self._is_on:
            self._left -= 1
            if not self._left:
                self._end(run)
        elif self._left and run.position >= self._start:
            jax.block_until_ready(run.metrics)
            jax.profiler.start_trace(str(self._directory))
            self._is_on = True

    def on_end(self, run: Run) -> None:
        """End a trace that is on.

        Args:
            run: The run.
        """
        if self._is_on:
            self._end(run)

    def _end(self, run: Run) -> None:
        jax.block_until_ready(run.metrics)
        jax.profiler.stop_trace()
        self._is_on, self._left = False, 0


class Utilization(Callback):
    """Log the model-flops utilization: flops of the step's products, per second, over what the devices can do.

    What `remat` computes again counts too. A chip's peak is in its data sheet: 197e12 for TPU v5e in bfloat16, 989e12
    for an H100.

    Args:
        peak_flops: Of one device, per second.
        every: Batches from one record to the next. Each waits for its batch.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> import torch_shard as ts
        >>> utilization = ts.Utilization(peak_flops=197e12)
    """

    def __init__(self, peak_flops: float, *, every: int = 100) -> None:
        check_count("every", every)
        if not peak_flops > 0:
            raise ValueError(f"{caller()}: peak_flops must be positive, got {peak_flops!r}.")
        self._peak, self._every = peak_flops, every
        self._since: float | None = None
        self._taken: collections.Counter[Any] = collections.Counter()  # steps since
        self._flops: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # of one step

    def on_step(self, run: Run) -> None:
        """Log it when it is due.

        Args:
            run: The run.
        """
        self._taken[run.step.programs[-1]] += 1  # another one for each shape of a batch
        if run.position % self._every:
            return
        jax.block_until_ready(run.metrics)
        now = time.perf_counter()
        if self._since is not None:
            self._flops |= {program: program.num_flops for program in self._taken if program not in self._flops}
            flops = sum(num * self._flops[program] for program, num in self._taken.items())
            run.log(mfu=flops / (now - self._since) / self._peak)
        self._taken.clear()
        self._since = time.perf_counter()
