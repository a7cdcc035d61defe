"""Our step against hand-written JAX under TPU's own compiler, ahead of time: counted, not timed, so without noise.

Each side of a case is compiled in a process of its own, one after the other. One side of one case alone, with its
sizes in bytes: `python -c "from benchmarks.tpu import measure; print(measure('ours', 'llama block', quick=True))"`.
"""

import dataclasses
import resource
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row
from benchmarks.tpu_cases import CASES, find
from benchmarks.tpu_counts import Counts, counts_of

PAGE = """# Under TPU's compiler

Steps compiled ahead of time by XLA:TPU, which needs no TPU, and counted: nothing is timed but the compilation, so the
numbers are the same on every machine. `python -m benchmarks --only tpu,scale --page docs/tpu.md` makes this page.

## Against hand-written JAX

One device, one step: float32 parameters, bfloat16 arithmetic. The rivals are written by hand for the case, in
`benchmarks/tpu_*.py`: collectives placed one by one in `jax.shard_map`, JAX's own Pallas kernels for attention and for
grouped products, the residual stream split over time, the vocabulary split in the loss. Ours is the hub's model as it
is, and `make_train_step`. Cycles are the compiler's estimates, without communication; kernels carry none, and are taken
to run at 45 % of the chip's peak. *Received* is from other devices. *Temporaries* are what is held beside the state and
the batch.
"""

QUANTITIES = {
    "cycles": (1e6, "Mcycles"),
    "wire": (2**30, "GiB"),
    "temporaries": (2**30, "GiB"),
    "traffic": (2**30, "GiB"),
}
TITLES = {"wire": "received", "traffic": "memory traffic"}


def rows(quick: bool) -> Iterator[Row]:
    """Every case."""
    for name in CASES:
        yield from case_rows(name, quick)


def case_rows(name: str, quick: bool) -> Iterator[Row]:
    """Ours over the rival's, each quantity, and what both took to be compiled."""
    case, found = find(name, quick), dict[str, Any]()
    for side in ("ours", "rival"):
        try:
            found[side] = isolated("benchmarks.tpu:measure", side=side, name=name, quick=quick)
        except Failed as error:
            yield Row(f"{case.name}: {side}", note=f"failed: {str(error)[-300:]}")
            return
    if refused := found["ours"].pop("refused", ""):
        yield Row(f"{case.name}: ours", note=refused)
        return
    ours, rival = (Counts(**found[side]) for side in ("ours", "rival"))
    for quantity, (unit, word) in QUANTITIES.items():
        mine, theirs = (getattr(side, quantity) for side in (ours, rival))
        note = ""
        if quantity == "cycles" and (ours.kernel_cycles or rival.kernel_cycles):
            note = (
                f"of these, estimated for kernels: {ours.kernel_cycles / unit:.3g} and {rival.kernel_cycles / unit:.3g}"
            )
        texts = [f"{value / unit:.4g} {word}" for value in (mine, theirs)]
        yield Row(
            f"{case.name}: {TITLES.get(quantity, quantity)}",
            *texts,
            mine / theirs if theirs else None,
            target=case.targets.get(quantity),
            note=note,
        )
    took = [f"{side.compile_s:.0f} s, {side.host_memory / 2**30:.2g} GiB of host memory" for side in (ours, rival)]
    yield Row(f"{case.name}: compiled in", *took, ours.compile_s / rival.compile_s)


def measure(side: str, name: str, quick: bool) -> dict[str, Any]:
    """The counts of one side, in this process; of ours, where it does not fit, what the compiler says."""
    case, start = find(name, quick), time.perf_counter()
    if side == "ours":
        preview = case.step().preview(case.batch)
        if preview.compiled is None:
            return {"refused": preview.refused}
        compiled = preview.compiled
    else:
        compiled = case.rival_lowered().compile()
    counts = counts_of(compiled)
    took = time.perf_counter() - start
    return dataclasses.asdict(dataclasses.replace(counts, compile_s=took, host_memory=host_memory()))


def host_memory() -> float:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
