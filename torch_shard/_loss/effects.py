"""What a loss does with its numbers besides returning them, done after each step with the step's own.

A number that is kept is put where eager torch would have put it, at once, without waiting for the step: a `LateNumber`,
which waits when it is read. As soon as the step is through, a later call puts the plain number in its place.
"""

import collections
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from jax.core import Tracer

from torch_shard._capture import EffectPlan, LateNumber
from torch_shard._common.caller import caller
from torch_shard._common.convert import to_host
from torch_shard._common.types import PyTree
from torch_shard._device import JaxTensor, Storage
from torch_shard._loss.result import EFFECTS

MOST_WAITING = 64
"""Late numbers that may wait at places; the oldest are waited for then."""


class StepItems(Mapping[int, Any]):
    """The tensors of effects of one microbatch, read when they are asked for.

    Args:
        arrays: By position as text, with a leading dim of one, or of microbatches and one.
        microbatch: Its number.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], microbatch: int, num_microbatches: int) -> None:
        self._arrays = arrays
        self._microbatch = microbatch
        self._num_microbatches = num_microbatches
        self._read = dict[int, Any]()

    def __getitem__(self, position: int) -> Any:
        if position not in self._read:
            self._read[position] = self.tensor(position).item()
        return self._read[position]

    def __iter__(self) -> Any:
        return map(int, self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def kept_tensor(self, position: int, dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor of a position, on the device `jax`; nobody waits for it."""
        array = self._arrays[str(position)]
        row = array[self._microbatch, 0] if self._num_microbatches > 1 else array[0]
        return JaxTensor(Storage(row, dtype))

    def tensor(self, position: int) -> torch.Tensor:
        """The tensor of a position, on the CPU."""
        last_leading_dim = 1 if self._num_microbatches > 1 else 0
        tensor = to_host(self._arrays[str(position)])
        return tensor.flatten(0, last_leading_dim)[self._microbatch]

    @property
    def is_ready(self) -> bool:
        """Whether the step is through."""
        arrays: Mapping[str, Any] = self._arrays  # whose method is not annotated
        return all(array.is_ready() for array in arrays.values())


class Doing:
    """Does the effects of the steps of one kind, in order."""

    def __init__(self) -> None:
        self._waiting = collections.deque[tuple[Any, Any, LateNumber, StepItems]]()

    def do(self, plan: EffectPlan, metrics: dict[str, PyTree], num_microbatches: int) -> None:
        """Do what a plan says with what a step has given, and take that out of its metrics."""
        arrays: Mapping[str, jax.Array] = metrics.pop(EFFECTS, {})
        if any(isinstance(array, Tracer) for array in arrays.values()):
            raise NotImplementedError(
                f"{caller()}: it keeps, prints or logs numbers of tensors, which it cannot do again where it is called "
                "within a function that JAX traces, such as of jax.jit. Return the numbers."
            )

        self._settle()
        if not plan:
            return
        for number in range(num_microbatches):
            items = StepItems(arrays, number, num_microbatches)

            # All before the first write: `a, b = b, a` reads both.
            old = {key: place.get() for key, place in plan.old_places.items()}
            for call in plan.calls:
                args, kwargs = call.arguments(items, old, items.tensor)
                call.function(*args, **kwargs)

            # Where the step is not through, waiting for its numbers can be put off.
            put_off = None if items.is_ready else _late_number
            late = plan.write(items, old, items.kept_tensor, put_off)
            if late:
                _let_json_read_late_numbers()
            self._waiting += [(*where, items) for where in late]

    def _settle(self) -> None:
        """Put plain numbers where late ones are, of steps that are through."""
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._waiting[0][3].is_ready):
            place, container, number, _ = self._waiting.popleft()
            if place is not None:
                if place.get() is number:
                    place.set(number.value)
                continue

            # Most are appended, so that the last ones are found at once. One may have been taken out again.
            for at in reversed(range(len(container))):
                if container[at] is number:
                    container[at] = number.value
                    break


def _late_number(expression: Any, value: Callable[[], Any]) -> LateNumber:
    return LateNumber(expression, lambda _: value(), is_known=True)


@functools.cache
def _let_json_read_late_numbers() -> None:
    """Let `json` write a number that is kept and not yet read, which is no `float` for its C code."""
    original = json.JSONEncoder.default

    def default(self: json.JSONEncoder, o: Any) -> Any:
        return o.value if type(o) is LateNumber else original(self, o)

    json.JSONEncoder.default = default
