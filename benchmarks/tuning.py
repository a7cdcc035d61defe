"""`ts.tune` on whole models and pods, against twelve choices by hand: `python -m benchmarks --only tuning`.

Each model has a process and a cache of its own, so that a run may be interrupted and goes on where it was. One alone,
for so many minutes: `python -m benchmarks.tuning "GPT-2 on v5e:2x4" 30`; the tables of what the caches know, as a page:
`python -m benchmarks.tuning page docs/tuning.md`.
"""

import collections
import dataclasses
import json
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
from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.chips import GIB
from torch_shard._tune.prune import Pruning
from torch_shard._tune.search import Search
from torch_shard._tune.task import Task

PAGE = """
## Tuned before there is a pod

What `ts.tune` finds, over the fastest of twelve choices by hand and over the recipe `fsdp`; see docs/tuning.md.
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

    def task(self) -> Task:
        """What `ts.tune` makes of it."""
        devices = sorted(ts.make_mesh(topology=self.topology, batch=-1).devices.flat, key=lambda device: device.id)
        options = {"compute_dtype": torch.bfloat16}
        return Task(self.model(), self.loss_fn, self.optimizer, self.batch, devices=devices, options=options)


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
        both(num // middle, middle, recipe, remat="block", accumulate_steps=2),
    )


def _small(num: int) -> tuple[Candidate, ...]:
    """Data parallel, ZeRO-1, FSDP and hybrids, layers in loops or one by one; tensor parallel by two."""
    half = num // 2
    return (
        data(num, "replicated", scan_layers=False),
        data(num, "replicated", scan_layers=True),
        data(num, "replicated + ZeRO-1", scan_layers=False),
        data(num, "replicated + ZeRO-1", scan_layers=True),
        data(num, "fsdp", scan_layers=False),
        data(num, "fsdp", scan_layers=True),
        data(num, "fsdp", remat="block"),
        hybrid(2, half, "hsdp", scan_layers=False),
        both(half, 2, "tp", scan_layers=False),
        both(half, 2, "fsdp_tp", scan_layers=False),
        both(half, 2, "fsdp_tp(sequence)", scan_layers=False),
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
    task, directory = case.task(), CACHES / name.replace(" ", "_").replace(":", "_")
    pruning, about = task.prune(), task.about()
    search = task.search(pruning, Cache(directory / "found", about), time.monotonic() + 60 * minutes / 2)
    search.run()
    others = Cache(directory / "hand", about)  # which the search does not know of
    hand = dict[Candidate, tuple[Measured | None, str]]()
    for late in (True, False):  # what is known comes first, so that a report is there whenever this is interrupted
        for candidate in case.by_hand:
            compiles = not late and time.monotonic() < deadline
            known = search.found.get(candidate)
            hand[candidate] = (known, "") if known else _known(candidate, task, others, pruning, compiles=compiles)
            if not late:
                (directory / "report.json").write_text(json.dumps(_report(search, hand, pruning), indent=1))
    return _report(search, hand, pruning)


def _known(
    candidate: Candidate, task: Task, cache: Cache, pruning: Pruning, *, compiles: bool
) -> tuple[Measured | None, str]:
    """What is known of a choice by hand, or why nothing is."""
    if (known := cache.read(candidate)) is not None:
        return known, ""
    pruned = [own for own in pruning.pruned if own.kind in ("memory", "rows", "refused", "same")]
    whys = {own.what: own.why for own in pruned}
    of_family = {own.what: own.why for own in pruned if own.kind != "memory"}  # noted of remat="none" alone
    if why := whys.get(str(candidate)) or of_family.get(str(dataclasses.replace(candidate, remat="none"))):
        return None, why
    start = time.monotonic()
    try:
        if not compiles:
            return None, f"about {task.estimate(candidate).seconds * 1e3:.3g} ms by arithmetic, not compiled"
        found = task.prepare(candidate)()
    except (ValueError, NotImplementedError) as error:
        return None, f"refused: {' '.join(str(error).split())[:160]}"
    cache.write(candidate, found := dataclasses.replace(found, took=time.monotonic() - start))
    return found, ""


def _report(search: Search, hand: Mapping[Candidate, tuple[Measured | None, str]], pruning: Pruning) -> dict[str, Any]:
    found, passed = search.found, search.passed
    compiled = {**{c: m for c, (m, _) in hand.items() if m is not None}, **found}
    ordered = sorted(compiled, key=lambda c: (not compiled[c].fits, compiled[c].seconds))
    by_hand = [c for c in ordered if c in hand]
    fsdp = [c for c in ordered if c.recipe == "fsdp"]
    return {
        "best": _entry(next(iter(c for c in ordered if c in found), None), compiled),
        "by hand": _entry(next(iter(by_hand), None), compiled),
        "fsdp": _entry(next(iter(fsdp), None), compiled),
        "compiled": [_fields(c, compiled[c]) | {"found": c in found, "by hand": c in hand} for c in ordered],
        "hand": [(str(c), why) for c, (m, why) in hand.items() if m is None],
        "num by hand": len(hand),
        "pruned": dict(collections.Counter(p.kind for p in pruning.pruned)),
        "examples": {p.kind: f"{p.what}: {p.why}" for p in reversed(pruning.pruned)},
        "passed": len(passed),
        "left": len(pruning.estimates) - len(found) - len(passed),
    }


def _entry(candidate: Candidate | None, compiled: Mapping[Candidate, Measured]) -> dict[str, Any] | None:
    if candidate is None or not compiled[candidate].fits:
        return None
    return _fields(candidate, compiled[candidate])


def _fields(candidate: Candidate, found: Measured) -> dict[str, Any]:
    return {
        "what": str(candidate),
        "mesh": candidate.mesh_text,
        "plan": candidate.recipe,
        "remat": str(candidate.remat),
        "layers": ("loop" if found.loops else "one by one") + (f", {found.scaled}" if found.scaled else ""),
        "microbatches": candidate.accumulate_steps,
        "left": None if found.limit is None else (found.limit - found.memory) / GIB,
        "compute": found.compute * 1e3,
        "exposed": found.exposed * 1e3,
        "axes": {axis: seconds * 1e3 for axis, seconds in found.exposed_by_axis.items()},
        "ms": found.seconds * 1e3,
        "fits": found.fits,
        "scaled": bool(found.scaled),
        "took": found.took,
    }


def page() -> str:
    """The tables of all models whose caches have a report."""
    parts, missing = [PAGE_HEAD], list[str]()
    for name in CASES:
        file = CACHES / name.replace(" ", "_").replace(":", "_") / "report.json"
        if file.exists():
            parts.append(f"## {name}\n\n{_section(json.loads(file.read_text()))}")
        else:
            missing.append(name)
    if missing:
        parts.append(f"Not run for this page: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _section(report: Mapping[str, Any]) -> str:
    lines = [
        f"{_verdict(report)}\n",
        "| mesh | plan | remat | layers | micro | GiB left | compute ms | exposed ms | ms | |",
    ]
    lines.append("| --- " * 10 + "|")
    for entry in report["compiled"]:
        about = "~" if entry["scaled"] else ""
        axes = "; ".join(f"{axis} {ms:.3g}" for axis, ms in entry["axes"].items() if ms >= 0.05)
        exposed = f"{about}{entry['exposed']:.4g}" + (f" ({axes})" if axes else "")
        left = "" if entry["left"] is None else f"{about}{entry['left']:.2f}"
        times = [f"{about}{entry['compute']:.4g}", exposed, f"{about}{entry['ms']:.4g}"]
        times = times if entry["fits"] else ["", "", "too large"]
        who = ", ".join(word for word, is_so in (("found", entry["found"]), ("by hand", entry["by hand"])) if is_so)
        cells = [entry[key] for key in ("mesh", "plan", "remat", "layers", "microbatches")]
        lines.append("| " + " | ".join(map(str, [*cells, left, *times, who])) + " |")
    lines += ["", '??? note "By hand, not compiled"', ""]
    lines += [f"    - {what}: {why}" for what, why in report["hand"]] or ["    All were compiled."]
    lines += [
        "",
        '??? note "Pruned by arithmetic"',
        "",
        "    | | candidates | one of them |",
        "    | --- | --- | --- |",
    ]
    lines += [f"    | {kind} | {num} | {report['examples'][kind]} |" for kind, num in report["pruned"].items()]
    return "\n".join(lines) + "\n"


def _verdict(report: Mapping[str, Any]) -> str:
    best, hand, fsdp = (report[key] for key in ("best", "by hand", "fsdp"))
    num = len(report["compiled"])
    left = f"{num} compiled, {report['left'] + report['passed']} not promising or left for want of time."
    if best is None:
        return f"Nothing that fits was compiled. {left}"
    words = [f"Best: {best['what']}, {best['ms']:.4g} ms."]
    for title, other in (("the best by hand", hand), ("the best `fsdp`", fsdp)):
        known = (
            "was not compiled" if other is None else f"takes {other['ms'] / best['ms']:.2f} x as long ({other['what']})"
        )
        words.append(f"{title[0].upper()}{title[1:]} {known}.")
    return " ".join([*words, left])


PAGE_HEAD = """# Tables of tuning

What `ts.tune` says of five models and pods: `python -m benchmarks --only tuning` makes the numbers, which are those of
TPU's compiler, and `python -m benchmarks.tuning page docs/tuning.md` this page. `compute_dtype=torch.bfloat16`, AdamW
(SGD for ResNet-50), and nothing else is given. Twelve choices by hand stand beside what was found: what an engineer
would try first. `~` is scaled from as many layers as is said; *exposed* is communication that the schedule does not
hide, by axis of the mesh.
"""


if __name__ == "__main__":
    if sys.argv[1] == "page":
        Path(sys.argv[2]).write_text(page())
    else:
        print(_verdict(measure(sys.argv[1], float(sys.argv[2]))))
