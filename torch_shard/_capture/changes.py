"""What a captured callable left on modules with another value, and what follows for its next call."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_shard._capture.fakes import StaleTensor, original_of, revive
from torch_shard._capture.side_effects import Change, new_values


class Changes(tuple[Change, ...]):
    """Changes of attributes, which have been put back."""

    __slots__ = ()

    def that_matter(self) -> "Changes":
        """Those for which the next call may be another program."""
        return Changes(change for change in self if change.matters and not _is_same(change.old, change.new))

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Let attributes have the values that the callable left, for a while."""
        return new_values(self)

    def after(self, num_calls: int, second: "Changes") -> "Changes":
        """The same after many calls, where it is of a number that a second call takes on by as much as the first."""
        then = {change.path: change.new for change in second}
        return Changes(_after(change, num_calls, then.get(change.path)) for change in self)

    def that_depend_on_inputs(self) -> list[Change]:
        """Those of attributes in which something depends on the inputs of the callable."""
        return [change for change in self if _depends_on_inputs(change)]

    def are_of_constants(self) -> bool:
        """Tell whether all left, where no tensor was, tensors that depend on no input; or names of buffers."""
        return all(map(_is_of_constants, self))

    def refuse_new_parameters(self) -> None:
        """Refuse a callable that gives a module further parameters."""
        names: list[str] = []
        for change in self:
            path = change.path.removesuffix(change.name)
            added: dict[str, Any] = change.added()
            for name, value in added.items():
                is_module = change.name == "_modules" and isinstance(value, nn.Module)
                parameters = list(value.parameters()) if is_module else []
                if change.name == "_parameters" or parameters:
                    names.append(f"{path}{name}")
        if names:
            raise NotImplementedError(
                f"The function adds {', '.join(names)} to a module, with parameters that the state of a step would "
                "lack. Make them before: in __init__, or by one call of the model in eager torch."
            )

    def made_buffers(self) -> list[tuple[str, torch.Tensor, bool]]:
        """The buffers that the callable has registered: name, value, and whether a `state_dict` has it."""
        not_persistent: dict[int, Any] = {}
        for change in self:
            if change.name == "_non_persistent_buffers_set":
                not_persistent[id(change.attributes)] = change.new

        buffers: list[tuple[str, torch.Tensor, bool]] = []
        for change in self:
            added: dict[str, Any] = change.added() if change.name == "_buffers" else {}
            for leaf, buffer in added.items():
                name = change.path.removesuffix("_buffers") + leaf
                try:
                    value = revive(buffer)
                except StaleTensor as error:
                    raise NotImplementedError(
                        f"The captured function registers the buffer {name}, which depends on its inputs, and the "
                        "state of a step would lack it: register it in __init__, with its shape; forward stays as it "
                        "is."
                    ) from error
                is_persistent = leaf not in not_persistent.get(id(change.attributes), ())
                buffers.append((name, value, is_persistent))
        return buffers

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Say by which attribute a tensor of one call comes back in the next.

        Args:
            what: The name of the callable.
        """
        try:
            yield
        except StaleTensor as error:
            change = next((change for change in self if any(t is error.tensor for t in change.tensors)), None)
            if change is None:
                raise
            name = change.name if isinstance(change.old, torch.Tensor) else change.path.rpartition(".")[2]
            raise NotImplementedError(
                f"{error.line}\n{what} reads {change.what}, a tensor, and writes it: it carries a "
                "value from call to call, which a compiled program does only in a buffer. Register it in __init__: "
                f"self.register_buffer({name!r}, tensor, persistent=False); forward stays as it is."
            ) from error


def _after(change: Change, num_calls: int, second: object) -> Change:
    first: Any = 0 if change.is_new else change.old
    if not all(type(value) in (int, float) for value in (first, change.new, second)):
        return change

    step: Any = change.new - first
    if second != change.new + step:
        return change
    return dataclasses.replace(change, new=first + num_calls * step)


def _depends_on_inputs(change: Change) -> bool:
    try:
        for tensor in change.tensors:
            revive(tensor)
    except StaleTensor:
        return True
    return False


def _is_of_constants(change: Change) -> bool:
    if change.name == "_non_persistent_buffers_set":
        return True
    replaces_tensor = _replaces_tensor(change.old, change.new)
    return bool(change.tensors) and not replaces_tensor and not _depends_on_inputs(change)


def _is_same(old: Any, new: Any) -> bool:
    """Tell whether a value is what was there: `self.mask = self.mask.to(x.device)`."""
    while new is not old and isinstance(new, torch.Tensor) and (original := original_of(new)) is not None:
        new = original
    if new is old:
        return True

    before, after = _by_key(old), _by_key(new)
    if before is None or after is None or before.keys() != after.keys():
        return False
    return all(_is_same(before[key], after[key]) for key in after)


def _replaces_tensor(old: Any, new: Any) -> bool:
    """Tell whether something else is where a tensor was."""
    if isinstance(old, torch.Tensor):
        return not _is_same(old, new)
    before, after = _by_key(old) or {}, _by_key(new) or {}
    return any(_replaces_tensor(value, after.get(key)) for key, value in before.items())


def _by_key(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple | collections.deque) else None
