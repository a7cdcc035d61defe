"""The recipe that splits the repeated layers of a model over stages."""

from __future__ import annotations

import dataclasses

from torch_shard._common.caller import error_prefix
from torch_shard._sharding import Pipeline, Schedule, ShardingPlan, check_plan


@error_prefix("plans.pipeline")
def pipeline(
    plan: ShardingPlan, *, stage: str = "stage", repeats: int = 1, schedule: Schedule | None = None
) -> ShardingPlan:
    """A plan whose repeated layers are the stages of a pipeline; the model is not rewritten.

    Each stage has the parameters of its own layers, split further as the plan says. Microbatches, of which
    `make_train_step(accumulate_steps=)` says the number, go from stage to stage within one compiled program; twice as
    many as stages, or more, keep the stages busy: of `M` over `P` stages, `(P - 1) / (repeats * M + P - 1)` of the time
    is idle. Numbers are those of the same step without stages. Embeddings, head and loss are computed by all stages,
    each for a part of the rows.

    Args:
        plan: For the other axes of the mesh; its rules do not split layers over `stage`.
        stage: The axis of the mesh that has the stages. The layers are a multiple of its size times `repeats`.
        repeats: How often a microbatch goes round, through other layers each time.
        schedule: `"1f1b"` or `"gpipe"`; see `Pipeline`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: There is no such schedule. Making the step says what does not fit the model.

    Example:
        >>> import torch_shard as ts
        >>> plan = ts.plans.pipeline(ts.plans.replicated(), stage="stage")
        >>> plan.pipeline.axis, plan.pipeline.schedule
        ('stage', '1f1b')
    """
    check_plan(plan)
    return dataclasses.replace(plan, pipeline=Pipeline(stage, repeats, schedule))
