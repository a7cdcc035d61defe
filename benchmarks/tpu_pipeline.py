"""Pipelines against what their schedule says, under TPU's own compiler: see `benchmarks.tpu`.

`python -c "from benchmarks.tpu_pipeline import measure; print(measure(stages=4, num=8))"` is one step alone.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch_shard as ts
from benchmarks.processes import Failed, isolated
from benchmarks.report import HEAD, by_subject, lines_of
from benchmarks.rows import Row
from benchmarks.tpu_cases import Recipe, TpuCase, hf_llama, next_token_loss, replicated, tokens
from benchmarks.tpu_counts import Counts, counts_of
from benchmarks.tpu_llama import Llama
from docs.pages import beside

PAGE = """
## Pipelines against their formula

A narrow Llama (8 layers of width 1024, 256 tokens, 8 rows in each microbatch, `remat="block"`) on v5e:2x4: `stage=P`,
`batch=8 / P`, parameters replicated over `batch`. The rival is arithmetic: cycles of the same
step without stages, divided by P, times `(R M + P - 1) / (R M)` for M microbatches in R rounds. It is no lower bound:
head and loss have no idle stages, and programs of fewer layers or rows are compiled another way. Temporaries stand
beside those of the step without stages. Shown are four stages and eight microbatches; GPipe and FSDP are in the file.
"""


def markdown(found: list[Row], page: Path) -> str:
    """Of two schedules, and a file of all, with other numbers of stages, beside the page."""
    shown = [row for row in found if row.name.startswith(("1f1b, P = 4, M = 8:", "circular, P = 4, M = 8:"))]
    return f"{by_subject(shown)}\n\n{beside(page, 'tpu_pipeline', HEAD, lines_of(found))}."


SIZES = Llama(layers=8, width=1024, hidden=2816, heads=8, kv_heads=4, vocab=2048)
DEVICES, ROWS, LENGTH = 8, 8, 256
"""Rows are those of a microbatch."""

PLANS: dict[str, Recipe] = {"replicated": replicated, "fsdp": ts.plans.fsdp}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A schedule of so many microbatches over so many stages."""

    stages: int
    num: int
    plan: str = "replicated"
    schedule: str | None = None
    repeats: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        schedule = "circular" if self.repeats > 1 else self.schedule or "1f1b"
        return f"{schedule}, P = {self.stages}, M = {self.num}{', FSDP' * (self.plan == 'fsdp')}"

    @property
    def formula(self) -> float:
        """How much longer it takes than without idle stages."""
        return 1 + (self.stages - 1) / (self.repeats * self.num)


SETTINGS = [
    *(Setting(stages, num) for num in (8, 16) for stages in (2, 4, 8)),
    *(Setting(4, num, schedule="gpipe") for num in (8, 16)),
    *(Setting(4, num, repeats=2) for num in (8, 16)),
    Setting(4, 8, plan="fsdp"),
]


def rows(quick: bool) -> Iterator[Row]:
    """Cycles over the formula's, and temporaries, for each setting."""
    for setting in SETTINGS[:1] if quick else SETTINGS:
        own = dataclasses.asdict(setting)
        try:
            found = [
                Counts(**isolated("benchmarks.tpu_pipeline:measure", **own, alone=alone)) for alone in (False, True)
            ]
        except Failed as error:
            yield Row(setting.name, note=f"failed: {str(error)[-300:]}")
            continue
        yield from rows_of(setting, *found)


def rows_of(setting: Setting, ours: Counts, alone: Counts) -> Iterator[Row]:
    """Of one setting, given the counts of the step and of the one without stages."""
    for what, quantity in (("cycles", "cycles"), ("with waiting", "time")):
        mine, theirs = (getattr(side, quantity) / 1e6 for side in (ours, alone))
        expected = theirs / setting.stages * setting.formula
        yield Row(f"{setting.name}: {what}", f"{mine:.4g} Mcycles", f"{expected:.4g} Mcycles", mine / expected)
    sizes = [side.temporaries / 2**20 for side in (ours, alone)]
    texts = (f"{sizes[0]:.4g} MiB", f"{sizes[1]:.4g} MiB")
    yield Row(f"{setting.name}: temporaries", *texts, sizes[0] / sizes[1], note="without stages beside")


def case_of(setting: Setting, *, alone: bool) -> TpuCase:
    """The model in its stages, the batch over the other devices; alone: without stages, on the devices of one."""
    axes = {"batch": DEVICES // setting.stages} | ({} if alone else {"stage": setting.stages})
    how: dict[str, Any] = {"repeats": setting.repeats, "schedule": setting.schedule}

    def recipe(model: Any, mesh: Any) -> ts.ShardingPlan:
        plan = PLANS[setting.plan](model, mesh)
        return plan if alone else ts.plans.pipeline(plan, **how)

    return TpuCase(
        setting.name,
        "v5e:2x4",
        axes,
        lambda: hf_llama(SIZES),
        next_token_loss,
        tokens(ROWS * setting.num, LENGTH),
        recipe,
        options={"accumulate_steps": setting.num, "remat": "block"},
    )


def measure(*, alone: bool = False, **setting: Any) -> dict[str, Any]:
    """The counts of a step, in this process."""
    case = case_of(Setting(**setting), alone=alone)
    step = case.step()
    compiled = step.lower(step.structs, case.batch).compile()
    return dataclasses.asdict(counts_of(compiled, case.mesh))
