"""Pipelines against what their schedule says, under TPU's own compiler: idle time and memory, counted.

`python -c "from benchmarks.tpu_pipeline import measure; print(measure(stages=4, num=8))"` is one step alone.
"""

import dataclasses
from typing import Any

import torch_shard as ts
from benchmarks.tpu_cases import TpuCase, hf_llama, next_token_loss, replicated, tokens
from benchmarks.tpu_counts import counts_of
from benchmarks.tpu_llama import Llama

SIZES = Llama(layers=8, width=1024, hidden=2816, heads=8, kv_heads=4, vocab=2048)
DEVICES, ROWS, LENGTH = 8, 8, 256
"""Rows are those of a microbatch."""

PLANS = {"replicated": replicated, "fsdp": ts.plans.fsdp}


def case_of(stages: int, num: int, plan: str = "replicated", **how: Any) -> TpuCase:
    """A narrow Llama in so many stages, the batch over the other devices; 0: the same devices of one stage alone."""
    of_stage = {"batch": DEVICES // abs(stages)}
    axes = of_stage | ({"stage": stages} if stages > 0 else {})
    pipeline = (lambda p: ts.plans.pipeline(p, **how)) if stages > 0 else (lambda p: p)
    return TpuCase(
        "pipeline",
        "v5e:2x4",
        axes,
        lambda: hf_llama(SIZES),
        next_token_loss,
        tokens(ROWS * num, LENGTH),
        lambda model, mesh: pipeline(PLANS[plan](model, mesh)),
        options={"accumulate_steps": num, "remat": "block"},
    )


def measure(stages: int, num: int, plan: str = "replicated", text: str = "", **how: Any) -> dict[str, Any]:
    """Counts of a step."""
    case = case_of(stages, num, plan, **how)
    step = case.step()
    preview = step.preview(case.batch)
    found = dataclasses.asdict(counts_of(preview.compiled))
    if text:
        open(text, "w").write(preview.compiled.as_text())
        open(text + ".txt", "w").write(str(preview))
    return found
