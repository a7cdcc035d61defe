"""Training: an unmodified module, a torch loss and an optimizer as one compiled, sharded, donated step."""

# optax has no stubs. JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

from torch_shard._common.caller import error_prefix, near_misses
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, check_seed
from torch_shard._device import put, refuse_meta, refuse_wide, to_host_by_name
from torch_shard._entries import LossFn, with_values
from torch_shard._hosts import follow
from torch_shard._loss import EFFECTS, LossOutputs
from torch_shard._optim import AverageState, HostTransfers, check_moments, refuse_line_search
from torch_shard._scan import Siblings
from torch_shard._sharding import Stacks, constrain_stacks
from torch_shard._state import (
    KINDS,
    StateLayout,
    StepCheck,
    TrainState,
    check_apart,
    check_names,
    check_skip_grad_norm,
    check_state,
    check_step,
    global_norm,
    refuse_misplaced,
    select_state,
)
from torch_shard._train.compiled_step import Body, Task
from torch_shard._train.facts import agree_on_values
from torch_shard._train.metric_answers import answer_torch_habits
from torch_shard._train.options import StepOptions
from torch_shard._train.replay import GradientStep
from torch_shard._train.step import Step
from torch_shard._train.update import Update, norms_of, watched_modules

logger = logging.getLogger(__name__)


class Training(Step):
    """A training step, and its states: made, trained on, exported."""

    caller, train = "make_train_step", True

    @error_prefix(None)
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation | torch.optim.Optimizer,
        options: StepOptions,
    ) -> None:
        super().__init__(model, loss_fn, options)
        if not self._held.trainable:
            raise ValueError(f"{self.caller}: no parameter of {type(model).__name__} has requires_grad=True.")
        self._update = Update(optimizer, self._held, self._trained, options)
        self.optimizer: Any = self._update.optimizer
        self._watched = watched_modules(options.watched, self._held.training(self._trained).trainable)
        self._store(self.layers.groups(self.model) if self.layers.scan is not False else [])

    def _store(self, groups: list[Siblings]) -> None:
        """Keep states in this layout from now on: entries of these groups of layers are stored together."""
        self._layout = StateLayout(
            self.model,
            self._held,
            self.plan,
            lambda params: self._update.init(params),  # anew each time: JAX keeps the shapes that a function has given
            groups=groups,
            moments=self.optimizer_plan,
            trained=self._trained,
            offloads="optimizer" in self.options.offloaded,
        )
        self.shardings = self._layout.shardings
        refuse_line_search(self._layout.structs.opt_state)
        if self.options.moment_dtype is not None:
            check_moments(self._layout.structs.opt_state)

    @property
    @error_prefix(None)
    def structs(self) -> TrainState:
        """Shape, dtype and sharding of each array of a state; of the key, of its words."""
        refuse_wide(self._held.all)
        structs = self._layout.structs
        return dataclasses.replace(structs, opt_state=self._labeled(structs.opt_state))

    def _labeled(self, opt_state: PyTree, others: Mapping[str, PyTree] | None = None) -> PyTree:
        """The states of all optimizers, where each trains a part of the model; else of the only one."""
        return {**(others or {}), self.options.label: opt_state} if self.options.label else opt_state

    def _own(self, state: TrainState) -> tuple[TrainState, dict[str, PyTree]]:
        """A state with that of this step's optimizer alone, new at its first step; and those of other optimizers."""
        label = self.options.label
        if not label:
            return state, {}
        if type(state.opt_state) is not dict:
            raise ValueError(
                f"{self.caller}: the state is of a step that trains the whole model, and this one trains {label}. Take "
                "one that step.init of a step with trainable= gave."
            )
        others = cast(dict[str, PyTree], state.opt_state)
        if label not in others:
            return self._layout.normal(dataclasses.replace(state, opt_state=self._first(state.params))), others
        own = others[label]
        others = {key: value for key, value in others.items() if key != label}
        return dataclasses.replace(state, opt_state=own), others

    def _first(self, params: Mapping[str, jax.Array]) -> PyTree:
        """The optimizer's state before its first step here."""
        if (found := self._update.present(self._held.trainable)) is not None:
            return found
        with self._cache.active():
            return self._layout.init_opt_state(Stacks.from_dict(params, self._layout.params))

    def _more(self) -> list[str]:
        optimizer = self._update.optimizer
        is_torchs = isinstance(optimizer, torch.optim.Optimizer)
        return [f"optimizer={type(optimizer).__name__ if is_torchs else 'of optax'}"]

    @near_misses
    @error_prefix("init")
    def init(self, *, seed: int = 0) -> TrainState:
        """The state at step 0: the module's present values on their shards, fresh moments, a random key.

        From now on the module's parameters and buffers are those of the run: tensors of the device `jax` that have the
        values of the last state, and what is written to them is in the next step. The values on the CPU go as they are
        placed. An optimizer of torch that has stepped goes on with its moments.

        Args:
            seed: For the random numbers of the run (dropout and its kin), from 0 to 2**32 - 1; not for initial values.

        Returns:
            A `TrainState`.

        Raises:
            ValueError: Entries of the module have no values.
        """
        seed = check_seed(seed)
        self.look_at_model()
        refuse_meta(self._held.all)
        refuse_wide(self._held.all)
        self._update.refuse_replaced(self._held)
        agree_on_values(self._held, self.plan, seed=seed, opt_state=self.structs.opt_state)
        kinds = zip(KINDS, self._held.kinds, strict=True)
        taken = set[int]()
        if not self._leads:
            placed = {kind: self._layout.place(kind, held, taken=taken) for kind, held in kinds}
            return self._begun(placed, seed)
        self._live.settle()
        hold = functools.partial(self._live.hold, tensors=self._held.all)
        try:
            placed = {kind: self._layout.place(kind, held, made=hold, taken=taken) for kind, held in kinds}
            state = self._begun(placed, seed)
        except BaseException:
            self._live.abandon()
            raise
        self.follow(state)
        if names := [*self._live.memory_of_before]:
            logger.warning(
                "init: something still has the memory that %s had on the CPU: a state_dict(), a view or a NumPy array "
                "of before. The model has moved to the devices, and that keeps the values of now, where in torch it "
                "would follow the training. Take it after init, or .clone() it before.",
                ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4),
            )
        return state

    def _begun(self, placed: Mapping[str, Stacks], seed: int) -> TrainState:
        own = self._layout.normal(self._layout.start(placed, self._first(placed["params"]), seed))
        return dataclasses.replace(own, opt_state=self._labeled(own.opt_state))

    def apart(self) -> Self:
        """Leave model and optimizer as they are from now on: nobody follows the states of this step."""
        self._leads = False
        return self

    @contextlib.contextmanager
    def trial(self) -> Generator[None, None, None]:
        """Take steps within that leave model and optimizer as they are."""
        leads, self._leads = self._leads, False
        try:
            yield
        finally:
            self._leads = leads

    def follow(self, state: TrainState, *, is_step: bool = False) -> None:
        """Let the model and the optimizer have the values of a state that was just made.

        Args:
            state: Of this step.
            is_step: Whether a step has made it: the run goes on.
        """
        super().follow(state, is_step=is_step)
        if not is_step:
            self._update.follow(self._opt_state_of(state))
            self._live.note_step(self.options.label, self)

    def _opt_state_of(self, state: TrainState) -> PyTree | None:
        """The state of this step's optimizer, if it is in there."""
        label = self.options.label
        return state.opt_state.get(label) if label else state.opt_state

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizer."""
        return type(self.optimizer).__name__

    @property
    def is_loaded(self) -> bool:
        """Whether the optimizer's state in torch is another one than that of the run."""
        return self._update.is_loaded

    def with_loaded(self, state: TrainState) -> TrainState:
        """A state with what was loaded into the optimizer of torch, or written to its state.

        Args:
            state: Of this step.
        """
        own, others = self._own(state)
        loaded = self._update.loaded(own.opt_state, self._held.trainable)
        if loaded is None:
            with self._cache.active():
                loaded = self._layout.init_opt_state(Stacks.from_dict(own.params, self._layout.params))
            if isinstance(own.opt_state, AverageState):
                loaded = AverageState(loaded.inner, own.opt_state.ema)
        own = self._layout.normal(dataclasses.replace(own, opt_state=loaded))
        self._update.follow_loaded(own.opt_state)
        return dataclasses.replace(own, opt_state=self._labeled(own.opt_state, others))

    @error_prefix(None)
    def start(self, held: Mapping[str, Stacks], *, seed: int) -> TrainState:
        """The state at step 0 with these arrays.

        Args:
            held: `params`, `frozen` and `buffers`, stored as the states of this step are.
            seed: For the random numbers of the run (dropout and its kin).
        """
        with self._cache.active():
            opt_state = self._layout.init_opt_state(held["params"])
        return self._layout.start(held, self._labeled(opt_state), seed)

    @near_misses
    @error_prefix(None)
    def __call__(
        self, state: TrainState, batch: PyTree, *, skip_grad_norm: float | None = None
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """Train by one step.

        Args:
            state: Donated: its arrays are reused for the new state and must not be used again.
            batch: A pytree of CPU tensors, numpy arrays or arrays; global sizes, leading dim split over `batch`; with
                `local_batches=True` the rows of this process's devices.
            skip_grad_norm: Skip the step where the global norm of the gradient is larger, or where the loss or any
                gradient, the norm itself or what would be a buffer is not finite (`math.inf` for that alone):
                parameters, buffers, moments and `step` stay as they were, and only `num_batches` counts on. None takes
                every step.

        Returns:
            The new state, and the metrics: `loss` (before the update), `grad_norm` (global L2 norm) and those of
            `loss_fn`, as scalars or arrays on all devices. With `skip_grad_norm` also `guard`, a `StepCheck`:
            `guard.skipped`, and `guard.non_finite()`, the names of the parameters with a gradient that is not finite.

        Raises:
            ValueError: The batch does not divide over the mesh, the processes do not give one batch together, or the
                state was donated to an earlier step.
        """
        check_skip_grad_norm(skip_grad_norm)
        check_state(state)
        check_apart(self.caller, state)
        if self._leads:
            self._live.note_step(self.options.label, self)
        state = self._present(state, to_train=True)
        own, others = self._own(state)
        self._update.read(self.mesh)
        program, arrays = self._prepare(batch, state, skip_grad_norm)
        own = self._layout.normal(own)  # in the layout that a first capture may have changed
        try:
            new, metrics = program(own, arrays)
        except ValueError as error:
            refuse_misplaced(own, self._layout.shardings, error)
            raise
        new = dataclasses.replace(new, opt_state=self._labeled(new.opt_state, others))
        self._host_buffers.note_kept(program.loss.kept, new)
        if self._leads:
            self.follow(new, is_step=True)
            self._update.follow_step(self._opt_state_of(new), program.loss.without_grad)
        follow(metrics["loss"])
        answer_torch_habits(type(metrics["loss"]))
        if self._leads:
            self._effects.do(program.loss.captured.effects, metrics, self._microbatches.num)
        metrics.pop(EFFECTS, None)
        return new, metrics

    def _normal(self, state: TrainState) -> TrainState:
        return self._layout.normal(self._own(state)[0])

    @property
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return self._update.inputs

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        groups = task.loss.captured.groups
        if task.loss.without_grad:
            logger.info("%s: the loss does not reach %s", self.caller, ", ".join(task.loss.without_grad))
        if not self.programs and any(group.refused for group in groups):
            self._store(groups)  # layers that are not a loop are better stored one by one

        def train_step(
            state: TrainState, batch: list[jax.Array], closure: list[jax.Array]
        ) -> tuple[TrainState, dict[str, PyTree]]:
            out = task.run(state, batch, closure)
            self._layout.check_opt_state(state.opt_state)
            new, check, norms = self._updated(state, out, closure, task)
            metrics = {"loss": out.loss, **out.metrics, **norms}
            if check is None:
                return new, metrics
            return select_state(check.skipped, state, new), {**metrics, "guard": check}

        return train_step, {
            "in_shardings": (self.shardings, task.shardings, self.replicated),
            "out_shardings": (self.shardings, self.replicated),
            "donate_argnums": 0,
        }

    def _updated(
        self, state: TrainState, out: LossOutputs, closure: list[jax.Array], task: Task
    ) -> tuple[TrainState, StepCheck | None, dict[str, jax.Array]]:
        """The state after a step, whether it is to be taken if that is asked, and the norms of the gradients."""
        layout = self._layout
        params = Stacks.from_dict(state.params, layout.params).updated(out.written)
        parts = (Stacks.from_dict(part, layout.trained) for part in (out.grads, params))
        grads, held = (constrain_stacks(part, layout.updated.arrays, self.layout.data_axes) for part in parts)
        buffers, limit, check = Stacks.from_dict(out.buffers, layout.buffers), task.skip_grad_norm, None
        with jax.named_scope("optimizer"):
            norm = global_norm(grads)
            if limit is not None:
                both = Stacks.from_dict(state.buffers, layout.buffers), buffers
                check = check_step(out.loss, grads, norm, skip_grad_norm=limit, buffers=both)
            updated, opt_state = self._update.in_program(
                state,
                self.options.clip(grads, norm),
                held,
                layout=layout,
                inputs=closure,
                loss=out.loss,
                without_grad=task.loss.without_grad,
                transfers=HostTransfers(norm, (held, state.opt_state), check and check.skipped)
                if "optimizer" in self.options.offloaded
                else None,
            )
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=layout.with_trained(params, updated),
            frozen=Stacks.from_dict(state.frozen, layout.frozen).updated(out.written),
            buffers=buffers,
            opt_state=opt_state,
            num_batches=state.num_batches + 1,
        )
        watched = norms_of(self._watched, grads, lambda name: updated[name] - held[name])
        return new, check, {"grad_norm": norm, **watched}

    def update_by_name(
        self,
        state: TrainState,
        grads: Mapping[str, jax.Array],
        params: Mapping[str, jax.Array],
        loss: jax.Array,
        *,
        moved: bool = False,
    ) -> dict[str, jax.Array]:
        """The trainable parameters after one update of a state, which stays as it is.

        Args:
            state: Of this step: the optimizer's state is taken from it.
            grads: Gradients by name, of the shapes of `params`.
            params: Values by name, before the update.
            loss: A scalar, for optimizers that read it.
            moved: By gradients moved by one rounding; the result is empty where the optimizer's rounding is not narrow.
        """
        return self._update.by_name(self._own(state)[0].opt_state, grads, params, loss, moved=moved)

    @functools.cached_property
    def gradient_step(self) -> GradientStep:
        """The program that `prove` compares."""
        return GradientStep(self.model, self.loss_fn, dataclasses.replace(self.options, compiled=None))

    @error_prefix(None)
    def values_on_mesh(self, names: Iterable[str]) -> dict[str, jax.Array]:
        """Present values of the model, by name, on their shards.

        Args:
            names: Of parameters and buffers.

        Raises:
            ValueError: Some of them are on the meta device.
        """
        tensors = {name: self._held.all[name] for name in names}
        refuse_meta(tensors)
        return {name: jnp.copy(put(tensor.detach(), self.plan[name])) for name, tensor in tensors.items()}

    @near_misses
    @error_prefix("averaged")
    def averaged(self, state: TrainState) -> TrainState:
        """The same state with the averages of `ema=` as its parameters, to be evaluated or exported, not trained on.

        Args:
            state: A state of this step, which shares its arrays with the result.

        Raises:
            ValueError: The state has no averages, or was donated to a step.

        Example:
            >>> import torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> model = torch.nn.Linear(4, 1)
            >>> step = ts.make_train_step(
            ...     model, lambda model, batch: model(batch).square().mean(),
            ...     torch.optim.SGD(model.parameters(), lr=0.1), ema=0.9,
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
            >>> evaluate = step.evaluation()
            >>> float(evaluate(step.averaged(state), torch.ones(8, 4))["loss"]) < float(metrics["loss"])
            True
        """
        check_state(state)
        state = self._present(state)
        ema = self._update.average(self._own(state)[0].opt_state)
        others = {name: value for name, value in state.params.items() if name not in ema}
        return dataclasses.replace(state, params=Stacks.merged(others, ema))

    @near_misses
    @error_prefix("export")
    def export(self, state: TrainState, *, ema: bool = False) -> torch.nn.Module:
        """An ordinary torch module on the CPU with the values of `state`; ties and `requires_grad` as in the model.

        It also has the buffers that forward registers at its first call.

        Args:
            state: A state of this step; it is only read.
            ema: With the averages of the parameters, and the buffers as they are.

        Raises:
            TypeError: It is something else.
            ValueError: It was donated to a step, or is of another model; or it has no averages.
        """
        check_kind("ema", ema, bool)
        check_state(state)
        state = self.averaged(state) if ema else self._present(state)
        check_names(state, self._held.all)
        model = with_values(self.model, to_host_by_name(state.tensors))
        for name, buffer, persistent in (
            made for program in self.programs for made in program.loss.captured.made_buffers
        ):
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            if (held := getattr(owner, leaf, None)) is None or held.numel() < buffer.numel():  # for longer batches
                owner.register_buffer(leaf, buffer.clone(), persistent)
        return model
