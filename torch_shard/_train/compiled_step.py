"""The road of every step: a batch onto the mesh, a program for it found or compiled, and run."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torch_shard._capture import Mismatch, is_capturing
from torch_shard._common.caller import error_prefix
from torch_shard._common.progress import telling_when_slow
from torch_shard._common.specs import axes_of
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_module, run_without_dynamo
from torch_shard._cost import TooLarge
from torch_shard._entries import Holdings, LossFn, gradient_hooks, holdings, shared_memory
from torch_shard._hosts import is_shared
from torch_shard._loss import (
    Doing,
    HostBuffers,
    HostValues,
    LossOutputs,
    LossProgram,
    LossSource,
    Microbatches,
    check_activations,
    check_loss_fn,
    loss_program,
    own_copy,
    reads_texts,
)
from torch_shard._lowering import RowSplit, capture_settings
from torch_shard._plans import experts_of
from torch_shard._scan import find_stages
from torch_shard._sharding import check_current_mesh, in_form_of
from torch_shard._state import TrainState, as_arrays, check_names, live_model, refuse_traced, with_key
from torch_shard._train.facts import agree_on_program, facts_of_call, facts_of_step
from torch_shard._train.model_tensors import ModelTensors
from torch_shard._train.options import StepOptions
from torch_shard._train.placing import Placer, ShardedBatch
from torch_shard._train.program_cache import ProgramCache, ProgramKey
from torch_shard._train.programs import CompileCache, StepProgram
from torch_shard._train.saved import read_step

logger = logging.getLogger(__name__)

Body = Callable[[TrainState, list[Any], list[jax.Array]], PyTree]
"""What a program computes: of a state, the leaves of a batch with what the host has computed, and the closure."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a step is to make a body of.

    Attributes:
        loss: The loss.
        run: Gives the outputs of the loss over all microbatches, from what a body is given.
        shardings: Of the leaves of the batch, and of what the host computes.
        skip_grad_norm: The limit of the guard, if there is one.
    """

    loss: LossProgram
    run: Callable[[TrainState, list[jax.Array], list[jax.Array]], LossOutputs]
    shardings: list[Sharding]
    skip_grad_norm: float | None


class CompiledStep:
    """One compiled program per signature of the batch; a kind of step says what its body is."""

    caller: ClassVar[str]
    """The public function that makes it, with whose name its errors begin."""
    train: ClassVar[bool]

    @error_prefix(None)
    def __init__(self, model: torch.nn.Module, loss_fn: LossFn, options: StepOptions) -> None:
        if is_capturing():
            raise NotImplementedError(
                f"{self.caller}: called within a function that is captured, such as a loss or forward. Call it outside."
            )
        self._wrapped, model = model, check_module("model", model)
        check_loss_fn(loss_fn)
        self.model, self.loss_fn, self.options, self.mesh = model, loss_fn, options, options.mesh
        self._held = holdings(model)
        self._live = live_model(model)
        self._leads = True  # the model follows the states that it makes
        self._resolve()
        self._effects = Doing()
        self._microbatches = Microbatches(options.accumulate_steps, self.layout)
        self._cache = CompileCache(options.compile_cache, options.mesh)
        self._saved = None if options.compiled is None else read_step(options.compiled)
        if self._saved is not None:
            self._saved.check(self._facts)
        self.replicated = NamedSharding(options.mesh, PartitionSpec())
        if (names := shared_memory(self._held.all)) is not None:
            raise NotImplementedError(
                f"{self.caller}: {names[0]} and {names[1]} share memory: one is a view of the other, or both are views "
                "of one tensor. On a mesh each has its own. Register a .clone() as one of them, or make the view in "
                "forward."
            )
        self._hold(self._held)
        self._programs = ProgramCache(self.caller)
        self._placer = Placer(self.layout, self._microbatches, must_divide=self.train, local=options.local_batches)
        self.num_compiles = 0
        """Number of programs that were compiled so far."""

    def _resolve(self) -> None:
        """Find what the plans say of this model, and so how batches and layers are laid out."""
        model, options = self.model, self.options
        plan = options.plan.resolve(model, self.mesh)
        asked = options.optimizer_plan
        moments = plan if asked is None else in_form_of(asked, options.plan).resolve(model, self.mesh)
        self._trained = options.trained(self._held)
        layers, self.layout = options.layers(plan, moments, list(self._held.all)), options.batch_layout()
        if plan.pipeline is not None:  # its layers are a loop on each stage
            layers = dataclasses.replace(layers, scan=True)
            groups, data_axes = layers.groups(model), self.layout.data_axes
            stages = find_stages(model, groups, plan, moments=moments, data_axes=data_axes)
            plan, moments = (dataclasses.replace(each, stages=stages) for each in (plan, moments))
            layers = dataclasses.replace(layers, stages=stages)
        self.plan, self.optimizer_plan = plan, moments
        self.layers = layers.decided(model, self.mesh.devices.flat[0].platform)
        check_activations(plan, self.layout.row_axes)
        self._source = LossSource(
            model=model,
            loss_fn=self.loss_fn,
            train=self.train,
            precision=options.precision,
            layers=self.layers,
            plan=plan,
            trained=self._trained,
            accumulate_steps=options.accumulate_steps,
        )

    @property
    def _facts(self) -> dict[str, object]:
        """What its programs are made of, by name."""
        return facts_of_step(self.caller, self.options, self.plan, self._held)

    def _hold(self, held: Holdings) -> None:
        """Be of these tensors of the model."""
        self._held, self._tensors = held, ModelTensors(self.caller, self.model, held)
        self._modules = list(self.model.modules())
        self._host_buffers, self._is_bound = HostBuffers(held.buffers), False

    def look_at_model(self) -> None:
        """Be of what the model has now: a state begins here."""
        self._hold(self._tensors.present())

    def _present(self, state: TrainState, *, to_train: bool = False) -> TrainState:
        """The state with what was written to its model since it was made."""
        if not self._leads:
            return state
        if not self._tensors.are_as_noted():
            self._tensors.check_places()
            self.look_at_model()
            self._live.look()
            self._tensors.note()
        return self._live.present(state, to_train=to_train)

    def follow(self, state: TrainState, *, is_step: bool = False) -> None:
        """Let the model have the values of a state that was just made.

        Args:
            state: Of this step.
            is_step: Whether a step has made it: the run goes on.
        """
        self._live.follow(state, self.plan, is_step=is_step)
        if not self._is_bound:
            self._live.bind()
            run_without_dynamo(self._wrapped)
            self.look_at_model()
            self._tensors.note()
            self._is_bound = True

    @property
    def programs(self) -> tuple[StepProgram, ...]:
        """The last 32 programs, as they were used, to be looked at: `loops`, `collectives`, `memory`, `compiled`.

        Example:
            >>> import optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> step = ts.make_train_step(
            ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
            >>> (program,) = step.programs
            >>> program.loops, program.memory.arguments > 0
            ((), True)
        """
        return tuple(self._programs)

    @property
    def draws_random(self) -> bool:
        """Tell whether a program that was compiled so far draws random numbers."""
        return any(program.loss.random for program in self.programs)

    # ---- the kinds of steps differ in these ----

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        """What a program computes, and the options of `jax.jit` for it."""
        raise NotImplementedError

    @property
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        """What a program is given after what the loss closes over."""
        return ()

    def _normal(self, state: TrainState) -> TrainState:
        """The state as the program takes it."""
        return as_arrays(state)

    # ---- the road ----

    @error_prefix(None)
    def put(self, batch: PyTree) -> ShardedBatch:
        """Put a batch on the mesh ahead of the step, which takes what this returns in place of the batch.

        Args:
            batch: A pytree of CPU tensors, numpy arrays or arrays; global sizes, leading dim split over `batch`; with
                `local_batches=True` the rows of this process's devices. What is there already stays as it is.

        Raises:
            ValueError: It does not divide over the mesh, or the processes do not give one batch together.
        """
        if isinstance(batch, ShardedBatch):
            return batch
        placed = self._placer.put(batch)
        # The user may write to it until the step runs. A program that is yet to come may read it back from the mesh.
        is_asked = not self.programs or any(program.loss.reads_batch for program in self.programs)
        leaves = map(own_copy, placed.leaves) if is_asked else placed.arrays
        return dataclasses.replace(placed, leaves=tuple(leaves))

    def _run(self, batch: PyTree, state: TrainState) -> tuple[StepProgram, PyTree]:
        """Run the program for a batch on a state that is only read, and give it with its results."""
        program, arrays = self._prepare(batch, state)
        return program, program(as_arrays(state), arrays)

    def _prepare(
        self,
        batch: PyTree,
        state: TrainState,
        skip_grad_norm: float | None = None,
        *,
        only_shapes: bool = False,
    ) -> tuple[StepProgram, list[jax.Array]]:
        """The compiled program for this batch and this limit of the gradient norm, and the batch on the mesh.

        With `only_shapes` the batch has shapes alone, and so has what is returned.
        """
        self._tensors.check_requires_grad()
        check_current_mesh()
        placed = batch if isinstance(batch, ShardedBatch) else self._placer.put(batch, only_shapes=only_shapes)
        arrays = placed.arrays
        if any(isinstance(array, Tracer) for array in arrays):  # which do not say how they are split
            if self.train:
                refuse_traced("batch", arrays)
            arrays = self._placer.put(batch, only_shapes=True).arrays
        key, values = self._asked(placed, state, skip_grad_norm)
        program, given = self._programs.find(
            key,
            values,
            capture=functools.partial(self._capture, key, values),
            reads_texts=functools.partial(self._reads_texts, key, values),
            compile_loss=functools.partial(self._compile, key=key, arrays=arrays, of=(state, values)),
            looks=self.options.look_again and not only_shapes,
        )
        return program, [*placed.arrays, *given]

    def _asked(
        self, placed: ShardedBatch, state: TrainState, skip_grad_norm: float | None = None
    ) -> tuple[ProgramKey, HostValues]:
        """What a program for a batch is compiled for, and what Python may ask for."""
        flags = tuple(module.training for module in self._modules) if self.train else ()
        hooks = gradient_hooks(self._held.trainable.values()) if self.train else ()
        values = HostValues(
            placed.leaves,
            placed.signature,
            functools.partial(self._host_buffers.value, state),
            num=self._microbatches.num,
            split=self._microbatches.on_host,
            local=placed.local,
        )
        return ProgramKey(placed.signature, flags, capture_settings(), hooks, skip_grad_norm), values

    # ---- a loss ----

    def _capture(self, key: ProgramKey, values: HostValues, microbatch: int) -> LossProgram:
        self._tensors.present()
        message = "%s: the loss is traced, once for these shapes; XLA compiles it after that."
        with telling_when_slow(logger, message, self.caller):
            loss = loss_program(
                self._source,
                self._microbatches.signature(key.signature),
                values,
                microbatch=microbatch,
                sequence_dims=self._sequence_dims(key),
                rows=self._row_split(),
            )
        later = loss.host.later if loss.host else {}
        if self.options.accumulate_steps > 1 and (changed := set(loss.asked) - {*loss.kept, *later}):
            raise NotImplementedError(
                f"{self.caller}: Python in the model asks for the value of {', '.join(changed)}, which forward writes, "
                "so that the next of several microbatches may need another program. Use accumulate_steps=1."
            )
        return loss

    def _reads_texts(self, key: ProgramKey, values: HostValues, loss: LossProgram) -> bool:
        signature = self._microbatches.signature(key.signature)
        return reads_texts(loss.captured, self._source, signature, values, self._sequence_dims(key))

    def _sequence_dims(self, key: ProgramKey) -> tuple[int | None, ...]:
        return self.layout.sequence_dims([s.shape for s in key.signature.specs], key.signature.paths)

    def _row_split(self) -> RowSplit:
        """The axes over which rows are split; they are to be kept so where parameters are split over these too."""
        rows = self.layout.row_axes
        of_params = {axis for name in self._held.all for axis in axes_of(self.plan[name].spec)}
        kept = self.options.split_activations and (self.plan.context is not None or not of_params.isdisjoint(rows))
        stage = self.plan.pipeline.axis if self.plan.pipeline else None
        return RowSplit(self.mesh, rows, kept, self.plan.context, self._expert_axes(), stage)

    def _expert_axes(self) -> tuple[str, ...]:
        """The axes over which all mixtures of the model have their experts; none if they are not alike."""
        used = dict(self.layers.uses)
        known = {id(entry): name for name, entry in self._held.all.items()}
        matrices = (p for layer in self.model.modules() for p in experts_of(layer).values() if p.ndim == 3)
        names = [known[id(p)] for p in matrices if id(p) in known]
        found = {tuple(axes_of(tuple(used.get(name, self.plan[name].spec))[:1])) for name in names}
        return found.pop() if len(found) == 1 else ()

    # ---- a program of it ----

    def _compile(
        self, loss: LossProgram, *, key: ProgramKey, arrays: list[jax.Array], of: tuple[TrainState, HostValues]
    ) -> StepProgram:
        """A program of a loss for arrays like these.

        Where there is a budget of bytes per device: for a state like this, the one of those that fit into it that
        computes the least again.
        """
        self._check_reach(loss)
        self.num_compiles += 1
        budget, found = self.layers.remat, dict[str, int | TooLarge]()
        if not isinstance(budget, int):
            return self._jitted(loss, key, arrays)
        for choice in self.layers.choices if loss.rolled else self.layers.choices[:1]:
            program = self._jitted(loss.with_remat(choice), key, arrays)
            given = program.fit(of[1])
            assert not isinstance(given, Mismatch)
            with self._cache.active():
                size = found[choice] = program.num_bytes(self._normal(with_key(of[0])), [*arrays, *given])
            if isinstance(size, int) and size <= budget:
                program.report.append(f"remat={choice!r} takes {size} of {budget} bytes per device.")
                logger.info("%s: %s", self.caller, program.report[-1])
                return program
        raise ValueError(
            f"{self.caller}: no choice of remat fits into {budget} bytes per device: "
            + ", ".join(f"{choice!r} takes {size}" for choice, size in found.items())
            + ". Use smaller batches (accumulate_steps=), split more parameters, or raise the budget."
        )

    def _jitted(self, loss: LossProgram, key: ProgramKey, arrays: list[jax.Array]) -> StepProgram:
        over_batch, lines = self._microbatches.run(loss, self.plan)

        def run(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> LossOutputs:
            check_names(state, self._held.all)
            return over_batch(jax.random.fold_in(state.key, state.step), state.tensors, batch, closure)

        shardings = [*(array.sharding for array in arrays), *[self.replicated] * loss.num_given]
        body, how = self._body(Task(loss, run, shardings, key.skip_grad_norm))
        program = StepProgram(
            loss,
            functools.partial(jax.jit, body, **how),
            loss.compiler_options(self.mesh),
            self.replicated,
            self._cache,
            inputs=self._inputs,
            agree=self._agree,
            key=key,
        )
        program.report += lines
        return program

    def _agree(self, program: StepProgram, state: TrainState, arrays: Sequence[PyTree]) -> None:
        """See that a program to be compiled is that of all processes, and take it from the file where there is one."""
        if is_shared(self.mesh):
            key, lowered = program.key, program.lower(state, arrays)
            content = self._placer.content.get(key.signature, {})
            agree_on_program(key, self.plan, content, state, closure=program.tensors, lowered=lowered)
        if self._saved is not None:
            self._saved.check(facts_of_call(program.key))
            self._saved.take(program.lower(state, arrays), self.mesh)

    def _check_reach(self, loss: LossProgram) -> None:
        """Refuse parameters that only some batches reach: torch then keeps a count of steps for each, optax has one."""
        for earlier in self.programs:
            differing = set(earlier.loss.without_grad) ^ set(loss.without_grad)
            if differing:
                raise NotImplementedError(
                    f"{self.caller}: the loss reaches {', '.join(sorted(differing))} for some batches and not for "
                    "others. torch skips a parameter without a gradient, moments and step count included, and an optax "
                    "state cannot. Make the loss reach them always (+ 0 * p.sum()), or make one step per kind of batch "
                    "with the others frozen."
                )
