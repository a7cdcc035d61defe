"""Whole models of the hub on whole pods: do they fit, and what does it take to know? Compiled ahead of time, never run.

`python -c "from benchmarks.scale import measure; print(measure('Llama 3 8B on v5e:4x4', quick=True))"` is one alone.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row, chosen
from benchmarks.tpu import host_memory
from benchmarks.tpu_cases import TpuCase, hf_llama, hf_mixtral, next_token_loss, over_both, tokens
from benchmarks.tpu_llama import Llama
from benchmarks.tpu_mixtral import Mixtral
from docs.pages import beside
from docs.pages import table as markdown_table

PAGE = """
## Whole models on whole pods

Models of the hub as they are, on the meta device, each matrix split over both axes of the mesh (FSDP and tensor
parallel; the residual stream over time), float32 parameters, AdamW. The ratio is the memory that a step needs of one
device over what it has.
"""


def markdown(found: list[Row], page: Path) -> str:
    """A short table, and a file of all figures beside the page."""
    rows = [(row.name, row.note.partition(";")[0], row.ours, row.rival, f"{row.ratio or 0:.3g}") for row in found]
    whole = [(*cells, row.note.partition("; ")[2]) for cells, row in zip(rows, found, strict=True)]
    head = ("", "remat", "needed", "of", "ratio")
    return f"{markdown_table(head, rows)}\n\n{beside(page, 'scale', (*head, 'what else it takes'), whole)}."


LLAMA = {
    "8B": Llama(layers=32),
    "70B": Llama(layers=80, width=8192, hidden=28672, heads=64),
    "405B": Llama(layers=126, width=16384, hidden=53248, heads=128),
}
MIXTRAL = Mixtral(layers=32, width=4096, hidden=14336, heads=32, kv_heads=8)
WITHIN = "memory"
"""As `remat`: whatever fits into the device and computes the least again, `make_train_step(remat=<bytes>)`."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A model on a pod.

    Attributes:
        sizes: Of the model.
        axes: Of the mesh: `batch` and `model`.
        batch: Rows and length.
        remat: As `make_train_step` takes it, or `WITHIN`.
    """

    sizes: Llama
    axes: tuple[int, int]
    batch: tuple[int, int]
    remat: str = "block"


MACHINES = {
    "Llama 3 8B on v5e:16x16": Scale(LLAMA["8B"], (64, 4), (256, 2048), WITHIN),
    "Llama 3 8B on v5e:4x4": Scale(LLAMA["8B"], (4, 4), (16, 2048)),
    "Llama 3 70B on v5p:8x8x8": Scale(LLAMA["70B"], (64, 8), (64, 4096)),
    "Llama 3 405B on v6e:16x16": Scale(LLAMA["405B"], (32, 8), (32, 4096)),
    "Llama 3 405B on v5p:8x8x8": Scale(LLAMA["405B"], (64, 8), (64, 4096)),
    "Mixtral 8x7B on v5e:16x16": Scale(MIXTRAL, (32, 8), (64, 2048)),
}


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Bytes of one device over those that it has, for each model and machine."""
    for name in chosen(names, list(MACHINES)):
        scale = MACHINES[name]
        title = f"{name}, {scale.axes}, {scale.batch[0]} x {scale.batch[1]} tokens"
        try:
            found = isolated("benchmarks.scale:measure", name=name, quick=quick)
        except Failed as error:
            yield Row(title, note=f"failed: {str(error)[-300:]}")
            continue
        needed, limit = found["needed"], found["limit"]
        short = "" if needed <= limit else f"{(needed - limit) / 2**30:.3g} GiB too much; "
        took = f"compiled in {found['seconds']:.0f} s, {found['host_memory'] / 2**30:.2g} GiB of host memory"
        sizes = [f"{size / 2**30:.4g} GiB" for size in (needed, limit)]
        yield Row(title, *sizes, needed / limit, target=1.0, note=f"{short}{found['remat']}; {found['cost']}; {took}")


def case_of(name: str, quick: bool) -> TpuCase:
    """The model, unmodified, with each matrix over both axes; tiny if quick."""
    scale, topology = MACHINES[name], name.split()[-1]
    make: Callable[[Any], nn.Module] = hf_mixtral if isinstance(scale.sizes, Mixtral) else hf_llama
    rows, length = scale.batch
    sizes = scale.sizes
    if quick:
        heads = scale.axes[1] * 2
        small = {"layers": 4, "width": 128 * heads, "hidden": 64 * scale.axes[0], "heads": heads, "vocab": 2048}
        sizes, length = dataclasses.replace(sizes, **small), 256
    return TpuCase(
        name,
        topology,
        dict(zip(("batch", "model"), scale.axes, strict=True)),
        lambda: make(sizes),
        next_token_loss,
        tokens(rows, length),
        over_both,
    )


def measure(name: str, quick: bool) -> dict[str, Any]:
    """What the step needs of one device, and what it took to know, in this process."""
    from torch_shard._sharding import memory_of

    case, remat, start = case_of(name, quick), MACHINES[name].remat, time.perf_counter()
    limit = memory_of(case.mesh.devices.flat[0]) or 0
    case = dataclasses.replace(case, options={"remat": limit if remat == WITHIN else remat})
    step = case.step()
    preview = step.preview(case.batch)
    chosen = [line for line in step.report().splitlines() if line.startswith("remat=")]
    cost = f"{preview.cycles / 1e6:.4g} Mcycles, {preview.collective_bytes / 2**30:.3g} GiB received"
    return {
        "needed": preview.memory.peak,
        "limit": limit,
        "remat": f"remat={limit} chose {chosen[0].split()[0]}" if chosen else f"remat={remat!r}",
        "cost": "FSDP and tensor parallel" + (f", {cost}" if preview.compiled is not None else ""),
        "seconds": time.perf_counter() - start,
        "host_memory": host_memory(),
    }
