"""The train step as users have it: a training that is proved, looked into, and handed back to torch."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from torch_shard._common.caller import error_prefix, near_misses
from torch_shard._common.types import PyTree
from torch_shard._state import TrainState, as_arrays, check_names, check_skip_grad_norm, check_state
from torch_shard._train.comparison import Comparison
from torch_shard._train.prove import prove
from torch_shard._train.stats import StepStats, stats_of
from torch_shard._train.step import EvalStep
from torch_shard._train.training import Training


class TrainStep(Training):
    """One training step as one compiled program; made by `make_train_step`.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
        >>> int(state.step), type(step.export(state)).__name__
        (1, 'Linear')
    """

    @near_misses
    @error_prefix("export_optimizer")
    def export_optimizer(self, state: TrainState) -> dict[str, Any]:
        """The optimizer's state as torch has it, for `optimizer.load_state_dict(...)`; with its parameter groups.

        Args:
            state: A state of this step; it is only read.

        Returns:
            `{"state": ..., "param_groups": ...}`: CPU tensors by number, in torch's order of parameters.

        Raises:
            TypeError: The step was made with an optax transformation.
            ValueError: The state was donated to a step, or is of another model.

        Example:
            >>> import torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            >>> step = ts.make_train_step(
            ...     model, lambda model, batch: model(batch).square().mean(), optimizer,
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
            >>> optimizer.load_state_dict(step.export_optimizer(state))
            >>> float(optimizer.state[model.weight]["step"])
            1.0
        """
        check_state(state)
        return self._update.state_dict(self._own(self._present(state))[0].opt_state)

    @near_misses
    @error_prefix(None)
    def prove(self, state: TrainState, batch: PyTree, *, skip_grad_norm: float | None = None) -> Comparison:
        """Compare this step, from this state on this batch, with eager torch on the CPU, and the update with optax.

        Random numbers (dropout) are drawn alike: eager torch gets those of the step. Where float32 differs and float64
        does not, it is rounding that the model magnifies, and no difference; of Muon, which iterates in bfloat16, what
        is at most twice what torch's own step does with gradients that are moved by one rounding of bfloat16. It takes
        memory for the state twice, and the time to compile the gradients once more; the step is as fast as before.

        Args:
            state: Only read.
            batch: As the step takes it.
            skip_grad_norm: As the step takes it.

        Returns:
            A `Comparison` of the loss, the metrics, each gradient and buffer with eager torch, and of each parameter
            after the step with what optax makes of the gradients; `raise_if_different()` names what is apart.

        Raises:
            NotImplementedError: Eager torch cannot draw the random numbers of the step.

        Example:
            >>> import optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> step = ts.make_train_step(
            ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.adamw(0.1),
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> step.prove(step.init(seed=0), torch.ones(8, 4)).raise_if_different()
        """
        check_skip_grad_norm(skip_grad_norm)
        check_state(state)
        state = self._present(state)
        check_names(state, self._held.all)
        return prove(self, as_arrays(state), batch, skip_grad_norm)

    @near_misses
    @error_prefix("stats")
    def stats(self, state: TrainState, batch: PyTree) -> StepStats:
        """Show what each module returns in this step: largest entry, mean and share of zeros, and of its gradient.

        Eager torch repeats the step on the CPU, with its random numbers and microbatches.

        Args:
            state: Only read.
            batch: As the step takes it.

        Returns:
            A `StepStats`: `rows`, a table when it is printed, and `save("stats.svg")`.

        Example:
            >>> import optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> step = ts.make_train_step(
            ...     torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()),
            ...     lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> stats = step.stats(step.init(seed=0), torch.ones(8, 4))
            >>> [row.name for row in stats.rows], stats.rows[1].output.zeros > 0
            (['0', '1', 'Sequential'], True)
        """
        check_state(state)
        state = self._present(state)
        check_names(state, self._held.all)
        return stats_of(self.gradient_step, as_arrays(state), self.put(batch))

    def evaluation(self) -> EvalStep:
        """The step that evaluates the same loss in eval mode, with the options of this one."""
        return EvalStep(self.model, self.loss_fn, self.options.for_evaluation())
