"""A captured torch callable with its lowering, and the settings of the world around it that it was captured for."""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import torch

from torch_shard._capture import (
    Captured,
    Guard,
    Spec,
    TensorFn,
    canonical_form,
    capture,
    is_capturing,
    leave_users_frames,
)
from torch_shard._common.axes import manual_axes, still_hold, tracked_axes
from torch_shard._common.dtypes import has_x64
from torch_shard._common.overrides import KERNELS
from torch_shard._lowering.interpreter import Lowered, draws_random, lower, missing_lowerings, place_of
from torch_shard._lowering.number_inputs import Kind, Place, carry, outline_of
from torch_shard._lowering.ops import keeps_whole
from torch_shard._lowering.rounding import warn_of_rounding
from torch_shard._lowering.second_look import Looks, refuse_change

logger = logging.getLogger(__name__)

Aux = TypeVar("Aux")


class Program(Generic[Aux]):
    """A captured callable with its lowering.

    Args:
        fn: The callable.
        specs: Its inputs.
        what: Its name, for errors.
        others: Operators that the caller runs in a way of its own.
        inner: Gives the graphs that these stand for.
        looks: Whether `look_again` does.
    """

    def __init__(
        self,
        fn: TensorFn[Aux],
        specs: Sequence[Spec],
        what: str,
        *,
        others: Collection[object] = (),
        inner: Callable[[], Iterable[torch.fx.GraphModule]] = tuple,
        looks: bool = False,
    ) -> None:
        self._inner = inner
        self._again = (fn, specs, what) if looks else None
        self._looks = Looks()
        try:
            self.graph: Captured[Aux] = capture(fn, specs, keep=keeps_whole, inner=inner)
        except Exception as error:
            config: Any = jax.config
            if config.jax_traceback_filtering != "off" and not is_capturing():
                leave_users_frames(error)
            raise
        self._check_next_call(fn, specs, what)
        if any(node.target not in others for node in missing_lowerings(self.graph.module.graph.nodes)):
            raise _missing_error(fn, specs, what)

        # Captured once more only where there is something to say, as source lines cost time.
        explained = functools.partial(capture, fn, specs, keep=keeps_whole, explain=True)
        warn_of_rounding(self.graph, inner, what, explained)
        self.random = draws_random(self.graph.module)

    @functools.cached_property
    def run(self) -> Lowered:
        """The JAX function `(key, *arrays) -> list of arrays`."""
        return lower(self.graph.module)

    def carrying(self, kinds: Mapping[Kind, list[Place]]) -> "Program[Aux]":
        """The same program with numbers of its graph as its last inputs; see `carry`."""
        other = copy.copy(self)
        other.graph = dataclasses.replace(self.graph, module=carry(self.graph.module, kinds))
        vars(other).pop("run", None)
        return other

    def reading(self, guard: Guard) -> "Program[Aux]":
        """The same program, current for as long as a guard holds, and while modules that ran are as they were."""
        modules: list[tuple[str, torch.nn.Module]] = []
        for reference, _ in self.graph.modules:
            module = reference()
            if module is not None:
                modules.append((type(module).__name__, module))
        roots = Guard.of_modules(modules)
        self.graph = dataclasses.replace(self.graph, guards=(guard, roots))
        return self

    def look_again(self) -> None:
        """Capture the callable once more where that is due, before it is used again."""
        if self._again is None or not self._looks.is_due():
            return
        fn, specs, what = self._again
        # The first capture was outside of inference mode, which is part of what it means.
        with torch.inference_mode(False):
            second = capture(fn, specs, keep=keeps_whole)
        if not outline_of(self.graph, {}).is_same(outline_of(second, {})):
            refuse_change(fn, specs, what)
        # A count of calls has gone on with this one, and was seen to be harmless.
        for guard in self.graph.guards:
            guard.renew()

    def is_current(self) -> bool:
        """Tell whether modules still have the training flags, and named axes the sizes, of the capture."""
        return self.graph.is_current() and self.fits_axes()

    def fits_axes(self) -> bool:
        """Tell whether named axes have the sizes that they had at the capture."""
        return still_hold(self.graph.axes)

    def _check_next_call(self, fn: TensorFn[Aux], specs: Sequence[Spec], what: str) -> None:
        """Refuse a callable whose next call is another program, for what this one has left on modules."""
        changed = self.graph.changed
        if not changed:
            return
        first = canonical_form(self.graph, self._inner())
        with changed.in_place(), changed.explained(what):
            changed.made_buffers()
            second = capture(fn, specs, keep=keeps_whole)

        if not self._means_the_same(first, second) or self._differs_later(fn, specs, second):
            # A table that is made at the first call is found from the second on: that one is the program.
            is_proved = not list(self._inner()) and self.graph.host is None
            if not is_proved and changed.are_of_constants():
                self.graph = dataclasses.replace(second, changed=changed)
                return
            names = ", ".join(change.what for change in changed)
            raise NotImplementedError(
                f"{what} changes {names} on each call and depends on it, but a compiled program is "
                "the same for every call. Make it a buffer (register_buffer, a tensor), which the program can carry."
            )

        for change in changed.that_depend_on_inputs():
            logger.warning(
                "forward writes %s; a compiled step does not keep such writes. Return the value in the metrics, or "
                "register a buffer.",
                change.what,
            )

    def _differs_later(self, fn: TensorFn[Aux], specs: Sequence[Spec], second: Captured[Aux]) -> bool:
        """Tell whether a count that the callable keeps makes it another program after many calls."""
        later = self.graph.changed.after(_MANY_CALLS, second.changed)
        if later == self.graph.changed:
            return False
        try:
            with later.in_place():
                first = canonical_form(self.graph, self._inner())
                return not self._means_the_same(first, capture(fn, specs, keep=keeps_whole))
        except Exception:
            # A table has no such entry, say, so that it depends on the count.
            return True

    def _means_the_same(self, first: Hashable, second: Captured[Aux]) -> bool:
        layers = list(self._inner())
        if canonical_form(second, layers) == first:
            return True
        if layers:
            return False
        # What is computed of constants alone may be written in another way.
        return canonical_form(second, folded=True) == canonical_form(self.graph, folded=True)


# Beyond what a warmup takes, and a multiple of usual intervals.
_MANY_CALLS = 1_008_000


def _missing_error(fn: TensorFn[Aux], specs: Sequence[Spec], what: str) -> NotImplementedError:
    """Captured once more, with source lines."""
    graph = capture(fn, specs, keep=keeps_whole, explain=True)
    nodes = missing_lowerings(graph.module.graph.nodes)
    lines = [f"  {node.target}: {place_of(node)}" for node in nodes]
    return NotImplementedError(
        f"{what} uses {len(nodes)} operator{'s' * (len(nodes) > 1)} without a lowering to JAX:\n\n"
        + "\n".join(lines)
        + "\n\nWrite these with other torch operators, or compute them in JAX with torch_shard.call_jax. "
        "An operator of your own (torch.library) takes a lowering: torch_shard.lowering."
    )


def capture_settings() -> tuple[object, ...]:
    """The settings that change what a callable means, and the mesh axes that it is written for one device of."""
    autocast: list[object] = []
    for device in ("cpu", "jax", "cuda"):
        autocast.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
    axes = tuple(manual_axes().items())
    is_tracked = bool(axes and tracked_axes())
    hooks = tuple(_global_hooks())
    return torch.get_default_dtype(), tuple(autocast), has_x64(), axes, is_tracked, hooks, *KERNELS


def _global_hooks() -> Iterator[int]:
    """The numbers of the user's hooks on all modules: torch gives each hook a new one. A capture has its own hooks."""
    for name in ("forward_pre", "forward", "backward_pre", "backward"):
        hooks: dict[int, object] = getattr(torch.nn.modules.module, f"_global_{name}_hooks")
        for number, hook in hooks.items():
            if not getattr(hook, "__module__", "").startswith("torch_shard."):
                yield number
