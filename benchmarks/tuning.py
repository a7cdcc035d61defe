"""`ts.tune` on whole models and pods, against choices by hand: `python -m benchmarks --only tuning`.

Each model has a process and a cache of its own, so that a run may be interrupted and goes on where it was. One alone,
for so many minutes: `python -m benchmarks.tuning "GPT-2 on v5e:2x4" 30`; the tables of what the caches know, as a page:
`python -m benchmarks.tuning page docs/tpu.md`.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optax
import torch
from torch import nn

import torch_shard as ts
from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row
from benchmarks.scale import LLAMA, MIXTRAL
from benchmarks.tpu_cases import class_loss, hf_gpt, hf_llama, hf_mixtral, hf_resnet, next_token_loss, tokens
from benchmarks.tpu_gpt import Gpt
from benchmarks.tpu_resnet import ResNet
from docs.pages import beside, put, table
from torch_shard._tune.cache import Measured
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.search import Search
from torch_shard._tune.tuning import GIB

PAGE = """
## Tuned before there is a pod

What `ts.tune` finds, over the fastest of some choices by hand and over the recipe `fsdp`; see docs/tpu.md.
"""

CACHES = Path(os.environ.get("TORCH_SHARD_TUNED", "benchmarks-out/tuned"))
BETTER_THAN_FSDP = 1.15


@dataclasses.dataclass(frozen=True)
class TuningCase:
    """A model on a pod.

    Attributes:
        model: On the meta device.
        loss_fn: In torch.
        batch: On the meta device.
        topology: Of the pod.
        by_hand: The choices of an engineer who knows the field.
        optimizer: Of optax.
    """

    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batch: Any
    topology: str
    by_hand: tuple[Candidate, ...]
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-4))

    def search(self, directory: Path | None = None, deadline: float = math.inf) -> Search:
        """What `ts.tune` makes of it."""
        devices = sorted(ts.make_mesh(topology=self.topology, batch=-1).devices.flat, key=lambda device: device.id)
        model = self.model()
        make = functools.partial(ts.make_train_step, model, self.loss_fn, self.optimizer)
        options = {"compute_dtype": torch.bfloat16}
        where = {"directory": directory, "deadline": deadline}
        return Search(make, model, self.batch, devices=devices, options=options, **where)


def data(num: int, recipe: str, **how: Any) -> Candidate:
    """Rows over all devices."""
    return Candidate((("batch", num),), recipe, **how)


def both(batch: int, model: int, recipe: str, **how: Any) -> Candidate:
    """Rows and features."""
    return Candidate((("batch", batch), ("model", model)), recipe, **how)


def hybrid(replica: int, batch: int, recipe: str, **how: Any) -> Candidate:
    """FSDP within groups."""
    return Candidate((("replica", replica), ("batch", batch)), recipe, **how)


def _large(num: int, widths: tuple[int, int, int], recipe: str) -> tuple[Candidate, ...]:
    """FSDP, hybrids, and FSDP with tensor parallelism of three widths; computing layers again, or products kept."""
    small, middle, wide = widths
    other = "fsdp_tp" if recipe == "fsdp_tp(sequence)" else "expert"
    return (
        data(num, "fsdp", remat="block"),
        data(num, "fsdp", remat="dots"),
        data(num, "fsdp"),
        hybrid(2, num // 2, "hsdp", remat="block"),
        hybrid(num // 32, 32, "hsdp", remat="block"),
        both(num // small, small, recipe, remat="block"),
        both(num // middle, middle, recipe, remat="block"),
        both(num // wide, wide, recipe, remat="block"),
        both(num // middle, middle, recipe, remat="dots"),
        both(num // small, small, recipe),
        both(num // middle, middle, other, remat="block"),
    )


def _small(num: int) -> tuple[Candidate, ...]:
    """Data parallel, ZeRO-1, FSDP and hybrids, layers in loops or one by one; tensor parallel by two."""
    half, one_by_one = num // 2, {"scan_layers": False, "in_loops": False}
    return (
        data(num, "replicated", **one_by_one),
        data(num, "replicated", scan_layers=True),
        data(num, "replicated + ZeRO-1", **one_by_one),
        data(num, "replicated + ZeRO-1", scan_layers=True),
        data(num, "fsdp", **one_by_one),
        data(num, "fsdp", scan_layers=True),
        data(num, "fsdp", remat="block"),
        hybrid(2, half, "hsdp", **one_by_one),
        both(half, 2, "tp", **one_by_one),
        both(half, 2, "fsdp_tp", **one_by_one),
        both(half, 2, "fsdp_tp(sequence)", **one_by_one),
        both(half, 2, "fsdp_tp", remat="block"),
    )


def _images(rows: int) -> Any:
    pixels = torch.empty(rows, 3, 224, 224, device="meta")
    return pixels, torch.empty(rows, dtype=torch.int64, device="meta")


CASES: dict[str, Callable[[], TuningCase]] = {  # the smallest first
    "ResNet-50 on v5e:2x2": lambda: TuningCase(
        lambda: hf_resnet(ResNet()), class_loss, _images(512), "v5e:2x2", _small(4), optax.sgd(0.1, momentum=0.9)
    ),
    "GPT-2 on v5e:2x4": lambda: TuningCase(
        lambda: hf_gpt(Gpt()), next_token_loss, tokens(64, 1024), "v5e:2x4", _small(8)
    ),
    "Mixtral 8x7B on v5e:16x16": lambda: TuningCase(
        lambda: hf_mixtral(MIXTRAL),
        next_token_loss,
        tokens(256, 2048),
        "v5e:16x16",
        _large(256, (4, 8, 16), "expert(tp)"),
    ),
    "Llama 3 8B on v5e:16x16": lambda: TuningCase(
        lambda: hf_llama(LLAMA["8B"]),
        next_token_loss,
        tokens(256, 2048),
        "v5e:16x16",
        _large(256, (2, 4, 8), "fsdp_tp(sequence)"),
    ),
    "Llama 3 70B on v5p:8x8x8": lambda: TuningCase(
        lambda: hf_llama(LLAMA["70B"]),
        next_token_loss,
        tokens(512, 4096),
        "v5p:8x8x8",
        _large(512, (4, 8, 16), "fsdp_tp(sequence)"),
    ),
}


def rows(quick: bool) -> Iterator[Row]:
    """The best over the best by hand, and over `fsdp`, for each model."""
    for name in CASES:
        if quick and name not in list(CASES)[:1]:
            continue
        try:
            found = isolated("benchmarks.tuning:measure", name=name, minutes=2 if quick else 60)
        except Failed as error:
            yield Row(name, note=f"failed: {str(error)[-300:]}")
            continue
        best, compiled = found["best"], f"{len(found['compiled'])} compiled"
        for title, rival, target in (("the best by hand", "by hand", 1.0), ("fsdp", "fsdp", 1 / BETTER_THAN_FSDP)):
            other = found[rival]
            ratio = None if other is None or best is None else best["ms"] / other["ms"]
            ours, theirs = ("" if side is None else f"{side['what']}: {side['ms']:.4g} ms" for side in (best, other))
            yield Row(f"{name}: the best ÷ {title}", ours, theirs, ratio, target=target, note=compiled)


def measure(name: str, minutes: float) -> dict[str, Any]:
    """Search, then compile what an engineer would have chosen, as far as the time goes; all of it is kept."""
    case, deadline = CASES[name](), time.monotonic() + 60 * minutes
    directory = CACHES / name.replace(" ", "_").replace(":", "_")
    search = case.search(directory, deadline - 60 * minutes / 2)
    search.run()
    found = {str(candidate): made for candidate, made in search.measured.items()}
    hand, why = dict[str, Measured](), dict[str, str]()
    for compiles in (False, True):  # what is known comes first, so that a report is there whenever this is interrupted
        for candidate in case.by_hand:
            what = str(candidate)
            if known := found.get(what) or hand.get(what):
                hand[what] = known
            elif compiles and time.monotonic() < deadline:
                hand[what] = search.measure(candidate)
            else:
                why[what] = "not compiled"
        report = _report(search, hand, {what: said for what, said in why.items() if what not in hand})
        (directory / "report.json").write_text(json.dumps(report, indent=1))
    return report


def _report(search: Search, hand: Mapping[str, Measured], why: Mapping[str, str]) -> dict[str, Any]:
    found = {str(candidate): made for candidate, made in search.measured.items()}
    compiled = {**hand, **found}

    def entry(what: str) -> dict[str, Any]:
        made = compiled[what]
        fits = not made.refused and (search.limit is None or made.memory <= search.limit)
        return {
            "what": what,
            "left": None if search.limit is None else (search.limit - made.memory) / GIB,
            "compute": made.compute * 1e3,
            "exposed": made.exposed * 1e3,
            "ms": made.seconds * 1e3,
            "fits": fits,
            "took": made.took,
            "refused": made.refused,
            "found": what in found,
            "by hand": what in hand,
        }

    entries = sorted(map(entry, compiled), key=lambda own: (not own["fits"], own["ms"]))
    fitting = [own for own in entries if own["fits"]]
    best = next((own for own in fitting if own["found"]), None)
    return {
        "best": best,
        "by hand": next((own for own in fitting if own["by hand"]), None),
        "fsdp": next((own for own in fitting if " fsdp," in own["what"]), None),
        "compiled": entries,
        "hand": list(why.items()),
        "left": len(search.not_reached),
    }


def page(path: Path) -> str:
    """A table of all models whose caches have a report, and a file of their candidates beside the page."""
    reports = {name: json.loads(file.read_text()) for name in CASES if (file := _report_of(name)).exists()}
    rows = [_summary(name, report) for name, report in reports.items()]
    lines = [
        [name, entry["what"], *_numbers(entry), ", ".join(word for word in ("found", "by hand") if entry[word])]
        for name, report in reports.items()
        for entry in report["compiled"]
    ]
    for name, report in reports.items():
        lines += [[name, what, "", "", "", why, "by hand"] for what, why in report["hand"]]
    link = beside(path, "tuning", ("model", "candidate", "GiB left", "compute ms", "exposed ms", "ms", ""), lines)
    head = ("", "best", "ms", "best by hand", "best `fsdp`", "compiled", "not compiled")
    return f"{PAGE_HEAD}\n{table(head, rows)}\n\n{link}: every candidate that was compiled, and those by hand."


def _report_of(name: str) -> Path:
    return CACHES / name.replace(" ", "_").replace(":", "_") / "report.json"


def _numbers(entry: Mapping[str, Any]) -> list[str]:
    left = "" if entry["left"] is None else f"{entry['left']:.2f}"
    times = [f"{entry[key]:.4g}" for key in ("compute", "exposed", "ms")]
    return [left, *(times if entry["fits"] else ["", "", entry["refused"][:80] or "too large"])]


def _summary(name: str, report: Mapping[str, Any]) -> list[str]:
    """A row of the page: times of others over that of the best."""
    best, others = report["best"], [report[key] for key in ("by hand", "fsdp")]
    if best is None:
        return [name, "nothing that fits was compiled", "", "", "", str(len(report["compiled"])), str(report["left"])]
    ratios = ["" if other is None else f"{other['ms'] / best['ms']:.2f} x" for other in others]
    return [name, best["what"], f"{best['ms']:.4g}", *ratios, str(len(report["compiled"])), str(report["left"])]


def _verdict(report: Mapping[str, Any]) -> str:
    best, hand, fsdp = (report[key] for key in ("best", "by hand", "fsdp"))
    num = len(report["compiled"])
    left = f"{num} compiled, {report['left']} not promising or left for want of time."
    if best is None:
        return f"Nothing that fits was compiled. {left}"
    words = [f"Best: {best['what']}, {best['ms']:.4g} ms."]
    for title, other in (("the best by hand", hand), ("the best `fsdp`", fsdp)):
        known = (
            "was not compiled" if other is None else f"takes {other['ms'] / best['ms']:.2f} x as long ({other['what']})"
        )
        words.append(f"{title[0].upper()}{title[1:]} {known}.")
    return " ".join([*words, left])


PAGE_HEAD = """What `ts.tune` finds by TPU's compiler, with `compute_dtype=torch.bfloat16` and AdamW (SGD for
ResNet-50), beside what an engineer would try first: times of these over that of the best. `python -m benchmarks
--only tuning` measures it, and `python -m benchmarks.tuning page docs/tpu.md` makes this table.
"""


if __name__ == "__main__":
    if sys.argv[1] == "page":
        put(path := Path(sys.argv[2]), "tuning", page(path))
    else:
        print(_verdict(measure(sys.argv[1], float(sys.argv[2]))))
