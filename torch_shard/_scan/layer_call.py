"""One call of one layer: captured as a region, or run on fakes to see that it is the program of another call."""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import (
    Captured,
    Spec,
    as_captured,
    autocast_only,
    capture,
    current_mode,
    current_values,
    leave,
    rehearse,
    unknown_like,
    user_leaves,
)
from torch_shard._entries import place_of
from torch_shard._lowering import keeps_whole, missing_lowerings
from torch_shard._scan.fingerprint import Fingerprint
from torch_shard._scan.region import Call, Origin, Region, RegionFunction, UnknownResults
from torch_shard._scan.siblings import Bundle, LeftBehind, Restart, Siblings


@dataclasses.dataclass(frozen=True)
class BundledParameter:
    """A parameter as part of a bundle, and the bundle in the capture of the whole."""

    bundle: Bundle
    number: int
    whole: torch.Tensor


@dataclasses.dataclass(frozen=True)
class OuterCapture:
    """The capture of the whole, as its layers' calls see it.

    Attributes:
        bundled: Parameters that are part of a bundle, by `id`.
        cast_backward: Device types whose products autocast casts in the backward pass.
        note: Takes the reason if the capture is to start again.
    """

    bundled: dict[int, BundledParameter]
    cast_backward: Collection[str]
    note: Callable[[Restart], None]


class LayerCall:
    """One call of one module."""

    def __init__(self, module: nn.Module, run: Callable[[], object], around: OuterCapture) -> None:
        self.module, self.run, self.grad = module, run, torch.is_grad_enabled()
        self._around = around
        self.buffers = dict(module.named_buffers())
        self.parameters = list(module.parameters())
        self.record = Fingerprint()
        self.out: object = None
        self.finished = False
        """Whether the module has run to its end."""
        self.passed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.assigned: dict[str, torch.Tensor] = {}

    def _forward(self, *buffers: torch.Tensor) -> tuple[object, dict[str, torch.Tensor]]:
        """Run the module, once; new buffers are taken back."""
        capture_mode = current_mode()
        assert capture_mode is not None
        with capture_mode.binding(list(self.buffers.values()), buffers), torch.set_grad_enabled(self.grad), self.record:
            for parameter in self.parameters:
                if id(parameter) in self._around.bundled:
                    capture_mode.adopt(parameter)
            self.out = self.run()
        self.finished = True
        if list(map(id, self.module.parameters())) != list(map(id, self.parameters)):
            self.record.refuse("forward assigns a parameter anew")
        now = dict(self.module.named_buffers())
        changed = [name for name, buffer in self.buffers.items() if now.get(name) is not buffer]
        bound = dict(zip(self.buffers, buffers, strict=True))  # what `self.count += 1` assigns, having written to it
        self.assigned = {name: now[name] for name in changed if now.get(name) is not bound[name]}
        for name in changed:
            held, key = place_of(self.module, name)
            held[key] = self.buffers[name]
        self.passed = capture_mode.standins()  # what it may return as it was given
        return self.out, self.assigned

    def rehearse(self) -> Hashable | None:
        """The record of the call, without a graph; None if that was refused."""

        def run() -> Hashable:
            buffers = [torch.empty_like(b) for b in map(as_captured, self.buffers.values())]
            return self._key(self._forward(*buffers))

        try:
            key = rehearse(run)[0]
        except Exception as error:  # the user's, too: without regions it is raised again
            self.record.refuse(_first_line(error))
            return None
        return None if self.record.refused else key

    def _key(self, result: object) -> Hashable:
        kinds = tuple((name, tuple(b.shape), b.dtype) for name, b in self.buffers.items())
        return self.grad, torch.is_autocast_enabled("cpu"), kinds, self.record.close(result)

    def capture(self, group: Siblings, number: int) -> tuple[Hashable, Region] | None:
        """The record of the call and its region; None if that was refused."""
        left = group.kinds[number]
        cotangents: list[torch.Tensor] = []
        found: list[Any] = []

        def run(*buffers: torch.Tensor) -> tuple[list[torch.Tensor], int]:
            key = self._key(self._forward(*buffers))
            results = self._own_results(left)
            if _has_views(results, buffers):
                self.record.refuse("it returns a view of what it was given, or two views of one tensor")
            flags = [r.requires_grad for r in results]
            chosen = [r for r in results if r.requires_grad]
            used = group.used.get(number, (True,) * len(chosen))
            chosen = list(itertools.compress(chosen, used))
            cotangents.extend(map(unknown_like, chosen))
            given = self._gradients(chosen, cotangents)
            found[:] = [key, flags, used, list(given), current_values().position]
            return [*(r.detach() for r in results), *(g.detach() for g in given.values())], len(results)

        try:
            graph = capture(
                run, [Spec(tuple(b.shape), b.dtype) for b in self.buffers.values()], keep=keeps_whole, restore=False
            )
            inputs = self._inputs(graph, cotangents)
        except Exception as error:  # the user's, too: without regions it is raised again
            self.record.refuse(_first_line(error))
            return None
        if self.record.refused:
            return None
        key, flags, used, given, draws = found
        tensors = [(origin, i) for origin, i in inputs if origin != "cotangent"]
        outside = list(map(id, self.record.outside))
        order = [tensors.index(("outside", outside.index(key))) for key in given]
        return key, Region(
            group=group,
            number=number,
            graph=graph,
            inputs=inputs,
            constants=self.record.constants,
            num_results=graph.aux,
            gradients=order,
            rules=self.record.rules,
            num_draws=draws,
            differentiable=flags,
            used=used,
        )

    def _gradients(self, chosen: list[torch.Tensor], cotangents: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients of what the call closed over, by `id`, where these results depend on it."""
        if not chosen:
            return {}
        capture_mode = current_mode()
        assert capture_mode is not None
        wanted = {id(tensor): fake for fake, tensor in capture_mode.standins() if fake.requires_grad}
        fakes = list(wanted.values())
        others = user_leaves(chosen) or []  # so that all of it runs
        with autocast_only(self._around.cast_backward):  # the layer may run within autocast, its backward pass after it
            grads = torch.autograd.grad(chosen, [*fakes, *others], cotangents, allow_unused=True)[: len(fakes)]
        if capture_mode.uses_grad or any(fake.grad is not None for fake in fakes):
            self.record.refuse("it reads .grad, or gradients land in it")
        return {key: grad for key, grad in zip(wanted, grads, strict=True) if grad is not None}

    def _inputs(self, graph: Captured[int], cotangents: list[torch.Tensor]) -> list[tuple[Origin, int]]:
        """The origin of each input of the graph."""
        if missing := missing_lowerings(graph.module.graph.nodes):
            self.record.refuse(f"{missing[0].target} has no lowering")
        if graph.num_draws is None:
            self.record.refuse("PyTorch decomposes one of its random operators")
        known: dict[Origin, list[torch.Tensor]] = {
            "outside": self.record.outside,
            "cotangent": cotangents,
            "constant": self.record.constants,
        }
        origins: dict[int, tuple[Origin, int]]
        origins = {id(t): (origin, i) for origin, tensors in known.items() for i, t in enumerate(tensors)}
        if any(id(t) not in origins for t in graph.closure):
            self.record.refuse("it uses a tensor whose origin is not known")
        own: list[tuple[Origin, int]] = [("buffer", i) for i in range(len(self.buffers))]
        return [*own, *(origins[id(t)] for t in graph.closure if id(t) in origins)]

    def _own_results(self, left: Sequence[int]) -> list[torch.Tensor]:
        """The tensors that the call has made and returns, or left for others, each once."""
        made = self.record.tensors()
        leaves = [*torch_pytree.tree_leaves(self.out), *self.assigned.values(), *(made[n] for n in left)]
        numbers = {id(t) for t in made.values()}
        return list({id(t): t for t in leaves if id(t) in numbers}.values())

    def call(self, region: Region, number: int, path: str) -> tuple[Call, list[torch.Tensor]]:
        """The call as one of a region, and the arguments of its operator."""
        buffers = list(self.buffers.values())
        given = {"buffer": buffers, "outside": self.record.outside, "constant": region.constants}
        arguments: list[torch.Tensor] = []
        places: list[tuple[int, int | None]] = []
        at: dict[Bundle, int] = {}
        for kind, i in region.tensors:
            member = self._around.bundled.get(id(given[kind][i]))
            if member is None:
                places.append((len(arguments), None))
                arguments.append(as_captured(given[kind][i]))
                continue
            if member.bundle not in at:
                at[member.bundle] = len(arguments)
                arguments.append(member.whole)
            places.append((at[member.bundle], member.number))
        bundles = {position: bundle for bundle, position in at.items()}
        place = current_values().skip_draws(region.num_draws)
        return Call(region, path, place, places, bundles, number, self._around.note), arguments

    def results(self, handle: int, region: Region, arguments: list[torch.Tensor]) -> object:
        """Result of the call: those of its operator in their places; new values of buffers are written."""
        outputs = RegionFunction.apply(handle, *arguments)
        own = self._own_results(region.group.kinds[region.number])
        new = {id(fake): tensor for fake, tensor in self.passed}
        new |= dict(zip(map(id, own), outputs, strict=False))  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            for position, value in zip(region.graph.written, outputs[len(own) :], strict=True):  # pyright: ignore
                list(self.buffers.values())[position].copy_(value)
        for name, tensor in self.assigned.items():
            held, key = place_of(self.module, name)
            held[key] = new[id(tensor)]  # a new tensor: Python may hold the old one still
        region.made = region.made or self.record.tensors()
        for number, fake in self.record.tensors().items():
            result = new.get(id(fake))
            used = functools.partial(self._used, region, number)
            value = used if result is None else functools.partial(_itself, result)
            leave(fake, value, repeats=region.made[number])
        return self._returned(new)

    def _used(self, region: Region, number: int) -> torch.Tensor:
        """A tensor for one that the call left behind and that somebody uses, which restarts the capture."""
        self._around.note(LeftBehind({(region.group, region.number, number): None}))
        return adopted(region.made[number])

    def unknown_results(self) -> object:
        """Result of the call in a capture that starts again: tensors of the same looks, without a graph."""
        made = self.record.tensors().values()
        own = [t for t in made if any(t is leaf for leaf in torch_pytree.tree_leaves(self.out))]
        capture_mode = current_mode()
        assert capture_mode is not None
        given = [t for t in self.record.outside if capture_mode.is_of_capture(t)]
        new = {id(fake): tensor for fake, tensor in self.passed}
        if own:
            new |= dict(zip(map(id, own), UnknownResults.apply(own, *given), strict=True))  # pyright: ignore
        for fake in made:
            leave(fake, functools.partial(adopted, fake))
        return self._returned(new)

    def _returned(self, new: Mapping[int, torch.Tensor]) -> object:
        """Result of the call with the tensors of the capture of the whole."""
        for fake, tensor in self.passed:
            leave(fake, functools.partial(_itself, tensor))
        return _replaced(self.out, new)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def adopted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the capture under way that looks like one that has no meaning in it."""
    capture_mode = current_mode()
    assert capture_mode is not None
    return capture_mode.adopt(tensor)


def _has_views(results: list[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    capture_mode = current_mode()
    assert capture_mode is not None
    given = [fake for fake, _ in capture_mode.standins()] + list(buffers)
    storages = [t.untyped_storage()._cdata for t in (*given, *results)]
    own = set(storages[len(given) :])
    return len(own) < len(results) or not own.isdisjoint(storages[: len(given)])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def saving_plainly() -> contextlib.AbstractContextManager[None]:
    """Hooks on saved tensors that are active around a layer see what the layer saves, not what happens in it."""
    if _autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


_MUTABLE = (list, dict, collections.OrderedDict, collections.defaultdict)


def _replaced(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Tensors replaced by `id`: within lists and dicts in place, for forward may write to them."""

    def replace(leaf: Any) -> Any:
        if type(leaf) is list:
            leaf[:] = [_replaced(item, new) for item in leaf]
        elif type(leaf) in _MUTABLE:
            leaf.update({key: _replaced(item, new) for key, item in leaf.items()})
        return new.get(id(leaf), leaf)

    return torch_pytree.tree_map(replace, value, is_leaf=lambda v: type(v) in _MUTABLE)
