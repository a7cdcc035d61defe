"""Steps that others have timed on TPUs, by our estimate: each as its source ran it, for its machine, never run.

`python -m benchmarks --only published --models "llama fsdp"` measures one row. The counts of each stand in
`tpu_kept.json`, so that `python -m benchmarks --kept benchmarks/tpu_kept.json --page docs/tpu.md` compiles nothing.

A chip has one free number: how much longer than estimated its steps take, the geometric mean over its rows of known
settings.
"""

import atexit
import dataclasses
import json
import math
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.processes import Failed, isolated
from benchmarks.published_cases import PUBLISHED, Published
from benchmarks.rows import Row, chosen
from benchmarks.tpu_counts import Counts, counts_of_text
from docs.pages import beside
from docs.pages import table as markdown_table
from torch_shard._cost.chips import CHIPS

PAGE = """## Against steps that others timed

The only evidence on this page that others timed. Each step is built as its source ran it (sizes, mesh, batch, remat,
attention kernel, optimizer, flags), optimized by XLA:TPU for its machine, and never run. Predicted is what the chip
needs at its peak for each instruction of that program, the larger of arithmetic and memory; kernels at 45 % of what
heads of their width can reach; and what is waited for of communication, at the published speed of the links that a
group of chips has; or its transfers to and from the host, at the speed of their link, if these take longer. No code is
generated, so that the compiler's own cycles, of the other tables, are not in it.

MaxText publishes a part of the peak, of which seconds are made by its formula. v5p has one row, whose ratio is 1.

`python -m benchmarks --only published` measures it, half a minute of a core a row.
"""

SECONDS = 600
"""Of a core, for one row."""

KEPT = ("cycles", "kernel_cycles", "exposed", "wire", "traffic", "flops", "host")
"""Counts of a row, in its note."""


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Predicted seconds, without the free number, over published ones; the note has the counts."""
    for name in chosen(names, list(PUBLISHED)):
        case = PUBLISHED[name]
        os.environ["LIBTPU_INIT_ARGS"] = case.flags
        try:
            found = isolated("benchmarks.published:measure", name=name, quick=quick)
        except Failed as error:
            found = {"refused": f"failed: {str(error)[-300:]}"}
        if "refused" in found:
            yield Row(name, note=found["refused"])
        else:
            yield row_of(case, name, Counts(**found))


def row_of(case: Published, name: str, counts: Counts) -> Row:
    """What counts predict."""
    chip = CHIPS[case.chip]
    seconds = max(counts.time / (chip.clock or math.nan), counts.host / (chip.host_link or math.inf))
    note = json.dumps({name: float(f"{getattr(counts, name):.8g}") for name in KEPT})
    return Row(name, f"{seconds:.4g} s", f"{case.seconds:.4g} s", seconds / case.seconds, note=note)


def measure(name: str, quick: bool) -> dict[str, Any]:
    """The counts of a row, in this process, which ends after `SECONDS` of a core, or when its counts are known."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 60))
    case, start = PUBLISHED[name].build(quick), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_long_text"  # read with the first program
        step = case.step()
        text = optimized(step.lower(step.structs, case.batch), Path(folder))
    took = time.perf_counter() - start
    return dataclasses.asdict(dataclasses.replace(counts_of_text(text, case.mesh), compile_s=took))


def optimized(lowered: jax.stages.Lowered, folder: Path) -> str:
    """The program as XLA:TPU has scheduled it, before code is generated, which takes most of the time and is not done.

    Args:
        lowered: The step.
        folder: Into which XLA writes what it makes of it.
    """
    atexit.register(os._exit, 0)  # or this process would end with the thread
    errors: list[BaseException] = []
    compiling = threading.Thread(target=_compile, args=(lowered, errors), daemon=True)
    compiling.start()
    while not errors and not (last := list(folder.glob("*train_step*.after_optimizations-live-range.txt"))):
        time.sleep(0.2)
    compiling.join(5)  # what does not fit is refused right after it was written
    if errors:
        raise errors[0]
    return last[0].with_name(last[0].name.replace("-live-range", "")).read_text()


def _compile(lowered: jax.stages.Lowered, errors: list[BaseException]) -> None:
    try:
        lowered.compile()
    except BaseException as error:
        errors.append(error)


def factors(found: Iterable[Row]) -> Mapping[str, float]:
    """The free number of each chip: published over predicted, the geometric mean of its rows."""
    logs: dict[str, list[float]] = {}
    for row in found:
        if row.ratio is not None and PUBLISHED[row.name].is_known:
            logs.setdefault(PUBLISHED[row.name].chip, []).append(-math.log(row.ratio))
    return {chip: math.exp(sum(own) / len(own)) for chip, own in logs.items()}


def markdown(found: list[Row], page: Path) -> str:
    """A short table, and a file of all figures beside the page."""
    free, measured = factors(found), [row for row in found if row.ratio is not None]
    lines = [
        (
            f"[{case.title}]({case.source})",
            row.rival,
            f"{case.seconds * free[case.chip] * (row.ratio or 0):.3g} s",
            f"{free[case.chip] * (row.ratio or 0):.2f}",
            case.unlike,
        )
        for row in measured
        for case in (PUBLISHED[row.name],)
    ]
    said = ", ".join(f"{value:.2f} for {chip}" for chip, value in free.items())
    whole = [(row.name, row.ours, row.rival, *(f"{json.loads(row.note)[n]:g}" for n in KEPT)) for row in measured]
    table = markdown_table(("", "published", "predicted", "ratio", "unlike the source"), lines)
    kept = beside(page, "published", ("", "without the free number", "published", *KEPT), whole)
    return f"{table}\n\nThe free number is {said}. {kept}."
