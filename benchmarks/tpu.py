"""Our step against hand-written JAX under TPU's own compiler, ahead of time: counted, not timed, so without noise.

Each side of a case is compiled in a process of its own, one after the other. One side of one case alone, with its
sizes in bytes: `python -c "from benchmarks.tpu import measure; print(measure('ours', 'llama block', quick=True))"`;
a rival is named `layers in a loop` or `layers one by one`.
"""

import dataclasses
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row, chosen
from benchmarks.tpu_cases import CASES, OPTIONS, OURS, find
from benchmarks.tpu_counts import Counts, counts_of

PAGE = """## Against hand-written JAX

One step: float32 parameters, bfloat16 arithmetic. The rivals are written by hand for the case, in
`benchmarks/tpu_*.py`: collectives placed one by one in `jax.shard_map`, JAX's own Pallas kernels, the residual stream
split over time, the vocabulary split in the loss. Ours is the hub's model as it is, and `make_train_step` with
`compute_dtype=torch.bfloat16`, `remat` as the row says, and no other option. Numbers are ours over the rival's; below
1 is better. Cycles are the compiler's estimates, without communication; kernels carry none, and are taken to run at
45 % of the chip's peak. *With waiting* adds what the schedule does not hide of communication, at the published speed
of the links. *Received* is from other devices. *Temporaries* are bytes beside the state and the batch. *Compiled in*
is of the seconds of a core, tracing included, of both sides in turn; other work on the machine makes them two to four
times as long, and moves their ratio: it once put ViT at 2.32. Llama with remat=none takes longer: its program gathers
weights once more for the backward pass, where the rival keeps them, and so has 76 all-gathers for 48. All tables from
here on, but for GPT-2 124M, Whisper, ResNets, gpt-oss, Llama 3.2 3B and what was held out of Qwen3-MoE, were made
before two changes that the table above has: heads narrower than the matrix unit count as slower, and a chip at the end
of an axis has one link along it, not two.

Cycles of models with experts are those of balanced routing, on both sides. Qwen3-MoE, gpt-oss and Mixtral are split
by `ts.plans.expert(tp="model")`, ViT by `ts.plans.fsdp_tp`; their rivals have the same layout. Steps leave
collectives whole: XLA's cut products (`xla_jf_spmd_threshold_for_windowed_einsum_mib`, set in `LIBTPU_INIT_ARGS`)
took 7 % more cycles and a third more memory traffic for Llama.
"""

QUANTITIES = {
    "cycles": (1e6, "Mcycles"),
    "time": (1e6, "Mcycles"),
    "wire": (2**30, "GiB"),
    "temporaries": (2**30, "GiB"),
    "traffic": (2**30, "GiB"),
}
TITLES = {"time": "with waiting", "wire": "received", "traffic": "memory traffic"}


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Every case."""
    for name in chosen(names, list(CASES)):
        yield from case_rows(name, quick)


def case_rows(name: str, quick: bool) -> Iterator[Row]:
    """Ours over each rival's; what does not fit has no counts."""
    case = find(name, quick)
    ours = side_counts(OURS, name, quick)
    for rival in case.rivals:
        is_first = rival == next(iter(case.rivals))
        theirs = side_counts(rival, name, quick)
        yield from compared(f"{case.name}: ours ÷ {rival}", ours, theirs, case.targets if is_first else {})


def compared(title: str, ours: Counts | str, theirs: Counts | str, targets: dict[str, float]) -> Iterator[Row]:
    """Each quantity of two sides, or why there is none."""
    if isinstance(theirs, str):
        yield Row(f"{title}: rival", note=theirs)
    elif isinstance(ours, str):
        yield Row(f"{title}: ours", note=ours)
        yield from (Row(f"{title}: {TITLES.get(q, q)}", rival=_text(theirs, q)) for q in QUANTITIES)
    else:
        yield from _pair(title, ours, theirs, targets)


def side_counts(side: str, name: str, quick: bool) -> Counts | str:
    """Its counts, from a process of its own, or why there are none."""
    try:
        found = isolated("benchmarks.tpu:measure", side=side, name=name, quick=quick)
    except Failed as error:
        return f"failed: {str(error)[-300:]}"
    return found["refused"] if "refused" in found else Counts(**found)


def _pair(title: str, ours: Counts, rival: Counts, targets: dict[str, float]) -> Iterator[Row]:
    """Each quantity, and what both took to be compiled."""
    for quantity in QUANTITIES:
        mine, theirs = (getattr(side, quantity) for side in (ours, rival))
        texts, kernels = (_text(ours, quantity), _text(rival, quantity)), [s.kernel_cycles / 1e6 for s in (ours, rival)]
        note = f"estimated for kernels: {kernels[0]:.3g} and {kernels[1]:.3g}" if quantity == "cycles" else ""
        ratio = float(f"{mine / theirs:.3g}") if theirs else None  # a scalar's bytes are none
        yield Row(f"{title}: {TITLES.get(quantity, quantity)}", *texts, ratio, target=targets.get(quantity), note=note)
    took = [f"{side.compile_s:.0f} s, {side.host_memory / 2**30:.2g} GiB of host memory" for side in (ours, rival)]
    yield Row(f"{title}: compiled in", *took, ours.compile_s / rival.compile_s)


def _text(side: Counts, quantity: str) -> str:
    unit, word = QUANTITIES[quantity]
    return f"{getattr(side, quantity) / unit:.4g} {word}"


def measure(side: str, name: str, quick: bool) -> dict[str, Any]:
    """The counts of ours or a rival, in this process; where it does not fit, what the compiler says."""
    case, start = find(name, quick), time.process_time()
    step = case.step(side) if side in OPTIONS else None
    lowered = case.rival_lowered(side) if step is None else step.lower(step.structs, case.batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error)[:300]}
    counts = counts_of(compiled, case.mesh, used=1.0 if side in OPTIONS else case.used)
    took = time.process_time() - start
    return dataclasses.asdict(dataclasses.replace(counts, compile_s=took, host_memory=host_memory()))


def host_memory() -> float:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
