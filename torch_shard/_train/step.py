"""The common part of training and evaluation: batches onto the mesh, one compiled program per signature."""

# optax has no stubs.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.export
import optax
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from rich.filesize import decimal

from torch_shard._capture import Mismatch, is_capturing
from torch_shard._common.caller import error_prefix
from torch_shard._common.types import PyTree
from torch_shard._common.wrappers import check_module
from torch_shard._cost import Preview, TooLarge, preview_of
from torch_shard._device import put
from torch_shard._loss import (
    HostBuffers,
    HostValues,
    LossProgram,
    Microbatches,
    check_activations,
    check_loss_fn,
    loss_program,
    own_copy,
)
from torch_shard._lowering import RowSplit, capture_settings
from torch_shard._plans import experts_of, layers_of
from torch_shard._scan import LayerOptions, find_stages
from torch_shard._sharding import (
    Holdings,
    LossFn,
    ResolvedPlan,
    axes_of,
    check_current_mesh,
    describe_mesh,
    describe_spec,
    gradient_hooks,
    holdings,
    in_form_of,
    shared_memory,
)
from torch_shard._state import StateLayout, TrainState, as_arrays, check_state, with_key
from torch_shard._train.compile_cache import CompileCache
from torch_shard._train.facts import FirstRows, agree_on_program
from torch_shard._train.model_tensors import ModelTensors
from torch_shard._train.options import StepOptions
from torch_shard._train.placing import Placer, ShardedBatch
from torch_shard._train.program_cache import ProgramCache, ProgramKey, Served
from torch_shard._train.programs import StepProgram

logger = logging.getLogger(__name__)


class Step:
    """The common part of training and evaluation: one compiled program per signature of the batch."""

    caller: ClassVar[str]
    """The public function that makes it, with whose name its errors begin."""
    train: ClassVar[bool]

    @error_prefix(None)
    def __init__(self, model: torch.nn.Module, loss_fn: LossFn, options: StepOptions) -> None:
        if is_capturing():
            raise NotImplementedError(
                f"{self.caller}: called within a function that is captured, such as a loss or forward. Call it outside."
            )
        model = check_module("model", model)
        check_loss_fn(loss_fn)
        self.model, self.loss_fn, self.options, self.mesh = model, loss_fn, options, options.mesh
        self.plan: ResolvedPlan = options.plan.resolve(model, options.mesh)
        asked = options.optimizer_plan
        self.optimizer_plan = (
            self.plan if asked is None else in_form_of(asked, options.plan).resolve(model, options.mesh)
        )
        self._held = holdings(model)
        self._trained = options.trained(self._held)
        platform = options.mesh.devices.flat[0].platform
        layers = options.layers(self.plan, self.optimizer_plan, list(self._held.all))
        self.layout = options.batch_layout()
        self.plan, self.optimizer_plan, layers = self._with_stages(layers)
        self.layers = layers.decided(model, platform)
        check_activations(self.plan, self.layout.row_axes)
        self._microbatches = Microbatches(options.accumulate_steps, self.layout)
        self._cache = CompileCache(options.compile_cache, options.mesh)
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
        self.first_rows = FirstRows(options.mesh, local=options.local_batches)
        self.num_compiles = 0
        """Number of programs that were compiled so far."""

    def _hold(self, held: Holdings) -> None:
        """Be of these tensors of the model, with the values that they have now."""
        self._held, self._tensors = held, ModelTensors(self.caller, self.model, held)
        self._modules = list(self.model.modules())
        self._host_buffers = HostBuffers(held.buffers)

    def _with_stages(self, layers: LayerOptions) -> tuple[ResolvedPlan, ResolvedPlan, LayerOptions]:
        """The plans with the layers that are stages of a pipeline, if there is one; these then are a loop."""
        if self.plan.pipeline is None:
            return self.plan, self.optimizer_plan, layers
        layers = dataclasses.replace(layers, scan=True)
        groups, data_axes = layers.groups(self.model), self.layout.data_axes
        stages = find_stages(self.model, groups, self.plan, moments=self.optimizer_plan, data_axes=data_axes)
        plan, moments = (dataclasses.replace(plan, stages=stages) for plan in (self.plan, self.optimizer_plan))
        return plan, moments, dataclasses.replace(layers, stages=stages)

    def __repr__(self) -> str:
        entries = [entry for entry in self.plan.entries.values() if entry.tied_to is None]
        size = sum(entry.count_bytes(entry.local_shape) or 0 for entry in entries)
        of = [type(self.model).__name__, f"{sum(p.numel() for p in self._held.params.values()):,} parameters"]
        of += [*self._more(), f"mesh={describe_mesh(self.mesh)}", f"{decimal(size)} of entries a device"]
        return f"{type(self).__name__}({', '.join(of)})"

    def _more(self) -> list[str]:
        """What else its `repr` says."""
        return []

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
        return any(program.random for program in self.programs)

    def _prepare(
        self,
        batch: PyTree,
        state: TrainState | None = None,
        skip_grad_norm: float | None = None,
        *,
        only_shapes: bool = False,
    ) -> tuple[StepProgram, list[jax.Array]]:
        """The compiled program for this batch and this limit of the gradient norm, and the batch on the mesh.

        With `only_shapes` the batch has shapes alone, and so has what is returned.
        """
        self._tensors.check_requires_grad()
        if not only_shapes:
            self._tensors.check_values(state)
        check_current_mesh()
        placed = batch if isinstance(batch, ShardedBatch) else self._put(batch, only_shapes=only_shapes)
        flags = tuple(module.training for module in self._modules) if self.train else ()
        hooks = gradient_hooks(self._held.trainable.values()) if self.train else ()
        key = ProgramKey(placed.signature, flags, capture_settings(), hooks, skip_grad_norm)
        values = HostValues(
            placed.leaves,
            placed.signature,
            functools.partial(self._host_buffers.value, state),
            num=self._microbatches.num,
            split=self._microbatches.on_host,
            local=placed.local,
        )
        found = self._programs.find(key, values, functools.partial(self._capture, key, values))
        if isinstance(found, Served):
            looks = found.is_as_it_was and self.options.look_again and not only_shapes
            if looks and found.program.looks.is_due():
                found.program.loss.look_again(values)
            return found.program, [*placed.arrays, *found.given]
        arrays = placed.arrays
        if any(isinstance(array, Tracer) for array in arrays):  # which do not say how they are split
            arrays = self._put(batch, only_shapes=True).arrays
        program, given = self._compile(key, arrays, state, values, loss=found.loss)
        if found.why:
            logger.info("%s compiles again: %s", self.caller, found.why)
        self._programs.keep(key, program)
        self.num_compiles += 1
        return program, [*placed.arrays, *given]

    @error_prefix(None)
    def put(self, batch: PyTree) -> ShardedBatch:
        """Put a batch on the mesh ahead of the step, which takes what this returns in place of the batch.

        Args:
            batch: A pytree of CPU tensors, numpy arrays or arrays; global sizes, leading dim split over `batch`; with
                `local_batches=True` the rows of this process's devices.

        Raises:
            ValueError: It does not divide over the mesh, or the processes do not give one batch together.
        """
        placed = self._put(batch)
        # The user may write to it until the step runs. A program that is yet to come may read it back from the mesh.
        is_asked = not self.programs or any(program.reads_batch for program in self.programs)
        leaves = map(own_copy, placed.leaves) if is_asked else placed.arrays
        return dataclasses.replace(placed, leaves=tuple(leaves))

    def _put(self, batch: PyTree, *, only_shapes: bool = False) -> ShardedBatch:
        placed = self._placer.put(batch, only_shapes=only_shapes)
        if not only_shapes:
            self.first_rows.note(batch, placed.signature)
        return placed

    def _capture(self, key: ProgramKey, values: HostValues, microbatch: int) -> LossProgram:
        self._tensors.present()
        loss = loss_program(
            self.model,
            self.loss_fn,
            self._microbatches.signature(key.signature),
            precision=self.options.precision,
            train=self.train,
            layers=self.layers,
            values=values,
            plan=self.plan,
            microbatch=microbatch,
            trained=self._trained,
            sequence_dims=self.layout.sequence_dims([s.shape for s in key.signature.specs], key.signature.paths),
            rows=self._row_split(),
        )
        later = loss.host.later if loss.host else {}
        if self.options.accumulate_steps > 1 and (changed := set(loss.asked) - {*loss.kept, *later}):
            raise NotImplementedError(
                f"{self.caller}: Python in the model asks for the value of {', '.join(changed)}, which forward writes, "
                "so that the next of several microbatches may need another program. Use accumulate_steps=1."
            )
        return loss

    def _compile(
        self,
        key: ProgramKey,
        placed: list[jax.Array],
        state: TrainState | None,
        values: HostValues,
        *,
        loss: LossProgram,
    ) -> tuple[StepProgram, list[jax.Array]]:
        given = loss.fit(values)
        assert not isinstance(given, Mismatch)
        placed = [*placed, *(put(tensor, self.replicated) for tensor in given)]
        self._check_reach(loss)
        if isinstance(self.layers.remat, int):
            assert state is not None
            program = self._within(self.layers.remat, loss, state, placed, skip_grad_norm=key.skip_grad_norm)
        else:
            program = self._jitted(loss, placed, key.skip_grad_norm)
        program.agree = functools.partial(agree_on_program, key, self.plan, self.first_rows)
        return program, placed[len(placed) - len(given) :]

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
        matrices = (p for _, layer in layers_of(self.model) for p in experts_of(layer).values() if p.ndim == 3)
        names = [known[id(p)] for p in matrices if id(p) in known]
        found = {tuple(axes_of(tuple(used.get(name, self.plan[name].spec))[:1])) for name in names}
        return found.pop() if len(found) == 1 else ()

    def _jitted(self, loss: LossProgram, placed: list[jax.Array], skip_grad_norm: float | None) -> StepProgram:
        jitted = self._jit(loss, [array.sharding for array in placed], skip_grad_norm)
        program = StepProgram(loss, jitted, self.replicated, self._cache, inputs=self._inputs)
        program.report += self._microbatches.report(loss, self.plan)
        return program

    def _within(
        self,
        budget: int,
        loss: LossProgram,
        state: TrainState,
        placed: list[jax.Array],
        *,
        skip_grad_norm: float | None,
    ) -> StepProgram:
        """The program that computes the least again of those that fit into a budget of bytes per device."""
        found: dict[str, int | TooLarge] = {}
        for choice in self.layers.choices if loss.rolled else self.layers.choices[:1]:
            program = self._jitted(loss.with_remat(choice), placed, skip_grad_norm)
            with self._cache.active():
                size = found[choice] = program.num_bytes(self._normal(with_key(state)), placed)
            if isinstance(size, int) and size <= budget:
                program.chosen = [f"remat={choice!r} takes {size} of {budget} bytes per device."]
                logger.info("%s: %s", self.caller, program.chosen[0])
                return program
        raise ValueError(
            f"{self.caller}: no choice of remat fits into {budget} bytes per device: "
            + ", ".join(f"{choice!r} takes {size}" for choice, size in found.items())
            + ". Use smaller batches (accumulate_steps=), split more parameters, or raise the budget."
        )

    @property
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        """Numbers that a program is given after what the loss closes over."""
        return ()

    def _check_reach(self, loss: LossProgram) -> None:
        """Refuse parameters that only some batches reach: torch then keeps a count of steps for each, optax has one."""
        for earlier in self.programs:
            differing = set(earlier.without_grad) ^ set(loss.without_grad)
            if differing and self.train:
                raise NotImplementedError(
                    f"{self.caller}: the loss reaches {', '.join(sorted(differing))} for some batches and not for "
                    "others. torch skips a parameter without a gradient, moments and step count included, and an optax "
                    "state cannot. Make the loss reach them always (+ 0 * p.sum()), or make one step per kind of batch "
                    "with the others frozen."
                )

    def _jit(
        self, program: LossProgram, batch_shardings: list[jax.sharding.Sharding], skip_grad_norm: float | None
    ) -> Callable[..., PyTree]:
        raise NotImplementedError

    def report(self) -> str:
        """Say which layers run as loops in the programs compiled so far, and why the others do not.

        On TPU and GPU, also which attention has no kernel of the device, what it takes instead, and why. With a number
        of bytes as `remat`, also what that chose. On a mesh of three axes, also which entries are gathered where they
        are used: those that the plan splits over several axes in one dim, or over one of several axes of the batch.
        """
        if not self.programs:
            return "Nothing was compiled yet."
        return "\n".join(self._notes(self.programs))

    def _notes(self, programs: Sequence[StepProgram]) -> list[str]:
        """Lines that say how some programs run, and why so."""
        layers = [line for p in programs for line in ([] if p.loss.captured.groups else [self._why_none()]) + p.report]
        more = [line for program in programs for line in program.chosen]
        kept = ((name, self.plan[name].spec, spec) for name, spec in self.layers.uses)
        moved = ((name, describe_spec(own), describe_spec(used)) for name, own, used in kept if own != used)
        more += [f"{name}: stored as {own}, gathered to {used} in use." for name, own, used in moved]
        return list(dict.fromkeys(layers + more))

    def _why_none(self) -> str:
        """Say why no layers were looked at."""
        if not self.layers.wanted:
            return f"No layers are loops: {self.layers.why_none}."
        return f"No layers repeat: there are no {self.layers.least} numbered siblings that look alike."

    def _normal(self, state: TrainState) -> TrainState:
        """The state as the program takes it."""
        return as_arrays(state)

    @error_prefix(None)
    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """JAX's lowered program: `.as_text()`, `.compile().memory_analysis()`, ...

        Args:
            state: A state, or `step.structs`: nothing is run.
            batch: As the step takes it, or shapes of it: tensors on the meta device, `jax.ShapeDtypeStruct`s.
        """
        return self._lowered(state, batch)[0]

    @error_prefix("export_program")
    def export_program(
        self, batch: PyTree, state: TrainState | None = None, *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
    ) -> jax.export.Exported:
        """The step as StableHLO for several platforms, to be kept in a file and run without torch.

        Args:
            batch: As the step takes it, or shapes of it.
            state: A state as it will be given, or shapes of it; by default as this step would make it.
            platforms: For which it is lowered; this machine need not have them.

        Returns:
            JAX's `Exported`, of one list of arrays: the leaves of the state, of the batch, and of what `loss_fn` closes
            over. It gives the leaves of what the step returns. `exported.serialize()` are bytes that
            `jax.export.deserialize` reads.

        Example:
            >>> import jax, optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> step = ts.make_train_step(
            ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
            ... )
            >>> exported = step.export_program(torch.empty(8, 4, device="meta"))
            >>> exported.platforms, exported.nr_devices
            (('cpu', 'cuda', 'tpu'), 2)
        """
        state = self._state_structs() if state is None else state
        check_state(state, only_shapes=True)
        program, arrays = self._prepare(batch, state, only_shapes=True)
        return program.export(self._normal(with_key(state)), arrays, platforms)

    def _lowered(self, state: TrainState, batch: PyTree) -> tuple[jax.stages.Lowered, list[jax.Array]]:
        """The lowered program, and the shapes of the batch that it takes."""
        check_state(state, only_shapes=True)
        program, arrays = self._prepare(batch, state, only_shapes=True)
        return program.lower(self._normal(with_key(state)), arrays), arrays

    @functools.cached_property
    def _state_layout(self) -> StateLayout:
        """Of a state without moments."""
        return StateLayout(self.model, self._held, self.plan, optax.identity().init, groups=[])

    def _state_structs(self) -> TrainState:
        """Shape, dtype and sharding of each array of a state."""
        return self._state_layout.structs

    @error_prefix("preview")
    def preview(self, batch: PyTree) -> Preview:
        """Compile the step and say what it would take of each device: nothing is placed, and nothing runs.

        Args:
            batch: As the step takes it, or shapes of it: tensors on the meta device, `jax.ShapeDtypeStruct`s. The
                model may be on the meta device too, and the mesh of a topology: `make_mesh(topology="v5e:16x16", ...)`.

        Returns:
            A `Preview`: memory by part, collectives, arithmetic and, on TPU, cycles by module; `fits()`, and
            `assert_at_most(...)` for tests. A program that is too large has the memory alone.
        """
        return self.previewing(batch)()

    @error_prefix("preview")
    def previewing(self, batch: PyTree) -> Callable[[], Preview]:
        """The part of a preview that reads the model; the rest, which compiles, may be called in another thread.

        Args:
            batch: As `preview` takes it.
        """
        state = self._state_structs()
        lowered, arrays = self._lowered(state, batch)
        model: Any = self.model
        paths = [type(model).__name__, *dict(model.named_modules())]
        notes = self._notes(self.programs[-1:])

        def rest() -> Preview:
            with self._cache.active():
                return preview_of(lowered, state, arrays, plan=self.plan, paths=paths, notes=notes)

        return rest
