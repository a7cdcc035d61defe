"""Reports of a run while it trains: a bar, metrics.jsonl and TensorBoard; and metrics of all predictions."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from torch_shard._common.printed import replacing
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call
from torch_shard._device import gather
from torch_shard._state import TrainState
from torch_shard._train import ApplyStep, ShardedBatch, TrainStep

METRICS = "metrics.jsonl"

_LINE_EVERY_S = 10.0


class MetricsLog:
    """A directory with `metrics.jsonl` and TensorBoard's event files, to which a run adds as it goes.

    Args:
        directory: Made if it is missing.
        start: The number of batches that the run has seen. What was written about later ones, by a run that did not
            come to save them, is taken back.
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int) -> None:
        from tensorboardX import SummaryWriter  # takes a second to import

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / METRICS
        records = read_metrics(path) if path.exists() else []
        kept = [record for record in records if record["batch"] <= start]
        with replacing(path) as partial:
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self._lines = path.open("a", encoding="utf-8")
        # A name of its own: by default it is that of the second, and a file of the same second is written over.
        suffix = f".{time.time_ns()}"
        self._events = SummaryWriter(str(self.directory), purge_step=start + 1, filename_suffix=suffix)

    def write(self, kind: str, batch: int, numbers: Mapping[str, object]) -> None:
        """Add a record.

        Args:
            kind: `train` or `eval`.
            batch: The number of batches that the run has seen.
            numbers: By name; scalars, the only ones that TensorBoard gets, or nested lists.
        """
        self._lines.write(json.dumps({"kind": kind, "batch": batch, **numbers}) + "\n")
        self._lines.flush()
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, batch)

    def write_text(self, name: str, text: str, batch: int) -> None:
        """Add a text, to TensorBoard alone."""
        self._events.add_text(name, text, batch)

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()
        self._events.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`; a last line that was not written to its end, as by a killed process, is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def scalars(metrics: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Loss and those metrics that are single numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, jax.Array) and value.ndim == 0}


def _amount(placed: ShardedBatch) -> tuple[str, int]:
    """Size and unit of a batch: tokens, if its first leaf is integers of at least two dims, else samples."""
    first = next((array for array in placed.arrays if array.ndim), None)
    if first is not None and first.ndim > 1 and np.issubdtype(first.dtype, np.integer):
        return "tokens", first.size
    return "samples", placed.num_rows


class Bar:
    """A progress bar with the latest numbers, within a `with`; where there is no terminal, a line every ten seconds."""

    def __init__(self, show: bool | Console, start: int, steps: int) -> None:
        whole = Column(no_wrap=True)
        columns = (
            TextColumn("{task.description}", table_column=whole),
            BarColumn(None, table_column=Column(ratio=1, min_width=4, max_width=30)),
            MofNCompleteColumn(table_column=whole),
            TextColumn("{task.fields[numbers]}", table_column=whole),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=whole),
        )
        self._console = show if isinstance(show, Console) else Console()
        is_live = self._console.is_terminal or self._console.is_jupyter
        self._lines, self._said, self._start, self._steps = show is not False and not is_live, -math.inf, start, steps
        self._progress = Progress(*columns, console=self._console, disable=show is False or not is_live)
        self._task = self._progress.add_task("compiling", total=steps, completed=start, numbers="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        if self._lines:
            begun = f"goes on from batch {self._start:,} of" if self._start else "begins,"
            self._console.print(f"fit: {begun} {self._steps:,} batches", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, position: int, numbers: Mapping[str, float], *, is_evaluated: bool) -> None:
        """Show where the run stands; a line has the numbers of an evaluation only where that is of this position."""
        shown = "  ".join(_brief(name, value) for name, value in numbers.items())
        self._progress.update(self._task, completed=position, description="training", numbers=shown)
        now = time.perf_counter()
        if self._lines and (now - self._said >= _LINE_EVERY_S or is_evaluated or position == self._steps):
            self._said = now
            of_now = ((n, value) for n, value in numbers.items() if is_evaluated or not n.startswith("eval_"))
            shown = "  ".join(_brief(name, value) for name, value in of_now)
            self._console.print(f"fit: {position:,} of {self._steps:,}  {shown}", highlight=False, soft_wrap=True)


def _brief(name: str, value: float) -> str:
    unit = name.removesuffix("_per_s")
    return f"{value:,.0f} {unit}/s" if unit != name else f"{name} {value:.4g}"


class Reports:
    """Reports the metrics of each batch once they are computed.

    Attributes:
        numbers: The latest, by name: of training, and of evaluation with `eval_` before it.
    """

    def __init__(self, bar: Bar, log: MetricsLog | None, log_every: int) -> None:
        self._bar, self._log, self._log_every = bar, log, log_every
        self._pending: tuple[int, ShardedBatch, Mapping[str, PyTree], Mapping[str, float]] | None = None
        self._clock = ThreadPoolExecutor(1)
        self._since = 0, math.nan  # the batch of the last record, and when it was done; not before what compiles is
        self._left_out: list[tuple[float, float]] = []
        self._done: Future[float] | None = None  # when the last batch is
        self.numbers: dict[str, float] = {}

    def expect(
        self, position: int, placed: ShardedBatch, metrics: Mapping[str, PyTree], known: Mapping[str, float]
    ) -> None:
        """Note the metrics of a batch, which may still be computed, and what is known on the host."""
        self._done = self._clock.submit(_time_when_done, metrics["loss"])
        self._pending = position, placed, metrics, known

    def flush(self, *, every: bool = False) -> None:
        """Wait for the noted metrics, and tell of them.

        Args:
            every: Have them in `numbers`, though no record is due.
        """
        if self._pending is None or self._done is None:
            return
        (position, placed, metrics, known), self._pending = self._pending, None
        is_due = position % self._log_every == 0 or position == 1
        if not (is_due or every):
            return
        found = {name: float(value) for name, value in jax.device_get(scalars(metrics)).items()}
        self.numbers |= found | dict(known)
        if not is_due:
            return
        unit, amount = _amount(placed)
        (last, then), now = self._since, self._done.result()
        self._since = position, now
        # What is not over yet was beside this batch: that one is still computed while the next is compiled.
        seconds = now - then - sum(max(end - max(start, then), 0) for start, end in self._left_out if end <= now)
        self._left_out = [(start, end) for start, end in self._left_out if end > now]
        speed = {} if math.isnan(then) else {f"{unit}_per_s": amount * (position - last) / seconds}
        self.numbers |= speed
        more = {n: v for n, v in metrics.items() if n not in found and n != "guard"} if self._log else {}
        lists = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), more)
        self.write("train", position, found | dict(known) | speed | lists)
        self._show(position)

    def write(self, kind: str, position: int, numbers: Mapping[str, object]) -> None:
        """Write down a record: of a batch, an evaluation, or of what was compiled."""
        if self._log is not None:
            self._log.write(kind, position, numbers)

    def _show(self, position: int, *, is_evaluated: bool = False) -> None:
        order = [name for name in self.numbers if name == "loss" or name.startswith("eval_")]
        order += [name for name in self.numbers if name.endswith("_per_s")]
        self._bar.update(position, {name: self.numbers[name] for name in order}, is_evaluated=is_evaluated)

    def add_evaluation(self, position: int, found: Mapping[str, float]) -> None:
        """Tell of an evaluation."""
        self.numbers |= {f"eval_{name}": value for name, value in found.items()}
        self.write("eval", position, found)
        self._show(position, is_evaluated=True)

    def add(self, position: int, numbers: Mapping[str, float]) -> None:
        """Write down more numbers."""
        found = {name: float(value) for name, value in numbers.items()}
        self.numbers |= found
        self.write("train", position, found)

    def add_text(self, position: int, name: str, text: str) -> None:
        """Write down a text."""
        if self._log is not None:
            self._log.write_text(name, text, position)

    @property
    def directory(self) -> Path | None:
        """Where the log is written, if it is."""
        return None if self._log is None else self._log.directory

    def close(self) -> None:
        """Write no more, where that may be what has failed; `numbers` goes on."""
        self._log = None

    @contextlib.contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Leave out of the speed what is done within."""
        start = time.perf_counter()
        try:
            yield
        finally:
            begun = start if self._done is None else max(start, self._done.result())
            self.leave_out(begun, time.perf_counter())

    def leave_out(self, start: float, end: float) -> None:
        """Leave out of the speed a time, in s, in which nothing was trained: an evaluation, a compilation."""
        self._left_out.append((start, end))


def _time_when_done(loss: jax.Array) -> float:
    with contextlib.suppress(Exception):  # which comes up again where the loss is read
        loss.block_until_ready()
    return time.perf_counter()


Compute = Callable[[Any], Mapping[str, Any]]


class _Predict(ApplyStep):
    caller = "fit"


def _gathers(compute: object) -> bool:
    """Tell whether it is an object that takes up batches, as torchmetrics has them, rather than a function."""
    return all(callable(getattr(compute, name, None)) for name in ("update", "compute", "reset"))


class Predictions:
    """What `predict` returns for the batches of an evaluation, and the metrics of all of it.

    Args:
        step: Whose model, mesh and plan.
        predict: `predict(model, batch)`, plain torch.
        compute: A function of all predictions, or an object of torchmetrics.

    Attributes:
        step: It gives them.
    """

    def __init__(self, step: TrainStep, predict: object, compute: object) -> None:
        if predict is None or compute is None:
            raise TypeError(
                "fit: compute_metrics= and predict= go together: predict(model, batch) returns the tensors that "
                "compute_metrics takes, as in predict=lambda model, batch: (model(batch[0]), batch[1])."
            )
        if not _gathers(compute):
            check_call("compute_metrics", compute, "predictions")
        check_call("predict", predict, "model", "batch")
        self.step = _Predict(step.model, cast(Any, predict), step.options.for_evaluation())
        self._compute, self._batches = cast(Any, compute), list[PyTree]()

    def begin(self) -> None:
        """Forget the evaluation before."""
        self._batches = []
        if _gathers(self._compute):
            self._compute.reset()

    def add(self, state: TrainState, batch: ShardedBatch) -> None:
        """Take up those of a batch, as CPU tensors with all its rows; what is in 16 bits as float32."""
        # NumPy and scikit-learn, in which metrics are often written, have no bfloat16. Nothing is lost by it.
        found = jax.tree.map(_widened, gather(self.step(state, batch)))
        if not _gathers(self._compute):
            self._batches.append(found)
        elif isinstance(found, Mapping):
            self._compute.update(**found)
        else:
            self._compute.update(*(found if isinstance(found, tuple | list) else (found,)))

    def metrics(self) -> dict[str, float]:
        """The metrics of all of them."""
        found = self._compute.compute() if _gathers(self._compute) else self._of_all()
        if isinstance(found, torch.Tensor) and _gathers(self._compute):
            found = {type(self._compute).__name__: found}
        if not isinstance(found, Mapping):
            raise TypeError(f"fit: compute_metrics must return a dict of numbers, got {type(found).__name__}.")
        return {str(name): _number(name, value) for name, value in cast(Mapping[Any, Any], found).items()}

    def _of_all(self) -> object:
        """What the function of all predictions returns; an error in it says what it was given."""
        predictions = self._all()
        try:
            return self._compute(predictions)
        except Exception as error:
            tensors = jax.tree.leaves(predictions)
            shown = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            error.add_note(
                f"fit: compute_metrics was given what predict returns, as CPU tensors: {shown}. One that is written "
                "in NumPy, as for transformers.Trainer, begins with logits, labels = (tensor.numpy() for tensor in "
                "predictions)."
            )
            raise

    def _all(self) -> PyTree:
        def joined(*parts: Any) -> torch.Tensor:
            tensors = [torch.atleast_1d(torch.as_tensor(part)) for part in parts]
            for number, tensor in enumerate(tensors):
                if tensor.shape[1:] != tensors[0].shape[1:]:
                    raise ValueError(
                        f"fit: predict gives {tuple(tensors[0].shape)} for the first batch of the evaluation and "
                        f"{tuple(tensor.shape)} for batch {number}, which only rows may tell apart. Pad the batches to "
                        "one length, or give an object of torchmetrics, which takes them one by one."
                    )
            return torch.cat(tensors)

        return jax.tree.map(joined, *self._batches)


def _widened(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if is_narrow else leaf


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f" {value!r}"
        raise TypeError(
            f"fit: compute_metrics must return a number for {name!r}, got {type(value).__name__}{shape}."
        ) from None
