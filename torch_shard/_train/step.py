"""What a step says of itself and of its programs, and makes of them: reports, previews, exported programs.

The plainest step is here, too: the loss in eval mode.
"""

# optax has no stubs. JAX annotates its functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import optax
from rich.filesize import decimal
from rich.text import Text

from torch_shard._common.caller import error_prefix, near_misses
from torch_shard._common.printed import InNotebooks
from torch_shard._common.specs import describe_mesh, describe_spec
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_file
from torch_shard._cost import Preview, preview_of
from torch_shard._hosts import follow
from torch_shard._lowering import ConstrainedValues
from torch_shard._state import StateLayout, TrainState, check_skip_grad_norm, check_state, with_key
from torch_shard._train.compiled_step import Body, CompiledStep, Task
from torch_shard._train.facts import facts_of_call
from torch_shard._train.programs import StepProgram
from torch_shard._train.saved import entries_of, write_step


class Step(InNotebooks, CompiledStep):
    """A step that can be asked what it is, what it has compiled, and what it would take."""

    def __repr__(self) -> str:
        entries = [entry for entry in self.plan.entries.values() if entry.tied_to is None]
        size = sum(entry.count_bytes(entry.local_shape) or 0 for entry in entries)
        of = [type(self.model).__name__, f"{sum(p.numel() for p in self._held.params.values()):,} parameters"]
        of += [*self._more(), f"mesh={describe_mesh(self.mesh)}", f"{decimal(size)} of entries a device"]
        return f"{type(self).__name__}({', '.join(of)})"

    def __rich__(self) -> Text:
        """What notebooks show: the lines of `repr` and of `report`."""
        return Text(f"{self!r}\n{self.report()}")

    def _more(self) -> list[str]:
        """What else its `repr` says."""
        return []

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
        kept = ((name, self.plan[name].spec, spec) for name, spec in self.layers.uses)
        moved = ((name, describe_spec(own), describe_spec(used)) for name, own, used in kept if own != used)
        layers += [f"{name}: stored as {own}, gathered to {used} in use." for name, own, used in moved]
        return list(dict.fromkeys(layers))

    def _why_none(self) -> str:
        """Say why no layers were looked at."""
        if not self.layers.wanted:
            return f"No layers are loops: {self.layers.why_none}."
        return f"No layers repeat: there are no {self.layers.least} numbered siblings that look alike."

    @error_prefix(None)
    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """JAX's lowered program: `.as_text()`, `.compile().memory_analysis()`, ...

        Args:
            state: A state, or `step.structs`: nothing is run.
            batch: As the step takes it, or shapes of it: tensors on the meta device, `jax.ShapeDtypeStruct`s.
        """
        program, normal, arrays = self._wanted(state, batch)
        return program.lower(normal, arrays)

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
        program, normal, arrays = self._wanted(self.structs if state is None else state, batch)
        return program.export(normal, arrays, platforms)

    @error_prefix("save_compiled")
    def save_compiled(
        self, path: str | os.PathLike[str], batch: PyTree, *, skip_grad_norm: float | None = None
    ) -> None:
        """Compile the step and write it to a file, from which `make_train_step(..., compiled=path)` starts.

        Nothing runs, and it may be compiled for a topology, where there is no device. Save it before the first step: a
        program that has run is compiled once more.

        Args:
            path: Of the file; it is written whole or not at all, by process 0.
            batch: As the step takes it, or shapes of it.
            skip_grad_norm: As a training step takes it; `math.inf` for `fit`, unless that is told otherwise.

        Raises:
            NotImplementedError: JAX keeps no such program: of several CPU devices, or one that calls Python.

        Example:
            >>> import os, tempfile, optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> def make(**options):
            ...     return ts.make_train_step(
            ...         torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
            ...         mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()), **options,
            ...     )
            >>> path = os.path.join(tempfile.mkdtemp(), "step.zip")
            >>> make().save_compiled(path, torch.empty(8, 4, device="meta"))
            >>> step = make(compiled=path)  # in another process
            >>> state, metrics = step(step.init(seed=0), torch.ones(8, 4))
        """
        check_skip_grad_norm(skip_grad_norm)
        file = check_file("path", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        program, normal, arrays = self._wanted(self.structs, batch, skip_grad_norm)
        lowered = program.lower(normal, arrays)
        if (entries := entries_of(lowered, self.mesh)) is None:
            anew = self._jitted(program.loss, program.key, arrays[: len(arrays) - program.loss.num_given])
            entries = entries_of(anew.lower(normal, arrays), self.mesh)
        write_step(file, entries or [], lowered.as_text(), self._facts | facts_of_call(program.key), self.mesh)

    def _wanted(
        self, state: TrainState, batch: PyTree, skip_grad_norm: float | None = None
    ) -> tuple[StepProgram, TrainState, list[jax.Array]]:
        """The program for a state and a batch, or for shapes of them, and what it takes."""
        check_state(state, only_shapes=True)
        program, arrays = self._prepare(batch, state, skip_grad_norm, only_shapes=True)
        return program, self._normal(with_key(state)), arrays

    @functools.cached_property
    def _state_layout(self) -> StateLayout:
        """Of a state without moments."""
        return StateLayout(self.model, self._held, self.plan, optax.identity().init, groups=[])

    @property
    @error_prefix(None)
    def structs(self) -> TrainState:
        """Shape, dtype and sharding of each array of a state; of the key, of its words."""
        return self._state_layout.structs

    @error_prefix("constraints")
    def constraints(self, batch: PyTree) -> ConstrainedValues:
        """Say which values the step lays out on the mesh, and why: nothing is placed, compiled or run.

        A collective that `preview` shows for a module is there to bring a value where one of these wants it, or is the
        compiler's choice for a value that is free.

        Args:
            batch: As the step takes it, or shapes of it, as for `preview`.

        Returns:
            A `ConstrainedValues`, by module; printed, a table.

        Example:
            >>> import optax, torch, torch_shard as ts
            >>> from jax.sharding import PartitionSpec as P
            >>> step = ts.make_train_step(
            ...     torch.nn.Linear(8, 4), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
            ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({"weight": P(None, "batch")}, default=P()),
            ... )
            >>> [(v.value, v.axes, v.why) for v in step.constraints(torch.empty(8, 8, device="meta")).values]
            [('addmm', '0: batch', 'rows stay split')]
        """
        program, _, _ = self._wanted(self.structs, batch)
        return program.loss.constraints

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
        state = self.structs
        program, normal, arrays = self._wanted(state, batch)
        lowered = program.lower(normal, arrays)
        model: Any = self.model
        paths = [type(model).__name__, *dict(model.named_modules())]
        notes, why = self._notes(self.programs[-1:]), program.loss.constraints.why
        with self._cache.active():
            return preview_of(lowered, state, arrays, plan=self.plan, paths=paths, notes=notes, why=why)


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
        program, metrics = self._run(batch, self._present(state))
        follow(metrics["loss"])
        self._effects.do(program.loss.captured.effects, metrics, 1)
        return metrics

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        def evaluate(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> dict[str, PyTree]:
            out = task.run(state, batch, closure)
            return {"loss": out.loss, **out.metrics}

        return evaluate, {"out_shardings": self.replicated}
