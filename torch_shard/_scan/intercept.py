"""Repeated layers in a capture: the first call of a kind is captured as a region of its own, the others stand for it.

In the graph of the whole, a call of a layer is one opaque operator, and its backward pass another. That a later call is
the same program as the first is not assumed of its class but seen: its forward runs once more on fakes, a tenth of what
a capture costs, and must leave the same record (`fingerprint`). So Python runs once per call, as in eager torch.

What shows that the capture must start again is noted as `restart`. From then on layers run plainly, without a graph.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import nn
from torch.fx import GraphModule

from torch_shard._capture import ActiveRegions, current_mode, leave, untraced
from torch_shard._common.overrides import in_transform
from torch_shard._common.patching import patched
from torch_shard._scan.fingerprint import Fingerprint, hooks_refused
from torch_shard._scan.layer_call import BundledParameter, LayerCall, OuterCapture, adopted, saving_plainly
from torch_shard._scan.region import CALLS, Call, Region
from torch_shard._scan.siblings import (
    Abandoned,
    Bundle,
    LeftBehind,
    NewKind,
    Refused,
    Restart,
    SeenCall,
    Siblings,
    Unbundled,
    Unused,
)

_CAPTURES = itertools.count()


class LayerInterceptor:
    """Knowledge of one capture about repeated layers; `with regions.active(): ...` within the captured function."""

    def __init__(self, groups: list[Siblings], model: nn.Module) -> None:
        self.groups = groups
        active = [group for group in groups if not group.refused]
        self._group_of = {key: group for group in active for key in group.members}
        self._classes = {type(model.get_submodule(path)) for group in active for path in group.members.values()}
        self._found: dict[Siblings, dict[Hashable, list[Region]]] = {group: {} for group in groups}
        self._counts: dict[Siblings, int] = {}
        self._latest: dict[int, Region] = {}
        self._layer: LayerCall | None = None  # the one that is under way
        # autocast around the whole is around its backward pass
        self._around = OuterCapture({}, ActiveRegions.devices(), self.note)
        self.restart: Restart | None = None
        """Why the capture must start again, if it must."""
        self._first = next(_CAPTURES) << 32
        self.calls: dict[int, Call] = {}
        """By their numbers in the graph, which are the same when the capture is repeated."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of members become regions."""
        self._counts = dict.fromkeys(self._found, 0)
        self.calls.clear()
        capture_mode = current_mode()

        def record() -> Fingerprint | None:
            return None if self._layer is None else self._layer.record

        def intercept(original: Callable[..., object]) -> Callable[..., object]:
            def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
                group = self._group_of.get(id(module))
                mine = current_mode() is capture_mode and not in_transform()
                if group is None or not mine or self._layer:
                    return original(module, *args, **kwargs)
                assert capture_mode is not None
                capture_mode.last_cast = None  # each layer casts what it reads
                if self.restart:
                    with untraced():
                        return original(module, *args, **kwargs)
                try:
                    return self._call(group, module, functools.partial(original, module, *args, **kwargs))
                finally:
                    capture_mode.last_cast = None

            return forward

        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks_refused(record))
            for cls in self._classes:
                stack.enter_context(patched(cls, "forward", intercept))
            yield

    def bind(self, bundle: Bundle, whole: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Let a tensor of the capture be these parameters, which only the calls of their own module may use."""
        for number, name in enumerate(bundle.names):
            self._around.bundled[id(parameters[name])] = BundledParameter(bundle, number, whole)
            leave(parameters[name], functools.partial(self._used, parameters[name]))

    def _used(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor for a parameter of a bundle that is used outside of its module, which restarts the capture."""
        self.note(Unbundled())
        return adopted(parameter)

    def note(self, reason: Restart) -> None:
        """Let the capture start again once the user's code has run; the first reason stays, with others of its kind."""
        self.restart = self.restart or reason
        if isinstance(self.restart, LeftBehind) and isinstance(reason, LeftBehind):
            self.restart.tensors.update(reason.tensors)

    def _call(self, group: Siblings, module: nn.Module, run: Callable[[], object]) -> object:
        number = self._counts[group]
        self._counts[group] += 1
        with saving_plainly():
            layer = self._layer = LayerCall(module, run, self._around)
            try:
                region = self._region(layer, group, number)
            finally:
                self._layer = None
        if layer.record.refused:
            self.note(Refused(group, f"{group.members[id(module)]}: {layer.record.refused}"))
        elif region is None:
            self.note(NewKind(group, number))
        if self.restart or region is None:
            return layer.unknown_results() if layer.finished else run()
        if torch._C._current_graph_task_id() != -1 and id(module) in self._latest:  # a checkpoint, in the backward pass
            self._latest[id(module)].remat = True
        self._latest[id(module)] = region
        call, arguments = layer.call(region, number, group.members[id(module)])
        handle = self._first + len(self.calls)
        self.calls[handle] = CALLS[handle] = call
        capture_mode = current_mode()
        assert capture_mode is not None
        capture_mode.add_modules(region.graph.modules)
        return layer.results(handle, region, arguments)

    def _region(self, layer: LayerCall, group: Siblings, number: int) -> Region | None:
        """The region of a call: its own if it begins a kind, or that of a call before it with the same record."""
        found = self._found[group]
        if number not in group.kinds:
            used = group.used.get(number)
            return next((r for r in found.get(layer.rehearse(), []) if used in (None, r.used)), None)
        captured = layer.capture(group, number)
        if captured is None:
            return None
        key, region = captured
        found.setdefault(key, []).insert(0, region)
        return region

    def check(self) -> None:
        """Go on only if no restart is noted; to be called when the user's code has run."""
        if self.restart:
            raise Abandoned

    def check_used(self) -> None:
        """See, after the backward pass, that the loss depends on the results of layers that was assumed."""
        seen = [(call.region, call.number, call.used) for call in self.calls.values() if call.used is not None]
        if any(used != region.used for region, _, used in seen):
            self.note(Unused([SeenCall(region.group, number, region.number, used) for region, number, used in seen]))
        self.check()

    def graphs(self) -> list[GraphModule]:
        """Graphs of the calls, in order."""
        return [call.region.graph.module for call in self.calls.values()]

    def release(self) -> None:
        """Forget what only a capture under way needs."""
        for call in self.calls.values():
            call.region.graph = dataclasses.replace(call.region.graph, closure=())
            call.region.made = {}
        self._around.bundled.clear()
