"""The first value of a step that is not finite, by name: eager torch repeats the step, and each call is looked at."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import current_user_line
from torch_shard._common.caller import public
from torch_shard._common.fx import tensors_in
from torch_shard._common.printed import replacing
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._loss import array_paths, flatten_batch
from torch_shard._state import TrainState, as_arrays, check_state, global_norm, present_state
from torch_shard._train import ModuleCalls, Replay, ShardedBatch, TrainStep, array_of, numbers_in, unseen

Place = Literal["", "batch", "parameter", "buffer", "constant", "forward", "backward", "norm", "update", "step"]


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
        part = f" (microbatch {self.microbatch + 1} of {self.num_microbatches})" if is_of_one else ""
        lines = [f"{self.sentence}{part}."]
        lines += [f"  given {text}" for text in self.given]
        lines += self.notes
        lines += ["", f"Loss: {self.loss:.6g} in the step, {self.eager_loss:.6g} in eager torch on the CPU."]
        return "\n".join(lines)


@public
def find_nan(step: TrainStep, state: TrainState, batch: PyTree) -> NanReport:
    """Repeat a step and name the first module, operator and line where a value stopped being finite.

    The step runs once more, without the update of `state`, and eager torch repeats it on the CPU with the same
    microbatches and random numbers, where each call, forward and backward, is looked at. An infinity that the code
    writes itself (`masked_fill(mask, -inf)`) is not counted. `step.stats(state, batch)` has the largest entries of what
    each module returns. It takes the time to compile the gradients, and memory for the model on the CPU; steps cost
    nothing more. Of several processes, all must call it.

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
    in_torch = replay(step, state, placed)
    report = dataclasses.replace(in_torch, loss=float(array_of(out["loss"])))
    if report:
        return report
    return _of_step(report, out) or _after_gradients(step, state, out, report)


def replay(step: TrainStep, state: TrainState, placed: ShardedBatch) -> NanReport:
    """Look for the place in eager torch alone; `loss` is that of eager torch."""
    report = _replay(Replay(step.gradient_step, state, placed))
    dtype = step.options.compute_dtype
    if report.place not in ("forward", "backward") or dtype is None:
        return report

    precision = dataclasses.replace(step.options.precision, dtype=None)
    in_float32 = _replay(Replay(step.gradient_step, state, placed, precision=precision))
    words = "it is there as well" if in_float32 else f"all is finite, with the loss {in_float32.loss:.6g}"
    note = f"This is what eager torch has with compute_dtype={dtype}; without it, {words}."
    return dataclasses.replace(report, notes=(*report.notes, note))


def _replay(run: Replay) -> NanReport:
    """Repeat the microbatches up to the first that is not finite."""
    losses = list[float]()
    for number, batch in enumerate(run):
        inputs = _bad_inputs(run.model, batch)
        calls = _Calls(run.model)
        with calls.modules.active(), calls:
            loss, _ = run.forward(batch)
        calls.watch(loss.grad_fn)
        losses.append(float(loss.detach()))

        report = None
        bad_buffers = [name for name, buffer in run.model.named_buffers() if _worst(buffer)]
        if not math.isfinite(losses[-1]) or any(name not in inputs for name in bad_buffers):
            report = _of_inputs(inputs) or _of_forward(calls, losses[-1])
        else:
            run.backward(loss)
            bad_gradients = [name for name, p in run.model.named_parameters() if p.grad is not None and _worst(p.grad)]
            if bad_gradients:
                report = _of_inputs(inputs) or _of_backward(calls, bad_gradients)

        if report is not None:
            sizes = {"microbatch": number, "num_microbatches": len(run)}
            return dataclasses.replace(report, **sizes, loss=losses[-1], eager_loss=losses[-1])
    mean = float(np.mean(losses))
    return NanReport(num_microbatches=len(run), loss=mean, eager_loss=mean)


def _bad_inputs(model: nn.Module, batch: PyTree) -> dict[str, tuple[Place, str]]:
    """What is not finite before the first call, by name: what it is, and its worst value."""
    leaves = dict(zip(array_paths(batch), tensors_in(batch), strict=False))
    tensors: dict[Place, dict[str, torch.Tensor]] = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "batch": leaves,
    }
    return {
        name: (place, value)
        for place, named in tensors.items()
        for name, tensor in named.items()
        if (value := _worst(tensor))
    }


def _of_inputs(inputs: Mapping[str, tuple[Place, str]]) -> NanReport | None:
    """The report of the first input that was not finite before."""
    for name, (place, value) in inputs.items():
        # A mask of a batch or of a buffer holds minus infinity on purpose, for a softmax behind it.
        if value != "minus infinity" or place == "parameter":
            return NanReport(place=place, name=name, value=value)
    return None


def _of_forward(calls: _Calls, loss: float) -> NanReport:
    """The report of the first call that made what is not finite."""
    notes = list[str]()
    if calls.forward:
        first = calls.forward[0]
        first_nan = next((call for call in calls.forward if call.value == "NaN"), first)
        if first_nan is not first:
            notes.append(f"The first NaN is a result of {first_nan}.")
    elif calls.written:
        first = calls.written[0]
        notes.append("The code writes this infinity, and nothing takes it away again.")
    else:
        first = _Call("a tensor that no call made", "loss_fn", "", "NaN" if math.isnan(loss) else "infinity")
    place: Place = "constant" if first.name == "a tensor that no call made" else "forward"
    return _report(place, first, notes)


def _of_backward(calls: _Calls, bad_gradients: list[str]) -> NanReport:
    """The report of the first derivative that is not finite though what arrives is."""
    shown = ", ".join(bad_gradients[:4]) + (", ..." if len(bad_gradients) > 4 else "")
    notes = [f"Gradients that are not finite: {shown}."]
    origins = [call for call, was_finite in calls.backward if was_finite]
    if origins:
        return _report("backward", origins[0], notes)

    # Each derivative is finite, but the sum of two overflows; or a hook on a parameter has changed its gradient.
    notes.append("What arrives there is a sum of gradients, or a hook has changed it.")
    late = calls.backward[0][0] if calls.backward else _Call(bad_gradients[0], "the model", "no call", "NaN")
    return _report("backward", late, notes)


def _report(place: Place, call: _Call, notes: list[str]) -> NanReport:
    about = {"module": call.module, "name": call.name, "value": call.value, "line": call.line, "given": call.given}
    return NanReport(place=place, **about, notes=tuple(notes))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of torch: the operator, in which module and line, the worst of its results, and what it was given."""

    name: str
    module: str
    line: str
    value: str = ""
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} in {self.module} ({self.line})"


class _Calls(TorchFunctionMode):
    """Looks at what each call of torch takes and gives, and at the gradients that go back through it.

    torch's anomaly mode (`torch.autograd.detect_anomaly`) looks for NaN in the backward pass alone. The derivative of
    `sqrt` at 0 is an infinity, of which an operator behind it makes NaN: that one would be named.

    Attributes:
        modules: Which module is running.
        forward: Calls that made what is not finite of what was, in order.
        written: Calls that were given an infinity as a number, and gave it.
        backward: Calls with a gradient that is not finite, in order, and whether what arrived was.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = ModuleCalls(model)
        self.forward = list[_Call]()
        self.written = list[_Call]()
        self.backward = list[tuple[_Call, bool]]()
        self._nodes = set[Any]()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "a call")
        if name in ("__get__", "__set__"):  # an attribute: `.data`, `.T`
            return func(*args, **kwargs)

        inputs = tensors_in((args, kwargs))
        before = [_worst(tensor) for tensor in inputs]
        for tensor in inputs:
            self.watch(tensor.grad_fn)
        if "NaN" in before and not self.forward:
            self.forward.append(_Call("a tensor that no call made", self.modules.current, current_user_line(), "NaN"))

        out = func(*args, **kwargs)

        # Inputs again, for a call may write to them: batch_norm writes to buffers that it does not return.
        results = tensors_in(out)
        after = [_worst(tensor) for tensor in inputs]
        changed = [now for was, now in zip(before, after, strict=True) if now != was]
        value = _worst_of([*map(_worst, results), *changed])
        if value is not None:
            unchanged = [tensor for tensor, was, now in zip(inputs, before, after, strict=True) if now == was]
            call = _Call(name, self.modules.current, current_user_line(), value, tuple(map(_describe, unchanged)))
            if value == "NaN" and "NaN" not in before:
                self.forward.append(call)
            elif not any(before):
                leaves = torch_pytree.tree_leaves((args, kwargs))
                by_code = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
                calls = self.written if by_code else self.forward
                calls.append(call)

        for tensor in (*inputs, *results):
            self.watch(tensor.grad_fn, name)
        return out

    def watch(self, node: Any, name: str = "") -> None:
        """Look at the derivatives of a call: its node of autograd, and those behind it that no call before had."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            # The node of a leaf, which has the leaf as `variable`, only adds gradients up.
            if node is None or node in self._nodes or hasattr(node, "variable"):
                continue
            self._nodes.add(node)
            operator = name or node.name().removesuffix("Backward0")
            call = _Call(operator, self.modules.current, current_user_line())
            node.register_hook(functools.partial(self._look, call))
            waiting += [following for following, _ in node.next_functions]

    def _look(self, call: _Call, gradients: PyTree, cotangents: PyTree) -> None:
        value = _worst_of(map(_worst, tensors_in(gradients)))
        if value is None:
            return
        arrived = tensors_in(cotangents)
        was_finite = not any(map(_worst, arrived))
        given = tuple(f"the gradient that arrives: {_describe(tensor)}" for tensor in arrived)
        self.backward.append((dataclasses.replace(call, value=value, given=given), was_finite))


@unseen()
def _describe(tensor: torch.Tensor) -> str:
    """A tensor in a few words: shape, dtype, and from where to where its entries go."""
    said = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    numbers = numbers_in(tensor)
    if numbers is None or numbers.is_complex():
        return said
    finite = numbers[numbers.isfinite()]
    if finite.numel():
        said += f" from {float(finite.min()):.4g} to {float(finite.max()):.4g}"
    wrong = numbers.numel() - finite.numel()
    return said + (f", {wrong} of {numbers.numel()} entries not finite" if wrong else "")


@unseen()
def _worst(tensor: torch.Tensor) -> str | None:
    """The worst that is in a tensor; None if all is finite."""
    numbers = numbers_in(tensor)
    if numbers is None or bool(numbers.isfinite().all()):
        return None
    if bool(numbers.isnan().any()):
        return "NaN"
    return "infinity" if numbers.is_complex() or bool((numbers == math.inf).any()) else "minus infinity"


def _worst_of(values: Iterable[str | None]) -> str | None:
    """NaN before any infinity."""
    bad = [value for value in values if value is not None]
    return "NaN" if "NaN" in bad else next(iter(bad), None)


def _of_step(report: NanReport, out: Mapping[str, PyTree]) -> NanReport | None:
    """The report where the step is not finite and eager torch is."""
    parts = {"gradient": out["grads"], "buffer": {**out["buffers"], **out["written"]}}
    wrong = [f"{kind} {n}" for kind, part in parts.items() for n, value in part.items() if not _is_finite(value)]
    if math.isfinite(report.loss) and not wrong:
        return None
    note = f"In the step {', '.join(wrong[:4]) or 'the loss'} {'are' if len(wrong) > 1 else 'is'} not finite."
    advice = "step.prove(state, batch) compares all values of the step with eager torch."
    return dataclasses.replace(report, place="step", value="NaN", notes=(note, advice))


def _after_gradients(step: TrainStep, state: TrainState, out: Mapping[str, PyTree], report: NanReport) -> NanReport:
    """The report where loss and gradients are finite, and what is made of them is not."""
    grads: dict[str, jax.Array] = out["grads"]
    largest = {name: float(np.abs(array_of(grad)).max(initial=0)) for name, grad in grads.items()}
    place, name, value = "norm", max(largest, key=largest.__getitem__, default=""), "infinity"

    if _is_finite(global_norm(grads)):
        entries = {**dict(state.params), **out["written"]}
        params = {name: entries[name] for name in grads}
        updated = step.update_by_name(state, grads, params, out["loss"])
        wrong = [name for name, parameter in updated.items() if not _is_finite(parameter)]
        if not wrong:
            return report
        place, name, value = "update", wrong[0], "not finite"

    given = (f"the gradient of {name}: its largest entry is {largest[name]:.4g}",)
    return dataclasses.replace(report, place=place, name=name, value=value, given=given)


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
