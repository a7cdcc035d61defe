"""What a training step costs: `python -m benchmarks.step [--quick] [--variants] [--json PATH]`.

Every number is a ratio of two sides run in turn in this one process, as median and quartiles, since machines are
shared. The rival is the same model and optimiser written by hand in plain JAX (`benchmarks.handwritten`) in three
grades: the idiomatic one, the fastest found that leaves the derivative to JAX, and the fastest found whose backward
formulas are written by hand as well.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import torch_shard as ts
from benchmarks import counts, models, others
from benchmarks.handwritten import HandwrittenStep, Variant, gpt_step, mlp_loss
from benchmarks.handwritten import convert as convert_values
from benchmarks.handwritten import convert_specs as convert_layout
from benchmarks.timing import Ratio, round_robin, seconds, summary

LEARNING_RATE = 1e-4
GRADES = {
    "idiomatic JAX": Variant(),
    "best autodiff JAX": Variant(attention="additive", gelu="erf", norm="var", weights="out_in"),
    "JAX, backward by hand": Variant("closed", "closed", "closed", "closed", "closed", weights="out_in"),
}
VARIANTS = {
    **{f"attention={v}": Variant(attention=v) for v in ("btnh", "bnth", "additive", "closed")},
    **{f"loss={v}": Variant(loss=v) for v in ("gather", "onehot", "closed")},
    **{f"gelu={v}": Variant(gelu=v) for v in ("erf", "closed")},
    **{f"norm={v}": Variant(norm=v) for v in ("var", "moments", "closed")},
    **{f"embed={v}": Variant(embed=v) for v in ("onehot", "closed")},
    "weights=out_in": Variant(weights="out_in"),
    "flat": Variant(flat=True),
    "scan": Variant(scan=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What is measured.
        ours: Our number, with its unit.
        rival: The rival's.
        ratio: The number that the target is about.
        quartiles: Of the paired ratios, where there are pairs.
        target: At most this, where there is a target.
    """

    name: str
    ours: str
    rival: str
    ratio: float
    quartiles: tuple[float, float] | None = None
    target: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the target is reached."""
        return None if self.target is None else self.ratio <= self.target


def _timed_row(name: str, ratio: Ratio, target: float | None = None) -> Row:
    ours, rival = (f"{s * 1e3:.3g} ms" for s in (ratio.ours_s, ratio.rival_s))
    return Row(name, ours, rival, ratio.median, (ratio.low, ratio.high), target)


class Ours:
    """Our train step with its state."""

    def __init__(self, model: Any, loss_fn: Any, specs: dict[str, P], axes: dict[str, int]) -> None:
        self.mesh = ts.make_mesh(**axes)
        plan = ts.ShardingPlan(specs, default=P())
        self.step = ts.make_train_step(model, loss_fn, optax.adamw(LEARNING_RATE), mesh=self.mesh, plan=plan)
        self.state = self.step.init(seed=0)
        resolved = plan.resolve(model, self.mesh)
        self.values = {n: np.array(v) for n, v in self.state.params.items()}
        self.specs = {n: resolved[n].spec for n in self.values}

    def __call__(self, batch: Any) -> float:
        """Train by one step, wait for it, and return the loss."""
        self.state, metrics = self.step(self.state, batch)
        return float(jax.block_until_ready((self.state, metrics))[1]["loss"])

    def hlo(self, batch: Any) -> str:
        """The compiled program."""
        return self.step.lower(self.state, batch).compile().as_text()


def gpt_rows(layers: int, pairs: int, grades: dict[str, Variant], batch_axis: int, model_axis: int) -> Iterator[Row]:
    """Ours over each grade of the rival on one mesh; on (4, 2) also what is compiled and communicated."""
    torch.manual_seed(0)
    batch, axes = models.gpt_batch(), {"batch": batch_axis, "model": model_axis}
    ours = Ours(models.GPT(layers), models.gpt_loss, models.gpt_specs(), axes)
    optimizer = optax.adamw(LEARNING_RATE)
    rivals = {n: gpt_step(v, models.HEADS, optimizer, ours.mesh, ours.values, ours.specs) for n, v in grades.items()}
    sides: dict[str, Callable[[Any], Any]] = {"ours": ours, **rivals}
    times = _in_turn(sides, batch, pairs)
    for name in rivals:
        target = 0.8 if grades is GRADES else None
        ratio = summary(np.stack([times["ours"], times[name]], 1))
        yield _timed_row(f"GPT ({batch_axis},{model_axis}) ÷ {name}", ratio, target)
    if model_axis > 1 and grades is GRADES:
        yield from _communication_rows(ours, rivals, layers, batch)


def _in_turn(sides: dict[str, Callable[[Any], Any]], batch: Any, rounds: int) -> dict[str, np.ndarray]:
    """Times of the sides, which must agree on every loss."""
    losses: dict[str, list[float]] = {name: [] for name in sides}

    def run(name: str) -> None:
        out = sides[name](batch)
        losses[name].append(float(out["loss"] if isinstance(out, dict) else out))

    times = round_robin({name: lambda name=name: run(name) for name in sides}, rounds)
    first = next(iter(losses.values()))
    for name, found in losses.items():  # float32 sums in another order, carried over a few steps of AdamW
        np.testing.assert_allclose(found, first, rtol=1e-3, atol=1e-4, err_msg=name)
    return times


def _communication_rows(ours: Ours, rivals: dict[str, HandwrittenStep], layers: int, batch: Any) -> Iterator[Row]:
    rival = rivals["idiomatic JAX"]
    placed = rival.put(batch)
    mine = counts.collectives(ours.hlo(batch))
    theirs = counts.collectives(rival.jitted.lower(rival.state, placed).compile().as_text())
    total = sum(size for _, size in mine.values()) / sum(size for _, size in theirs.values())
    yield Row("collectives on (4,2), bytes", counts.describe(mine), counts.describe(theirs), total)
    activations = models.BATCH // 4 * models.LENGTH * models.WIDTH * 4
    grads = sum(4 * np.prod(ours.state.params[n].addressable_shards[0].data.shape) for n in ours.values)
    text = f"{4 * layers} + 1 all-reduce {(4 * layers * activations + grads) / 1e6:.3g} MB"
    number = sum(count for count, _ in mine.values())
    yield Row("collectives on (4,2), number, ÷ textbook", str(number), text, number / (4 * layers + 1))
    state = ours.step.init(seed=1)
    fresh = ts.make_train_step(
        ours.step.model, models.gpt_loss, optax.adamw(LEARNING_RATE), mesh=ours.mesh, plan=_plan(models.gpt_specs())
    )
    with counts.compilations() as compiled, counts.captures() as captured:
        for _ in range(5):
            state, _ = fresh(state, batch)
    yield Row("compilations over 5 steps on (4,2)", str(len(compiled)), "1", len(compiled), target=1)
    yield Row("captures by a second make_train_step", str(captured.call_count), "0", captured.call_count, target=0)


def _plan(specs: dict[str, P]) -> ts.ShardingPlan:
    return ts.ShardingPlan(specs, default=P())


def mlp_rows(pairs: int, batch_axis: int, model_axis: int) -> Iterator[Row]:
    """The tutorial's MLP over its hand-written twin, weights stored either way."""
    torch.manual_seed(0)
    batch = models.mlp_batch()
    ours = Ours(models.mlp(), models.mlp_loss, models.mlp_specs(), {"batch": batch_axis, "model": model_axis})
    rivals = {}
    for weights in ("in_out", "out_in"):
        variant = Variant(weights=weights)
        values = convert_values(ours.values, variant)
        specs = convert_layout(ours.specs, ours.values, variant)
        loss = mlp_loss(weights=weights)
        rivals[weights] = HandwrittenStep(loss, optax.adamw(LEARNING_RATE), ours.mesh, values, specs)
    times = _in_turn({"ours": ours, **rivals}, batch, pairs)
    for name in rivals:
        ratio = summary(np.stack([times["ours"], times[name]], 1))
        yield _timed_row(f"MLP ({batch_axis},{model_axis}) ÷ JAX, weights {name}", ratio, 1.05)


def other_rows(layers: int, pairs: int) -> Iterator[Row]:
    """The GPT on one device by other routes."""
    torch.manual_seed(0)
    model, batch = models.GPT(layers), models.gpt_batch()
    optimizer = optax.adamw(LEARNING_RATE)
    sides: dict[str, Callable[[Any], Any]] = {
        "ours": Ours(model, models.gpt_loss, {}, {"batch": 1}),
        "the document's loop (eager update)": others.documents_loop(model, models.gpt_loss, optimizer),
        "torchax tracing, one jit": others.torchax_tracing(model, models.gpt_loss, optimizer),
        "eager torch on the CPU": others.eager_torch(model, models.gpt_loss, LEARNING_RATE),
    }
    times = _in_turn(sides, batch, pairs)
    for name in list(sides)[1:]:
        yield _timed_row(f"GPT, 1 device ÷ {name}", summary(np.stack([times["ours"], times[name]], 1)))


def dispatch_rows(pairs: int, parameters: int = 300) -> Iterator[Row]:
    """Time until the call returns over that of the jitted function on the same leaves, three per parameter."""
    batch = torch.ones(2, 4)
    side = Ours(models.many_linears(parameters // 2), lambda model, x: model(x).square().mean(), {}, {"batch": 1})
    side(batch)
    program, arrays = side.step._prepare(batch)
    closure = program.closure()
    times = np.empty((pairs, 2))
    for i in range(pairs):
        for which in (0, 1) if i % 2 else (1, 0):

            def call(which: int = which) -> None:
                raw = program.jitted(side.state, arrays, closure) if which else side.step(side.state, batch)
                side.state = raw[0]

            times[i, which] = seconds(call)
            jax.block_until_ready(side.state)
    yield _timed_row(f"calling step ÷ raw jit, {parameters} parameters", summary(times), 1.3)


def capture_rows(layers: int, repeats: int) -> Iterator[Row]:
    """Capture alone, in seconds per 500 nodes of the graph."""
    from torch_shard._batch import flatten_batch
    from torch_shard._loss import loss_program

    _, signature = flatten_batch(models.gpt_batch())
    found = []
    for _ in range(repeats + 1):
        model, program = models.GPT(layers), []
        took = seconds(
            lambda m=model, p=program: p.append(
                loss_program(m, models.gpt_loss, signature, train=True, caller="benchmark")
            )
        )
        found.append(took / program[0].program.graph.num_nodes * 500)
    low, median, high = np.quantile(found[1:], [0.25, 0.5, 0.75])
    ours = f"{median:.2f} s ({found[0]:.2f} s cold)"
    yield Row("capture of the GPT, s per 500 nodes", ours, "", float(median), (float(low), float(high)), 1.0)


def rows(quick: bool, variants: bool) -> Iterator[Row]:
    """All rows, as they are measured."""
    layers, pairs = (1, 3) if quick else (models.LAYERS, 21)
    for axes in ((1, 1), (8, 1), (4, 2)):
        yield from gpt_rows(layers, pairs, GRADES, *axes)
        yield from mlp_rows(3 * pairs, *axes)
    yield from other_rows(layers, pairs)
    yield from dispatch_rows(10 * pairs)
    yield from dispatch_rows(pairs, 1000)
    yield from capture_rows(layers, 2 if quick else 7)
    if variants:
        yield from gpt_rows(layers, pairs, VARIANTS, 1, 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer, few repetitions")
    parser.add_argument("--variants", action="store_true", help="also every single variant of the rival, on (1,1)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    console = Console(width=140)
    table = Table("", "ours", "rival", "ratio", "quartiles", "target", "ok", title="torch_shard: paired ratios, median")
    found = []
    for row in rows(options.quick, options.variants):
        found.append(row)
        console.print(f"[dim]{row.name}: {row.ratio:.3g}[/dim]")
        quartiles = f"{row.quartiles[0]:.2f} to {row.quartiles[1]:.2f}" if row.quartiles else ""
        target = "" if row.target is None else f"≤ {row.target:g}"
        ok = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[row.ok]
        table.add_row(row.name, row.ours, row.rival, f"{row.ratio:.3g}", quartiles, target, ok)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps([{**dataclasses.asdict(r), "ok": r.ok} for r in found], indent=1))


if __name__ == "__main__":
    main()
