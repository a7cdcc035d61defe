"""A module with a torch loss as one captured program: loss, metrics, gradients and new buffers of named tensors."""

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from torch_shard._attributes import PlainAttributes
from torch_shard._batch import BatchSignature
from torch_shard._capture import Spec
from torch_shard._function import Program, ambient
from torch_shard._guards import Guard
from torch_shard._layers import Siblings
from torch_shard._lower import compiler_options
from torch_shard._module import Holdings, LossFn, call_with, eval_mode, holdings
from torch_shard._regions import Regions
from torch_shard._repeats import Repeats, Rolled, capture_layers, report
from torch_shard._rolled import Row, Rows, array_of
from torch_shard._stacks import Stacks
from torch_shard._watch import ModuleFlags, flags_hold

RESERVED = ("loss", "grad_norm")


@dataclasses.dataclass(frozen=True)
class LossOutputs:
    """What a loss program gives back, as arrays by name."""

    loss: jax.Array
    metrics: dict[str, Any]
    grads: Mapping[str, jax.Array]
    buffers: Mapping[str, jax.Array]
    written: Mapping[str, jax.Array]
    """Parameters that forward wrote in place."""


class LossProgram:
    """A captured loss: `run(key, tensors by name, batch arrays, closure arrays) -> LossOutputs`."""

    def __init__(
        self,
        captured: tuple[Program, Rolled | None, list[Siblings]],
        names: list[str],
        model: torch.nn.Module,
        guard: Guard,
    ) -> None:
        program, rolled, self.groups = captured
        self.report = report(self.groups, rolled)
        self.program, self.rolled, self.names = program, rolled, names
        self.random = program.random if rolled is None else rolled.random
        self.closure = program.graph.closure
        own = {None, *model.modules()}  # None: the scaffold of the capture, gone by now
        self.others: ModuleFlags = tuple((ref, flag) for ref, flag in program.graph.modules if ref() not in own)
        """Modules that ran without being part of the model (a teacher), with their training flags."""
        self._attributes, self._guard = PlainAttributes(model), guard

    def with_remat(self, remat: str) -> "LossProgram":
        """The same program, with another choice of what is computed again in the backward pass."""
        other = copy.copy(self)
        other.rolled = None if self.rolled is None else self.rolled.with_remat(remat)
        return other

    def outdated(self) -> str | None:
        """What has changed since the capture, of all that the signature does not tell; None if nothing has."""
        if not flags_hold(self.others):
            return "a module beside the model was switched between train() and eval()"
        if (name := self._guard.changed()) is not None:
            return f"{name}, which the loss reads, has another value"
        changed = self._attributes.changed()
        return None if changed is None else f"the attribute {changed} has another value"

    @property
    def without_grad(self) -> tuple[str, ...]:
        """Trainable parameters that the loss does not reach; torch leaves their `.grad` None."""
        return self.program.graph.aux.without_grad

    @property
    def grads(self) -> list[str]:
        """Parameters that `run` gives gradients of."""
        return self.program.graph.aux.grads

    @property
    def buffers(self) -> list[str]:
        """Buffers, as `run` gives them."""
        return self.program.graph.aux.buffers

    @property
    def written(self) -> list[str]:
        """What forward writes in place, of parameters and buffers."""
        return [self.names[position] for position in self.program.graph.written if position < len(self.names)]

    def compiler_options(self, mesh: jax.sharding.Mesh) -> dict[str, Any] | None:
        """XLA options that the program needs to be right on these devices."""
        regions = () if self.rolled is None else self.rolled.graphs
        platforms = {device.platform for device in mesh.devices.flat}
        return compiler_options([self.program.graph.module, *regions], platforms)

    def run(
        self,
        key: Any,
        tensors: Mapping[str, jax.Array],
        batch: Sequence[jax.Array],
        closure: Sequence[jax.Array],
    ) -> LossOutputs:
        """To be traced by JAX."""
        inputs = _Inputs(self.names, tensors, [*batch, *closure])
        outputs = self.program.run(key, *inputs.all()) if self.rolled is None else self.rolled.run(key, inputs)
        shape, graph = self.program.graph.aux, self.program.graph
        loss, *rest = outputs[: graph.num_outputs]
        grads, rest = rest[: len(shape.grads)], rest[len(shape.grads) :]
        buffers, metrics = rest[: len(shape.buffers)], rest[len(shape.buffers) :]
        written = {
            self.names[position]: value
            for position, value in zip(graph.written, outputs[graph.num_outputs :], strict=True)
            if position < len(self.names)
        }
        return LossOutputs(
            loss=array_of(loss),
            metrics=jax.tree.unflatten(shape.metrics, map(array_of, metrics)),
            grads=Rows(zip(shape.grads, grads, strict=True)),
            buffers=Rows(zip(shape.buffers, buffers, strict=True)),
            written=Rows(written),
        )


class _Inputs:
    """The inputs of a loss program by number: named tensors, then the batch and the closure."""

    def __init__(self, names: list[str], tensors: Mapping[str, jax.Array], others: list[jax.Array]) -> None:
        self._names, self._tensors, self._others = names, tensors, others

    def __getitem__(self, number: int) -> jax.Array:
        is_named = number < len(self._names)
        return self._tensors[self._names[number]] if is_named else self._others[number - len(self._names)]

    def all(self) -> list[jax.Array]:
        return [self[number] for number in range(len(self._names) + len(self._others))]

    def row(self, number: int) -> Row | None:
        """Of which stack an input is a row, if it is one."""
        if number >= len(self._names) or not isinstance(self._tensors, Stacks):
            return None
        found = self._tensors.row(self._names[number])
        return None if found is None else Row(*found)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """How to read the flat outputs of the capture."""

    grads: list[str]
    buffers: list[str]
    metrics: Any
    without_grad: tuple[str, ...]


_CAPTURED: "weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, LossProgram]]" = weakref.WeakKeyDictionary()


def loss_program(
    model: torch.nn.Module,
    loss_fn: LossFn,
    signature: BatchSignature,
    *,
    compute_dtype: torch.dtype | None = None,
    train: bool,
    caller: str,
    repeats: Repeats,
) -> LossProgram:
    """The program of `loss_fn(model, batch)` for batches like this, captured once per model, loss and signature.

    Args:
        model: Captured with the training flags that it has now, or in eval mode.
        loss_fn: Returns a scalar, or a scalar and a dict of metrics.
        signature: Of the batch.
        compute_dtype: What products run in, by autocast; None for what torch gives.
        train: With gradients; otherwise in eval mode and without.
        caller: The public function, for errors.
        repeats: What to do with repeated layers.
    """
    held = holdings(model)
    entries = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in held.all.items())
    flags = tuple(m.training for m in model.modules()) if train else None
    key = (_identity(loss_fn), signature, entries, flags, compute_dtype, repeats, ambient())
    programs = _CAPTURED.setdefault(model, {})
    if key not in programs or programs[key].outdated():
        options: Any = {"compute_dtype": compute_dtype, "train": train, "caller": caller}
        joint = functools.partial(joint_loss, model, loss_fn, signature, **options)
        what = f"{caller}: the loss"
        guard, captured = Guard(model, loss_fn), capture_layers(model, repeats, joint, what)
        if (name := guard.changed()) is not None:  # a count of calls is harmless unless the loss depends on it
            _refuse_counting(joint, what, name)
            guard = Guard(model, loss_fn)  # it counted once more
        programs[key] = LossProgram(captured, list(held.all), model, guard)
    return programs[key]


def _refuse_counting(joint: Callable[..., Any], what: str, name: str) -> None:
    """Refuse a loss that depends on a value that it changes with each call: two captures then differ."""
    first, second = (Program(*joint(None), what).graph.module.code for _ in range(2))
    if first != second:
        raise NotImplementedError(
            f"{what} changes {name} on each call and depends on it, but a compiled program is the same for every "
            "call. Pass it in the batch, or make it a buffer of the model."
        )


def joint_loss(
    model: torch.nn.Module,
    loss_fn: LossFn,
    signature: BatchSignature,
    regions: Regions | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    train: bool,
    caller: str,
) -> tuple[Callable[..., Any], list[Spec]]:
    """What `loss_program` captures: loss, gradients, buffers and metrics as a torch function, and its inputs."""
    held = holdings(model)
    specs = [Spec(tuple(t.shape), t.dtype, train and n in held.trainable) for n, t in held.all.items()]
    specs += signature.specs
    return _joint(model, loss_fn, held, signature, regions, compute_dtype, train, caller), specs


def _identity(fn: LossFn) -> Any:
    try:
        return weakref.ref(fn)
    except TypeError:
        return fn


def _joint(
    model: torch.nn.Module,
    loss_fn: LossFn,
    held: Holdings,
    signature: BatchSignature,
    regions: Regions | None,
    compute_dtype: torch.dtype | None,
    train: bool,
    caller: str,
) -> Callable[..., Any]:
    """Loss, gradients, buffers and metrics as one flat torch function of `(*tensors, *batch)`."""
    names = list(held.all)
    hooks = {name: _hooks(name, parameter) for name, parameter in held.trainable.items()}

    def forward(module: torch.nn.Module, batch: Sequence[torch.Tensor]) -> Any:
        with torch.autocast("jax", compute_dtype) if compute_dtype else contextlib.nullcontext():
            out = loss_fn(module, signature.rebuild(batch))
        loss, metrics = split_loss(out, caller)
        leaves, tree = jax.tree.flatten(metrics)
        return loss, [torch.as_tensor(x).detach() for x in leaves], tree

    def training(*inputs: torch.Tensor) -> Any:
        tensors = dict(zip(names, inputs, strict=False))
        leaves = {name: tensors[name] for name in hooks}
        for name, found in hooks.items():
            for hook in found:
                leaves[name].register_hook(hook)

        def run(module: torch.nn.Module) -> Any:
            loss, metrics, tree = forward(module, inputs[len(names) :])
            grads, without = _gradients(loss, leaves, caller)
            buffers = _buffers(module, held)
            outputs = [loss.detach(), *grads, *(b.detach() for b in buffers), *metrics]
            return outputs, _Shape(list(leaves), list(held.buffers), tree, without)

        with regions.active() if regions else contextlib.nullcontext():
            return call_with(model, run, tensors)

    def evaluation(*inputs: torch.Tensor) -> Any:
        def run(module: torch.nn.Module) -> Any:
            loss, metrics, tree = forward(module, inputs[len(names) :])
            buffers = _buffers(module, held)
            return [loss, *buffers, *metrics], _Shape([], list(held.buffers), tree, ())

        layers = regions.active() if regions else contextlib.nullcontext()
        with layers, eval_mode(model), torch.no_grad():
            return call_with(model, run, dict(zip(names, inputs, strict=False)))

    return training if train else evaluation


def _buffers(module: torch.nn.Module, held: Holdings) -> list[torch.Tensor]:
    """The buffers as forward left them."""
    now = dict(module.named_buffers())
    for name, before in held.buffers.items():
        after = now.get(name)
        if after is None or (after.shape, after.dtype) != (before.shape, before.dtype):
            what = "removes it" if after is None else f"makes it {tuple(after.shape)} {after.dtype}"
            raise NotImplementedError(
                f"The buffer {name} is {tuple(before.shape)} {before.dtype} and forward {what}, but a compiled program "
                "keeps shapes and dtypes. Give the buffer its largest size at first and write to a part of it."
            )
    return [now[name] for name in held.buffers]


def _hooks(name: str, parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """The gradient hooks of a parameter, to be read before the capture, in which a fake stands for it."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise NotImplementedError(
            f"{name} has a post-accumulate-grad hook, which sees .grad, and a compiled step has none. "
            "Use Tensor.register_hook, or an optax transformation."
        )
    return list((parameter._backward_hooks or {}).values())


def _gradients(loss: torch.Tensor, leaves: dict[str, torch.Tensor], caller: str) -> tuple[Any, tuple[str, ...]]:
    if not loss.requires_grad:
        raise ValueError(
            f"{caller}: the loss does not depend on any trainable parameter. Something between the parameters and the "
            "loss cuts the gradient: .detach(), torch.no_grad(), argmax, or a loss computed from the batch alone."
        )
    found = _derivatives(loss, list(leaves.values()))
    without = tuple(name for name, grad in zip(leaves, found, strict=True) if grad is None)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), found, strict=True)]
    return grads, without


def _derivatives(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Gradients; by `backward` where only that will do, which costs the capture a node for each."""
    if not _has_reentrant_checkpoint(loss):
        return torch.autograd.grad(loss, leaves, allow_unused=True)
    loss.backward()
    return [leaf.grad for leaf in leaves]


def _has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        todo += [after for after, _ in node.next_functions]
    return False


def split_loss(out: Any, caller: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a loss function returned as a scalar and metrics, or an error that says what it should return."""
    pair: Any = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    loss, metrics = pair
    is_scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    if not is_scalar or not isinstance(metrics, dict):
        found = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        also = "" if isinstance(metrics, dict) else f" and metrics of type {type(metrics).__name__}"
        raise TypeError(
            f"{caller}: loss_fn must return a scalar floating-point tensor, or a pair of it and a dict of metrics; it "
            f"returned {found}{also}. Reduce the loss with .mean() or .sum()."
        )
    if taken := [name for name in RESERVED if name in metrics]:
        raise ValueError(f"{caller}: the step itself reports {', '.join(taken)}; name that metric otherwise.")
    return loss, metrics
