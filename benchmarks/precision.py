"""Loss curves of the demo's model in float32 and under both kinds of mixed precision: the same batches and seeds."""

from collections.abc import Iterator
from typing import Any

import torch

import torch_shard as ts
from benchmarks.rows import Point, Row
from torch_shard._demo import BATCH_SIZE, CONTEXT, PLAN, Settings, draw_batch, loss_fn, read_corpus

SIDES: dict[str, dict[str, Any]] = {
    "float32": {},
    'bfloat16, mixed_precision="autocast"': {"compute_dtype": torch.bfloat16, "mixed_precision": "autocast"},
    'bfloat16, mixed_precision="params"': {"compute_dtype": torch.bfloat16, "mixed_precision": "params"},
}


def rows(quick: bool) -> Iterator[Row | Point]:
    """The validation losses on the way, and the last one against that of float32."""
    settings = Settings(steps=4 if quick else 300, num_layers=2 if quick else 4)
    every, last = max(settings.steps // 10, 1), dict[str, float]()
    for side, options in SIDES.items():
        for step, loss in curve(settings, every, options):
            yield Point("precision", "validation loss (nats per token)", side, "step", step, loss)
            last[side] = loss
    exact = last["float32"]
    for side, loss in list(last.items())[1:]:
        yield Row(f"validation loss, {side}", f"{loss:.4f}", f"{exact:.4f} (float32)", loss / exact, target=1.01)


def curve(settings: Settings, every: int, options: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Step and validation loss, before the first step and each so many steps."""
    corpus, mesh = read_corpus(), ts.make_mesh(batch=1, model=1)
    model, optimizer = settings.make_model(), settings.make_optimizer()
    step = ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=PLAN, **options)
    evaluate, state = step.evaluation(), step.init(seed=settings.seed)
    sizes = {"batch_size": BATCH_SIZE, "context": CONTEXT}
    validation = [draw_batch(corpus.validation, seed=(0, i), **sizes) for i in range(settings.num_eval_batches)]
    for number in range(settings.steps + 1):
        if number % every == 0:
            yield number, sum(float(evaluate(state, batch)["loss"]) for batch in validation) / len(validation)
        if number < settings.steps:
            state, _ = step(state, draw_batch(corpus.train, seed=(settings.seed, number), **sizes))
