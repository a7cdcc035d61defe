"""The forward pass of a module in eval mode as one compiled program, whose outputs stay split."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.caller import caller, error_prefix
from torch_shard._common.convert import flatten
from torch_shard._common.specs import axes_of
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call
from torch_shard._entries import holdings
from torch_shard._hosts import follow
from torch_shard._state import KINDS, TrainState, check_state
from torch_shard._train.compiled_step import Body, Task
from torch_shard._train.options import StepOptions
from torch_shard._train.step import Step

ApplyFn = Callable[[Any, Any], PyTree]


def call_model(model: torch.nn.Module, batch: PyTree) -> PyTree:
    """`model(batch)`, with the entries of a tuple, list or mapping as arguments."""
    if isinstance(batch, Mapping):
        return model(**cast(Mapping[str, PyTree], batch))
    return model(*cast(tuple[PyTree, ...], batch)) if isinstance(batch, tuple | list) else model(batch)


def _as_loss(fn: ApplyFn) -> Callable[[Any, Any], tuple[torch.Tensor, dict[str, PyTree]]]:
    """A loss function whose metrics are what `fn` returns."""
    outputs_of: Any = functools.partial(_outputs_of, fn)  # so that what `fn` belongs to is seen
    outputs_of.called = "the forward pass"
    return outputs_of


def _outputs_of(fn: ApplyFn, model: Any, batch: PyTree) -> tuple[torch.Tensor, dict[str, PyTree]]:
    out = fn(model, batch)
    for leaf in flatten(out)[0] or [None]:
        if not isinstance(leaf, torch.Tensor | np.ndarray | np.generic | int | float | complex):
            raise TypeError(
                f"{caller()}: outputs must be tensors or numbers in containers, but {type(leaf).__name__} is among "
                "them. Return what you need: fn=lambda model, batch: model(batch).logits (of models of "
                "transformers also model.config.use_cache = False)."
            )
    return torch.zeros(()), {"outputs": out}


class ApplyStep(Step):
    """The forward pass in eval mode as one compiled program; made by `make_apply`.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> model = torch.nn.Linear(4, 2)
        >>> apply = ts.make_apply(model, mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()))
        >>> apply(torch.ones(8, 4)).sharding.spec[0]
        'batch'
    """

    caller, train = "make_apply", False

    @error_prefix(None)
    def __init__(self, model: torch.nn.Module, fn: ApplyFn | None, options: StepOptions) -> None:
        if fn is not None:
            check_call("fn", fn, "model", "batch")
        super().__init__(model, _as_loss(call_model if fn is None else fn), options)

    @error_prefix("init")
    def init(self) -> TrainState:
        """The present values of the module on their shards, as a state to call this with again and again.

        Example:
            >>> import torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> model = torch.nn.Linear(4, 2)
            >>> apply = ts.make_apply(model, mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()))
            >>> apply(apply.init(), torch.ones(8, 4)).shape
            (8, 2)
        """
        self.look_at_model()
        layout, kinds = self._state_layout, zip(KINDS, self._held.kinds, strict=True)
        with jax.ensure_compile_time_eval():  # where it is called within a jax.jit
            placed = {kind: layout.place(kind, tensors) for kind, tensors in kinds}
            return layout.start(placed, layout.shardings.opt_state, seed=0)

    def of_model(self) -> TrainState:
        """The state that the model follows, or else one of its present values."""
        state = self._live.state
        if state is None or cast(Any, state.step.sharding).mesh != self.mesh:
            return self.init()
        found = cast(dict[str, Any], jax.eval_shape(dict, state.tensors))
        shapes = {name: tuple(tensor.shape) for name, tensor in holdings(self.model).all.items()}
        return state if shapes == {name: struct.shape for name, struct in found.items()} else self.init()

    @error_prefix(None)
    def __call__(self, *state_and_batch: PyTree, **inputs: PyTree) -> PyTree:
        """Run the forward pass on a batch.

        Args:
            *state_and_batch: A state and a batch; or a batch alone, for the present values of the module, which are
                then put on the mesh at each call (`init` does it once; a `jax.jit` around this, when it is traced). A
                state is only read. The batch is a pytree of CPU tensors, numpy arrays or arrays; global sizes, leading
                dim split over `batch`. One that does not divide over the mesh is computed whole on each device.
            **inputs: None: inputs by name are a batch, `apply({"x": x})`.

        Returns:
            What `fn` returns, its tensors as arrays of global shapes. Those with as many rows as the batch have them
            split as the batch; others are whole on each device.

        Raises:
            TypeError: It is called with something else, or `fn` returns what is not a tensor or number.
            ValueError: The state was donated to a step, or is of another model.
        """
        if inputs or [isinstance(x, TrainState) for x in state_and_batch] not in ([False], [True, False]):
            given = [type(x).__name__ for x in state_and_batch] + [f"{name}=" for name in inputs]
            raise TypeError(
                f"{self.caller}: call apply(state, batch) or apply(batch), found apply({', '.join(given)}). Several "
                'inputs are one batch: apply((x, y)) or apply({"x": x}).'
            )
        state = state_and_batch[0] if len(state_and_batch) == 2 else self.of_model()
        check_state(state)
        program, (loss, outputs, metrics) = self._run(state_and_batch[-1], self._present(state))
        follow(loss)
        self._effects.do(program.loss.captured.effects, metrics, 1)
        return outputs

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        axis = self.plan.context.axis if self.plan.context else None

        def apply(
            state: TrainState, batch: list[jax.Array], closure: list[jax.Array]
        ) -> tuple[jax.Array, PyTree, PyTree]:
            out = task.run(state, batch, closure)
            pairs = list(zip(batch, task.shardings, strict=True))
            sizes = {x.shape[0] for x, s in pairs if not s.is_fully_replicated}
            lengths = {x.shape[1] for x, s in pairs if axis and axis in axes_of(getattr(s, "spec", ())[1:2])}

            def placed(array: jax.Array) -> jax.Array:
                if not array.ndim or array.shape[0] not in sizes:
                    return jax.lax.with_sharding_constraint(array, self.replicated)
                more = (axis,) if array.ndim > 1 and array.shape[1] in lengths else ()
                spec = PartitionSpec(self.layout.row_axes, *more)
                return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

            metrics = dict(out.metrics)
            return out.loss, jax.tree.map(placed, metrics.pop("outputs")), metrics

        return apply, {}
