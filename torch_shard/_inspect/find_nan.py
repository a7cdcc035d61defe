"""The first value of a step that is not finite, by name: eager torch repeats the step, and each call is looked at."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torch_shard._common.caller import public
from torch_shard._common.fx import tensors_in
from torch_shard._common.printed import aligned, replacing
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._inspect.origins import Origin, Origins
from torch_shard._loss import array_paths, flatten_batch
from torch_shard._state import TrainState, as_arrays, check_state, global_norm, present_state
from torch_shard._train import ModuleStats, Numbers, Replay, ShardedBatch, TrainStep, array_of

Place = Literal["", "batch", "parameter", "buffer", "constant", "forward", "backward", "norm", "update", "step"]

NUM_MODULES = 20
"""How many modules before the place a report has."""


@dataclasses.dataclass(frozen=True)
class NanReport:
    """Where a step stopped being finite, as `find_nan` found it; False if it did not.

    Attributes:
        place: "forward" or "backward" for a call of torch or its derivative; "batch", "parameter", "buffer" or
            "constant" for an input that was not finite before; "norm" where the gradients are finite and their norm
            overflows; "update" where the optimizer makes a parameter not finite; "step" where eager torch is finite
            and the step is not; empty if all is finite.
        module: The innermost module in the model, such as "layers.17.mlp"; "loss_fn" outside of all, and the class of
            the model itself for its own forward.
        name: The operator, such as "log"; of an input, its name or its path in the batch.
        value: "NaN", "infinity" or "minus infinity".
        line: The user's line that made the call.
        given: What the operator was given: shapes, dtypes, from where to where the entries go.
        microbatch: Which one, from 0, of `num_microbatches`.
        num_microbatches: As `accumulate_steps`.
        before: The last modules that ended before, the last one last; for "backward", in the order of their gradients.
        loss: Of the step; of the microbatch in eager torch, where the step was not run.
        eager_loss: Of the microbatch in eager torch, or the mean of all.
        notes: What else is to be said, as sentences.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> report = ts.find_nan(step, step.init(seed=0), torch.full((8, 4), torch.inf))
        >>> bool(report), report.place, report.name
        (True, 'batch', 'batch')
    """

    place: Place = ""
    module: str = ""
    name: str = ""
    value: str = ""
    line: str = ""
    given: tuple[str, ...] = ()
    microbatch: int = 0
    num_microbatches: int = 1
    before: tuple[ModuleStats, ...] = ()
    loss: float = math.nan
    eager_loss: float = math.nan
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.place)

    @property
    def sentence(self) -> str:
        """The place in one sentence, without a stop."""
        where = f"{self.name} in {self.module} ({self.line})"
        match self.place:
            case "forward":
                return f"The first {self.value} is a result of {where}"
            case "backward":
                return f"The first value that is not finite is in the gradient of {where}"
            case "batch":
                return f"The batch itself has values that are not finite: {self.value} in {self.name}"
            case "parameter" | "buffer":
                return f"Before the batch, {self.name} of the state had values that are not finite: {self.value}"
            case "constant":
                return f"The first {self.value} is in {self.name}, which is given to torch in {self.module}"
            case "norm":
                return f"All gradients are finite, but their norm overflows; the largest is that of {self.name}"
            case "update":
                return f"All gradients are finite, but the optimizer makes {self.name} {self.value}"
            case "step":
                return "The step has values that are not finite, and eager torch on the CPU has none"
            case _:
                return "All values of this step are finite"

    def __str__(self) -> str:
        is_of_one = self.num_microbatches > 1 and self.place in ("batch", "constant", "forward", "backward")
        part = f" (microbatch {self.microbatch + 1} of {self.num_microbatches})" * is_of_one
        lines = [f"{self.sentence}{part}."]
        lines += [f"  given {text}" for text in self.given]
        lines += self.notes
        if self.before:
            what = "gradients of modules" if self.place == "backward" else "modules"
            lines += ["", f"The {what} before it, the last one last:"]
            rows = [_row(m, m.gradient if self.place == "backward" else m.output) for m in self.before]
            lines += [f"  {line}" for line in aligned(rows)]
        lines += ["", f"Loss: {self.loss:.6g} in the step, {self.eager_loss:.6g} in eager torch on the CPU."]
        return "\n".join(lines)


def _row(module: ModuleStats, numbers: Numbers | None) -> tuple[str, ...]:
    about = (f"{numbers.shape} {str(numbers.dtype)[6:]}", f"largest {numbers.largest:.4g}") if numbers else ("", "")
    return module.name, module.kind, *about


@public
def find_nan(step: TrainStep, state: TrainState, batch: PyTree) -> NanReport:
    """Repeat a step and name the first module, operator and line where a value stopped being finite.

    The step runs once more, without the update of `state`, and eager torch repeats it on the CPU with the same
    microbatches and random numbers, where each call, forward and backward, is looked at. An infinity that the code
    writes itself (`masked_fill(mask, -inf)`) is not counted, nor one that vanishes again. It takes the time to compile
    the gradients, and memory for the model on the CPU; steps cost nothing more. Of several processes, all must call it.

    Args:
        step: From `make_train_step`.
        state: As it was before the step; it is only read. `BadStepError.state` is one.
        batch: As the step takes it.

    Returns:
        A `NanReport`, to be printed; it is False if all values are finite.

    Raises:
        TypeError: `step` or `state` is something else.
        ValueError: The state was donated to a step, or is of another model; or the batch does not fit.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> def loss_fn(model, batch):
        ...     return torch.log(model(batch).relu() * 0).sum()
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), loss_fn, optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> report = ts.find_nan(step, step.init(seed=0), torch.ones(8, 4))
        >>> report.place, report.module, report.name, report.value
        ('forward', 'loss_fn', 'log', 'minus infinity')
    """
    check_kind("step", step, TrainStep, hint="make_train_step gives one.")
    check_kind("state", state, TrainState, hint="step.init(seed=0) gives one.")
    check_state(state)
    state, placed = as_arrays(present_state(state)), step.put(batch)
    out = step.gradient_step(state, placed)
    found = replay(step, state, placed)
    found = dataclasses.replace(found, loss=float(array_of(out["loss"])))
    if found:
        return found
    return _of_step(found, out) or _after_gradients(step, state, out, found)


def replay(step: TrainStep, state: TrainState, placed: ShardedBatch) -> NanReport:
    """Look for the place in eager torch alone; `loss` is that of eager torch."""
    found = _replay(Replay(step.gradient_step, state, placed))
    if found.place not in ("forward", "backward"):
        return found
    notes, dtype = [*found.notes], step.options.compute_dtype
    if dtype is not None:
        precision = dataclasses.replace(step.options.precision, dtype=None)
        again = _replay(Replay(step.gradient_step, state, placed, precision=precision))
        words = "it is there as well" if again else f"all is finite, with the loss {again.loss:.6g}"
        notes.append(f"This is what eager torch has with compute_dtype={dtype}; without it, {words}.")
    return dataclasses.replace(found, notes=(*notes, *_loop(step, found.module)))


def _replay(run: Replay) -> NanReport:
    losses = list[float]()
    for number, batch in enumerate(run):
        look = Origins(run.model, dict(zip(array_paths(batch), tensors_in(batch), strict=False)))
        with look.modules.active(), look:
            loss, _ = run.forward(batch)
        losses.append(float(loss.detach()))
        origin = look.of(loss) or next(filter(None, map(look.of, run.model.buffers())), None)
        if origin is None or math.isfinite(losses[-1]):
            run.backward(loss)
            origin = look.of_gradients() or origin
        if origin is not None:
            return _report(look, origin, number, len(run), losses[-1])
    mean = float(np.mean(losses))
    return NanReport(num_microbatches=len(run), loss=mean, eager_loss=mean)


def _report(look: Origins, origin: Origin, number: int, num: int, loss: float) -> NanReport:
    root = origin.root
    place: Place = {"call": "forward", "gradient": "backward", "asked": "forward"}.get(root.kind, root.kind)  # pyright: ignore
    ended = [look.modules.rows[at] for at in look.modules.with_gradient] if place == "backward" else look.modules.rows
    notes = [] if root.kind != "asked" else ["The code writes this infinity, and nothing takes it away again."]
    if root is not origin:
        notes.append(f"The first {origin.value} is a result of {origin.name} in {origin.module} ({origin.line}).")
    elif origin.cause is not None:
        made = "the code itself" if origin.cause.kind == "asked" else f"{origin.cause.kind} {origin.cause.name}"
        notes.append(f"The operator was given {origin.cause.value} by {made}.")
    return NanReport(
        place=place,
        module=root.module,
        name=root.name,
        value=root.value,
        line=root.line,
        given=root.given,
        microbatch=number,
        num_microbatches=num,
        before=tuple(ended[: root.order][-NUM_MODULES:]),
        loss=loss,
        eager_loss=loss,
        notes=tuple(notes),
    )


def _loop(step: TrainStep, module: str) -> list[str]:
    """Say which iteration of a loop a module is, if it is in one."""
    loops = (loop for program in (*step.programs, *step.gradient_step.programs) for loop in program.loops)
    for loop in loops:
        for number, layer in enumerate(loop.layers):
            if f"{module}.".startswith(f"{layer}.") and not loop.is_backward:
                return [f"The step runs {layer} as iteration {number} of a loop over {len(loop.layers)} layers."]
    return []


def _of_step(found: NanReport, out: Mapping[str, PyTree]) -> NanReport | None:
    """The report where the step is not finite and eager torch is."""
    parts = {"gradient": out["grads"], "buffer": {**out["buffers"], **out["written"]}}
    wrong = [f"{kind} {n}" for kind, part in parts.items() for n, value in part.items() if not _is_finite(value)]
    if math.isfinite(found.loss) and not wrong:
        return None
    note = f"In the step {', '.join(wrong[:4]) or 'the loss'} {'are' if len(wrong) > 1 else 'is'} not finite."
    advice = "step.prove(state, batch) compares all values of the step with eager torch."
    return dataclasses.replace(found, place="step", value="NaN", notes=(note, advice))


def _after_gradients(step: TrainStep, state: TrainState, out: Mapping[str, PyTree], found: NanReport) -> NanReport:
    """The report where loss and gradients are finite, and what is made of them is not."""
    grads: dict[str, jax.Array] = out["grads"]
    sizes = {name: float(np.abs(array_of(grad)).max(initial=0)) for name, grad in grads.items()}
    place, name, value = "norm", max(sizes, key=sizes.__getitem__, default=""), "infinity"
    if _is_finite(global_norm(grads)):
        held = {**dict(state.params), **out["written"]}
        updated = step.update_by_name(state, grads, {name: held[name] for name in grads}, out["loss"])
        wrong = [name for name, parameter in updated.items() if not _is_finite(parameter)]
        if not wrong:
            return found
        place, name, value = "update", wrong[0], "not finite"
    given = (f"the gradient of {name}: its largest entry is {sizes[name]:.4g}",)
    return dataclasses.replace(found, place=place, name=name, value=value, given=given)


def _is_finite(value: jax.Array) -> bool:
    return bool(np.isfinite(array_of(value).astype(np.complex128)).all())


BAD_BATCH = "bad_batch.safetensors"


def save_bad_batch(step: TrainStep, placed: ShardedBatch, directory: Path) -> Path:
    """Write the whole batch, its leaves by their places in it; every process must call this, and the first writes."""
    leaves, path = step.gradient_step.on_host(placed), directory / BAD_BATCH
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            named = zip(placed.signature.paths, leaves, strict=True)
            save_file({name: leaf.contiguous() for name, leaf in named}, partial)
    return path


def read_bad_batch(directory: Path, like: PyTree) -> PyTree:
    """The batch of a bad step.

    Args:
        directory: Where `fit(on_bad_step="explain")` has kept it.
        like: A batch of the same structure.
    """
    path = directory / BAD_BATCH
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {BAD_BATCH}: fit(on_bad_step='explain') writes it.")
    try:
        leaves = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    paths = array_paths(like)
    if sorted(paths) != sorted(leaves):
        raise ValueError(f"the batch has {', '.join(leaves)}, and that of the step {', '.join(paths)}")
    _, signature = flatten_batch(like)
    return signature.rebuild([leaves[path] for path in paths])
