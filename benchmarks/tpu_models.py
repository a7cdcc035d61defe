"""Models of the hub by default under TPU's own compiler, beside what the arithmetic and the memory of a chip allow.

Each is compiled in a process of its own, which has twelve minutes of a core (six on two), so that a busy machine gives
up no earlier than an idle one. One alone: `python -m benchmarks --only tpu_models --models vit`.
"""

import dataclasses
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row, chosen
from benchmarks.tpu import host_memory
from benchmarks.tpu_counts import BYTES_PER_CYCLE, FLOPS_PER_CYCLE, Counts, counts_of
from benchmarks.tpu_zoo import ZOO
from docs.pages import beside
from docs.pages import table as markdown_table

PAGE = """
## Models of the hub, by default

Each as it is, by `ts.plans.fsdp_tp` over batch=4, model=2 of a v5e:2x4 (2 and 2 of a v5e:2x2: Gemma, NeoX, CLIP,
Whisper, T5, DiT), by `fsdp` (ConvNeXt, Swin, LSTM), or data parallel (ResNet-50, GPT-2), with
`compute_dtype=torch.bfloat16` and no other option. How many layers stands in brackets. The limit is what the chip
needs at its peak: the larger of the products' arithmetic and of the memory traffic of the compiled program. The
textbook is that of `benchmarks --only communication`, in bfloat16.
"""

SECONDS = 720
"""Of a core, for one model."""


@dataclasses.dataclass(frozen=True)
class Before:
    """Figures of November's first survey.

    Attributes:
        cycles: Millions, with those of kernels.
        ratio: Over the limit.
        temporaries: GiB.
        wire: GiB received.
    """

    cycles: float
    ratio: float | None = None
    temporaries: float | None = None
    wire: float | None = None


BEFORE = {
    "llama": Before(250, 1.9, 3.8, 4.16),
    "gemma3": Before(249, 2.1, 6.7, 2.30),
    "phi3": Before(129, 2.6, 2.2, 1.86),
    "neox": Before(61, 2.4, 1.2, 0.57),
    "bert": Before(67, 4.8, 1.3, 0.48),
    "vit": Before(42, 2.9, 1.3, 0.76),
    "clip": Before(16, 5.3, 0.4, 0.29),
    "whisper": Before(46, 3.5, 1.4, 0.68),
    "mamba2": Before(134, 1.7, 4.0, 2.45),
    "qwen": Before(344, 6.9, 8.9, 12.6),
    "gpt-oss": Before(2237, 48, 10.6, 14.1),
    "convnext": Before(37, 7.3, 0.8, 0.05),
    "resnet": Before(140),
    "gpt2": Before(146),
}
NEVER = {"t5", "lstm", "swin", "dit"}
"""That did not compile before."""


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Four of each model; quick, of one that is small."""
    for name in chosen(names, list(ZOO)) if names or not quick else ["convnext"]:
        try:
            found = isolated("benchmarks.tpu_models:measure", name=name)
        except Failed as error:
            is_late = "exit status -24" in str(error)
            why = f"not compiled in {SECONDS / 60:g} minutes of a core" if is_late else f"failed: {str(error)[-200:]}"
            yield Row(f"{name}: cycles", note=why)
            continue
        if "refused" in found:
            yield Row(f"{name}: cycles", note=found["refused"])
        else:
            yield from _rows(name, found["title"], Counts(**found["counts"]), found["textbook"])


def _rows(name: str, title: str, counts: Counts, textbook: float | None) -> Iterator[Row]:
    products = counts.cycles - counts.kernel_cycles
    cycles = f"{products / 1e6:.0f}" + f" + {counts.kernel_cycles / 1e6:.0f}" * (counts.kernel_cycles > 5e5)
    limit = max(counts.flops / FLOPS_PER_CYCLE, counts.traffic / BYTES_PER_CYCLE)
    yield Row(f"{name}: cycles", cycles, f"{limit / 1e6:.0f}", counts.cycles / limit, note=title)
    yield Row(f"{name}: waiting", f"{counts.exposed / 1e6:.0f}")
    yield Row(f"{name}: temporaries", f"{counts.temporaries / 2**30:.2g}")
    sent = "" if textbook is None else f"{textbook / 2**30:.3g}"
    yield Row(f"{name}: received", f"{counts.wire / 2**30:.3g}", sent, counts.wire / textbook if textbook else None)
    yield Row(f"{name}: seconds of a core to compile", f"{counts.compile_s:.0f}")


def measure(name: str) -> dict[str, Any]:
    """The counts of a model, its title and its textbook, in this process; it ends after `SECONDS`."""
    import jax

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 60))
    zoo = ZOO[name]()
    step = zoo.case.step()
    try:
        compiled = step.lower(step.structs, zoo.case.batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error)[:200]}
    counts = dataclasses.replace(
        counts_of(compiled, zoo.case.mesh), compile_s=time.process_time(), host_memory=host_memory()
    )
    return {"counts": dataclasses.asdict(counts), "title": zoo.case.name, "textbook": zoo.textbook()}


def markdown(found: list[Row], page: Path) -> str:
    """A short table of ratios, and a file of all figures beside the page."""
    of: dict[str, dict[str, Row]] = {}
    for row in found:
        name, _, quantity = row.name.partition(": ")
        of.setdefault(name, {})[quantity] = row
    short = ["", "cycles ÷ limit", "received ÷ textbook"]
    more = ["", "Mcycles + kernels", "before", "limit", "waiting", "temporaries, GiB", "before"]
    more += ["received, GiB", "before", "seconds of a core to compile"]
    ratios = markdown_table(short, [_short(name, own) for name, own in of.items()])
    figures = beside(page, "tpu_models", more, [_long(name, own) for name, own in of.items()])
    return f"{ratios}\n\n{figures}, with the figures of a survey of November 2026, *before*."


def _short(name: str, own: dict[str, Row]) -> list[str]:
    cycles = own["cycles"]
    if cycles.ratio is None:
        return [name, cycles.note, ""]
    return [cycles.note, _said(cycles.ratio), _said(own["received"].ratio)]


def _long(name: str, own: dict[str, Row]) -> list[str]:
    cycles, before = own["cycles"], BEFORE.get(name, Before(0))
    texts = {quantity: row.ours for quantity, row in own.items()}
    title = cycles.note if cycles.ratio is not None else name
    line = [title, cycles.ours, f"{before.cycles:g}" if before.cycles else _never(name), cycles.rival]
    line += [texts.get("waiting", ""), texts.get("temporaries", ""), _said(before.temporaries)]
    return [*line, texts.get("received", ""), _said(before.wire), texts.get("seconds of a core to compile", "")]


def _said(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}"


def _never(name: str) -> str:
    return "not compiled" if name in NEVER else ""
