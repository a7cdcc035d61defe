"""Repeated layers in a capture: the first call of a kind is captured as a region of its own, the others stand for it.

In the graph of the whole, a call of a layer is one opaque operator, and its backward pass another. That a later call is
the same program as the first is not assumed of its class but seen: its forward runs once more on fakes, a tenth of what
a capture costs, and must leave the same record (`fingerprint`). So Python runs once per call, as in eager torch.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from torch_shard._capture import add_modules, casting, current_mode, in_transform, leave
from torch_shard._common.patching import patched
from torch_shard._scan.bundles import Bundle
from torch_shard._scan.fingerprint import CannotShare, hooks_refused
from torch_shard._scan.layer_call import LayerCall, Member, saving_plainly
from torch_shard._scan.region import CALLS, Call, Region, check_used
from torch_shard._scan.restarts import NewKind, Refused, Unbundled
from torch_shard._scan.siblings import Siblings

_CAPTURES = itertools.count()


class LayerInterceptor:
    """Knowledge of one capture about repeated layers; `with regions.active(): ...` within the captured function."""

    def __init__(self, groups: list[Siblings], modules: dict[int, nn.Module]) -> None:
        self.groups, self._modules = groups, modules
        self._group_of = {key: group for group in groups if not group.refused for key in group.members}
        self._found: dict[int, dict[Any, list[Region]]] = {id(group): {} for group in groups}
        self._counts: dict[int, int] = {}
        self._latest: dict[int, Region] = {}
        self._inside, self._cast = False, casting()  # around the whole, and so around its backward pass
        self._bundled: dict[int, Member] = {}
        self._first = next(_CAPTURES) << 32
        self.calls: dict[int, Call] = {}
        """By their numbers in the graph, which are the same when the capture is repeated."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of members become regions."""
        self._counts = dict.fromkeys(self._found, 0)
        self.calls.clear()
        capture_mode = current_mode()
        classes = {type(self._modules[key]) for key in self._group_of}

        def intercept(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                group = self._group_of.get(id(module))
                mine = current_mode() is capture_mode and not in_transform()
                if group is None or not mine or self._inside:
                    return original(module, *args, **kwargs)
                return self._call(group, module, functools.partial(original, module, *args, **kwargs))

            return forward

        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks_refused(lambda: self._inside))
            for cls in classes:
                stack.enter_context(patched(cls, "forward", intercept))
            yield

    def bind(self, bundle: Bundle, whole: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Let a tensor of the capture be these parameters, which only the calls of their own module may use."""

        def used() -> torch.Tensor:
            raise Unbundled

        for number, name in enumerate(bundle.names):
            self._bundled[id(parameters[name])] = Member(bundle, number, whole)
            leave(parameters[name], used)

    def _call(self, group: Siblings, module: nn.Module, run: Callable[[], Any]) -> Any:
        number, self._inside = self._counts[id(group)], True
        self._counts[id(group)] += 1
        layer, found = LayerCall(module, run, self._bundled, self._cast), self._found[id(group)]
        try:
            with saving_plainly():
                if number in group.kinds:
                    key, region = layer.capture(group, number)
                    found.setdefault(key, []).insert(0, region)
                else:
                    same = found.get(layer.rehearse(), [])
                    used = group.used.get(number)
                    region = next((r for r in same if used in (None, r.used)), None)
        except CannotShare as reason:
            raise Refused(group, f"{group.members[id(module)]}: {reason}") from reason
        finally:
            self._inside = False
        if region is None:
            raise NewKind(group, number)
        if torch._C._current_graph_task_id() != -1 and id(module) in self._latest:  # a checkpoint, in the backward pass
            self._latest[id(module)].remat = True
        self._latest[id(module)] = region
        call, arguments = layer.call(region, number, group.members[id(module)])
        handle = self._first + len(self.calls)
        self.calls[handle] = CALLS[handle] = call
        add_modules(region.flags)
        return layer.results(handle, region, arguments)

    def check(self) -> None:
        """See, after the backward pass, that the calls are what was assumed; starts again if not."""
        check_used(self.calls.values())

    def graphs(self) -> list[GraphModule]:
        """Graphs of the calls, in order."""
        return [call.region.graph.module for call in self.calls.values()]

    def release(self) -> None:
        """Forget what only a capture under way needs."""
        for call in self.calls.values():
            call.region.graph = dataclasses.replace(call.region.graph, closure=())
            call.region.made = {}
        self._modules, self._bundled = {}, {}
