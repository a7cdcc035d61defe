"""Evaluation: the loss in eval mode as one compiled program."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax

from torch_shard._common.caller import error_prefix, near_misses
from torch_shard._common.types import PyTree
from torch_shard._hosts import follow
from torch_shard._loss import update_objects
from torch_shard._state import TrainState, check_state
from torch_shard._train.compiled_step import Body, Task
from torch_shard._train.step import Step


class EvalStep(Step):
    """Evaluation as one compiled program; made by `make_eval_step`.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> evaluate = step.evaluation()  # or from make_eval_step
        >>> sorted(evaluate(step.init(seed=0), torch.ones(8, 4)))
        ['loss']
    """

    caller, train = "make_eval_step", False

    @near_misses
    @error_prefix(None)
    def __call__(self, state: TrainState, batch: PyTree) -> dict[str, PyTree]:
        """Evaluate the loss on a batch.

        Args:
            state: A training state; it is only read.
            batch: A pytree of CPU tensors, numpy arrays or arrays; global sizes, leading dim split over `batch`. One
                that does not divide over the mesh, as the last of a loader, is evaluated whole on each device: the
                same numbers, for one compilation more. With `local_batches=True` the rows of this process's devices,
                as many as in each other process.

        Returns:
            `loss` and the metrics of `loss_fn`.
        """
        check_state(state)
        program, metrics = self._run(batch, state)
        follow(metrics["loss"])
        update_objects(program.loss.calls, metrics, 1)
        return metrics

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        def evaluate(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> dict[str, PyTree]:
            out = task.run(state, batch, closure)
            return {"loss": out.loss, **out.metrics}

        return evaluate, {"out_shardings": self.replicated}
