"""Repeated layers in a capture: the first call of a kind is captured as a region of its own, the others stand for it.

In the graph of the whole, a call of a layer is one opaque operator, and its backward pass another. That a later call is
the same program as the first is not assumed of its class but seen: its forward runs once more on fakes, a tenth of what
a capture costs, and must leave the same record (`_records`). So Python runs once per call, as in eager torch.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from torch_shard._attributes import Journal
from torch_shard._capture import Graph, Spec, capture, in_transform, rehearse, unknown_like
from torch_shard._layers import Siblings
from torch_shard._lower import missing_lowerings
from torch_shard._ops import keeps_whole
from torch_shard._records import CannotShare, Record, hooks_refused
from torch_shard._values import num_draws, skip_draws
from torch_shard._watch import ModuleFlags, add_modules, as_captured, binding, current_watch

_HANDLES = itertools.count()
MOST_KINDS = 4
"""So many different programs may the calls of one group be."""


@dataclasses.dataclass
class Region:
    """One captured layer, forward and backward.

    Attributes:
        graph: `(*buffers, *other tensors, *cotangents) -> (*results, *gradients, *new buffers)`, functional.
        inputs: For each input of the graph, `("buffer" | "outside" | "cotangent", number)`.
        num_results: How many results the layer has; new values of `assigned` buffers are among them.
        gradients: For each gradient, the number of the input that it belongs to, cotangents not counted.
        assigned: Names of the buffers that forward assigned anew.
        flags: Modules that ran.
        num_draws: How many random operators it has.
        differentiable: Which results require a gradient.
        remat: Whether the user's own checkpoint computes it again in the backward pass.
    """

    graph: Graph
    inputs: list[tuple[str, int]]
    num_results: int
    gradients: list[int]
    assigned: tuple[str, ...]
    flags: ModuleFlags
    num_draws: int
    differentiable: list[bool]
    remat: bool = False

    @property
    def tensors(self) -> list[tuple[str, int]]:
        """The inputs that are no cotangents."""
        return [(kind, number) for kind, number in self.inputs if kind != "cotangent"]

    @property
    def fakes(self) -> list[torch.Tensor]:
        """What the outputs of the graph look like."""
        return [node.meta["val"] for node in self.graph.module.graph.output_node().args[0]]  # pyright: ignore

    @property
    def results(self) -> list[torch.Tensor]:
        """What the forward pass gives: results, and new values of buffers written in place."""
        fakes = self.fakes
        return fakes[: self.num_results] + fakes[self.graph.num_outputs :]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer: which region it is, and where its random numbers begin."""

    region: Region
    path: str
    place: int


_CALLS: dict[int, Call] = {}


@torch.library.custom_op("torch_shard::layer", mutates_args=())
def _layer(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_layer.register_fake
def _layer_shapes(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(_like(fake) for fake in _CALLS[call].region.results), torch.empty(0, device="cpu")]


@torch.library.custom_op("torch_shard::layer_backward", mutates_args=())
def _layer_backward(call: int, token: torch.Tensor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_layer_backward.register_fake
def _gradient_shapes(call: int, token: torch.Tensor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    region = _CALLS[call].region
    return [_like(fake) for fake in region.fakes[region.num_results : region.graph.num_outputs]]


LAYER, LAYER_BACKWARD = torch.ops.torch_shard.layer.default, torch.ops.torch_shard.layer_backward.default


def _like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")


class _LayerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        region = _CALLS[number].region
        *outputs, ctx.token = torch.ops.torch_shard.layer(number, list(tensors))  # the backward pass needs this call
        ctx.number = number
        ctx.set_materialize_grads(False)
        kept = [t for t, (kind, _) in zip(tensors, region.tensors, strict=True) if kind != "buffer"]
        ctx.save_for_backward(*kept)  # for autograd's check that nobody writes to them in between
        constant = [not d for d in region.differentiable]
        ctx.mark_non_differentiable(*itertools.compress(outputs, constant), *outputs[len(constant) :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        call = _CALLS[ctx.number]
        assert ctx.saved_tensors is not None
        if torch.is_grad_enabled():
            raise Refused(None, "the loss takes a derivative of its gradient")
        chosen = list(itertools.compress(cotangents, call.region.differentiable))
        if any(c is None for c in chosen):
            raise Unused(call, tuple(c is not None for c in chosen))
        found = torch.ops.torch_shard.layer_backward(ctx.number, ctx.token, chosen)
        grads = dict(zip(call.region.gradients, found, strict=True))
        return None, *(grads.get(position) for position in range(len(call.region.tensors)))


class Again(BaseException):
    """The capture must start again, knowing more."""


class Unused(Again):
    """The loss does not depend on some results of a layer."""

    def __init__(self, call: Call, used: tuple[bool, ...]) -> None:
        self.call, self.used = call, used


class Regions:
    """What one capture knows of repeated layers; `with regions.active(): ...` within the captured function."""

    def __init__(self, groups: list[Siblings], modules: dict[int, nn.Module]) -> None:
        self.groups, self._modules = groups, modules
        self._group_of = {key: group for group in groups if not group.refused for key in group.members}
        self._found: dict[int, dict[Any, Region]] = {id(group): {} for group in groups}
        self._counts: dict[int, int] = {id(group): 0 for group in groups}
        self._latest: dict[int, Region] = {}
        self._origins: dict[int, tuple[Siblings, int]] = {}
        self._inside = False
        self.calls: dict[int, Call] = {}
        """By the numbers in the graph."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of members become regions."""
        thread, watch = threading.get_ident(), current_watch()
        classes = {type(self._modules[key]) for key in self._group_of}

        def intercept(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                group = self._group_of.get(id(module))
                mine = threading.get_ident() == thread and current_watch() is watch and not in_transform()
                if group is None or not mine or self._inside:
                    return original(module, *args, **kwargs)
                return self._call(group, module, functools.partial(_on_standins, original, module, args, kwargs))

            return forward

        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks_refused(lambda: self._inside))
            for cls in classes:
                stack.enter_context(mock.patch.object(cls, "forward", intercept(cls.forward)))
            yield

    def _call(self, group: Siblings, module: nn.Module, run: Callable[[], Any]) -> Any:
        number, self._inside = self._counts[id(group)], True
        self._counts[id(group)] += 1
        layer, found = _Layer(module, run), self._found[id(group)]
        try:
            with _saving_plainly():
                if number in group.kinds:
                    key, region = layer.capture(group.kinds[number])
                    found[key] = region
                    self._origins[id(region)] = group, number
                else:
                    region = found.get(layer.rehearse())
        except CannotShare as reason:
            raise Refused(group, f"{group.members[id(module)]}: {reason}") from reason
        finally:
            self._inside = False
        if region is None:
            raise NewKind(group, number)
        if torch._C._current_graph_task_id() != -1 and id(module) in self._latest:  # a checkpoint, in the backward pass
            self._latest[id(module)].remat = True
        self._latest[id(module)] = region
        call = Call(region, group.members[id(module)], skip_draws(region.num_draws))
        handle = next(_HANDLES)
        _CALLS[handle] = self.calls[handle] = call
        add_modules(region.flags)
        return layer.results(handle, region)

    def origin_of(self, region: Region) -> tuple[Siblings, int]:
        """The group and the number of the call that a region was captured from."""
        return self._origins[id(region)]

    def release(self) -> None:
        """Forget what only a capture under way needs."""
        for handle, call in self.calls.items():
            _CALLS.pop(handle, None)
            call.region.graph = dataclasses.replace(call.region.graph, closure=())
        self._modules = {}


@contextlib.contextmanager
def _saving_plainly() -> Iterator[None]:
    """Hooks on saved tensors that are active around a layer see what the layer saves, not what happens in it."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _on_standins(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module on what stands in the capture under way for its arguments and its own tensors.

    Torch functions would find that by themselves, but `autograd.Function.apply` is none.
    """
    args, kwargs = torch_pytree.tree_map_only(torch.Tensor, as_captured, (args, kwargs))
    held = [(d, name, t) for m in module.modules() for d in (m._parameters, m._buffers) for name, t in d.items()]
    for tensors, name, tensor in held:
        tensors[name] = None if tensor is None else as_captured(tensor)  # pyright: ignore
    try:
        return original(module, *args, **kwargs)
    finally:
        for tensors, name, tensor in held:
            if tensor is not None and tensors.get(name) is as_captured(tensor):  # else forward has assigned another
                tensors[name] = tensor


class NewKind(Again):
    def __init__(self, group: Siblings, number: int) -> None:
        self.group, self.number = group, number


class Refused(Again):
    """The layers of a group, or of all groups, cannot be regions."""

    def __init__(self, group: Siblings | None, why: str) -> None:
        self.group, self.why = group, why


class _Layer:
    """One call of one module."""

    def __init__(self, module: nn.Module, run: Callable[[], Any]) -> None:
        self.module, self.run, self.grad = module, run, torch.is_grad_enabled()
        self.buffers = {name: b for name, b in module.named_buffers() if b is not None}
        self.parameters = list(module.parameters())
        self.record = Record()
        self.out: Any = None
        self.passed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.assigned: dict[str, torch.Tensor] = {}

    def _forward(self, *buffers: torch.Tensor) -> Any:
        """Run the module, once; what it leaves changed is taken back."""
        journal = Journal()
        journal.note(self.module.named_modules())
        with binding(list(self.buffers.values()), buffers), torch.set_grad_enabled(self.grad), self.record:
            self.out = self.run()
        if changes := journal.restore():
            raise CannotShare(f"forward changes the attribute {changes[0].path}")
        if any(now is not before for now, before in zip(self.module.parameters(), self.parameters, strict=True)):
            raise CannotShare("forward assigns a parameter anew")
        now = dict(self.module.named_buffers())
        self.assigned = {name: now[name] for name, b in self.buffers.items() if now.get(name) is not b}
        for name in self.assigned:
            _set_buffer(self.module, name, self.buffers[name])
        watch = current_watch()
        assert watch is not None
        self.passed = watch.standins()  # what it may return as it was given
        return self.out, self.assigned

    def rehearse(self) -> Any:
        """The record of the call, without a graph."""

        def run() -> Any:
            buffers = [torch.empty_like(b) for b in map(as_captured, self.buffers.values())]
            return self._key(self._forward(*buffers))

        try:
            return rehearse(run)[0]
        except Exception as error:
            raise CannotShare(_first_line(error)) from error

    def _key(self, result: Any) -> Any:
        kinds = tuple((name, tuple(b.shape), b.dtype) for name, b in self.buffers.items())
        return self.grad, torch.is_autocast_enabled("cpu"), kinds, self.record.close(result)

    def capture(self, used: tuple[bool, ...] | None) -> tuple[Any, Region]:
        """The record of the call and its region."""
        cotangents: list[torch.Tensor] = []
        found: list[Any] = []

        def run(*buffers: torch.Tensor) -> Any:
            key = self._key(self._forward(*buffers))
            results = self._own_results()
            _refuse_views(results, buffers)
            flags = [r.requires_grad for r in results]
            chosen = [r for r in results if r.requires_grad]
            if used is not None:
                flags = _narrowed(flags, used)
                chosen = list(itertools.compress(chosen, used))
            watch = current_watch()
            assert watch is not None
            wanted = {id(tensor): fake for fake, tensor in watch.standins() if fake.requires_grad}
            cotangents.extend(map(unknown_like, chosen))
            grads = torch.autograd.grad(chosen, list(wanted.values()), cotangents, allow_unused=True) if chosen else []
            given = {key: g for key, g in zip(wanted, grads, strict=False) if g is not None}
            found[:] = [key, flags, list(given), num_draws()]
            return [*(r.detach() for r in results), *(g.detach() for g in given.values())], len(results)

        try:
            graph = capture(run, [Spec(tuple(b.shape), b.dtype) for b in self.buffers.values()], keep=keeps_whole)
        except Exception as error:
            raise CannotShare(_first_line(error)) from error
        key, *about = found
        return key, self._region(graph, cotangents, *about)

    def _region(
        self, graph: Graph, cotangents: list[torch.Tensor], flags: list[bool], given: list[int], draws: int
    ) -> Region:
        if missing := missing_lowerings(graph.module):
            raise CannotShare(f"{missing[0].target} has no lowering")
        outside = {id(t): ("outside", i) for i, t in enumerate(self.record.outside)}
        outside |= {id(t): ("cotangent", i) for i, t in enumerate(cotangents)}
        if any(id(t) not in outside for t in graph.closure):
            raise CannotShare("it uses a tensor whose origin is not known")
        inputs = [("buffer", i) for i in range(len(self.buffers))] + [outside[id(t)] for t in graph.closure]
        tensors = [i for i in inputs if i[0] != "cotangent"]
        order = [tensors.index(outside[key]) for key in given]
        return Region(graph, inputs, graph.aux, order, tuple(self.assigned), graph.modules, draws, flags)

    def _own_results(self) -> list[torch.Tensor]:
        """The tensors that the call has made and returns, each once."""
        leaves = [*torch_pytree.tree_leaves(self.out), *self.assigned.values()]
        return list({id(t): t for t in leaves if self.record.made(t)}.values())

    def results(self, handle: int, region: Region) -> Any:
        """What the call returns: the results of its operator in their places; new values of buffers are written."""
        given = {"buffer": list(self.buffers.values()), "outside": self.record.outside}
        tensors = [as_captured(given[kind][i]) for kind, i in region.tensors]
        outputs = _LayerCall.apply(handle, *tensors)
        own = self._own_results()
        new = {id(fake): tensor for fake, tensor in self.passed}
        new |= dict(zip(map(id, own), outputs, strict=False))  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            for position, value in zip(region.graph.written, outputs[len(own) :], strict=True):  # pyright: ignore
                given["buffer"][position].copy_(value)
        for name, tensor in self.assigned.items():
            _set_buffer(self.module, name, new[id(tensor)])  # a new tensor: Python may hold the old one still
        return torch_pytree.tree_map(lambda leaf: new.get(id(leaf), leaf), self.out)


def _narrowed(flags: list[bool], used: Sequence[bool]) -> list[bool]:
    answers = iter(used)
    return [flag and next(answers) for flag in flags]


def _refuse_views(results: list[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    watch = current_watch()
    assert watch is not None
    given = [fake for fake, _ in watch.standins()] + list(buffers)
    storages = [t.untyped_storage()._cdata for t in (*given, *results)]
    if len(set(storages[len(given) :])) < len(results) or set(storages[: len(given)]) & set(storages[len(given) :]):
        raise CannotShare("it returns a view of what it was given, or two views of one tensor")


def _set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
