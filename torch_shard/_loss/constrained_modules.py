"""What modules take and return, split as a plan asks, while the loss is captured: no module is changed."""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, cast

import torch
from jax.sharding import Mesh
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.overrides import in_transform
from torch_shard._common.patching import patched
from torch_shard._common.types import PyTree
from torch_shard._lowering import constrained
from torch_shard._sharding import RETURN, Constraint, ResolvedPlan, find_moving_axes

Forward = Callable[..., PyTree]


class Activations:
    """The constraints of a plan on what modules of a model take and return."""

    def __init__(self, model: nn.Module, constraints: Sequence[Constraint], mesh: Mesh) -> None:
        self._constraints = constraints
        self._mesh = mesh
        self._of_module: dict[int, list[Constraint]] = {}
        self._classes: set[type[nn.Module]] = set()
        for constraint in constraints:
            module = model.get_submodule(constraint.place.module)
            self._of_module.setdefault(id(module), []).append(constraint)
            self._classes.add(type(module))

        self._running: set[int] = set()
        self._faults: dict[str, None] = {}
        self._met_rules: set[str] = set()

    @contextlib.contextmanager
    def active(self) -> Generator[None, None, None]:
        """Modules that run within take and return tensors that are split."""
        with contextlib.ExitStack() as stack:
            for cls in self._classes:
                stack.enter_context(patched(cls, "forward", self._wrap))
            yield

    def check(self, *, all_met: bool) -> None:
        """Refuse, all together, what does not fit the tensors that have come by."""
        lines = list(self._faults)
        if not lines and all_met:
            unmet = dict.fromkeys(c.rule for c in self._constraints if c.rule not in self._met_rules)
            lines = [f"rule {rule!r}: none of its modules ran, or none had a tensor there." for rule in unmet]
        if lines:
            shown = "\n".join(f"  {line}" for line in lines)
            raise ValueError(f"{caller()}: activations cannot be split as asked by the plan.\n\n{shown}")

    def _wrap(self, original: Forward) -> Forward:
        def forward(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            constraints = self._of_module.get(id(module))

            # The forward of a base class, called by that of the class, runs within it: its arguments are split already.
            if constraints is None or id(module) in self._running:
                return original(module, *args, **kwargs)

            self._running.add(id(module))
            try:
                args, kwargs = self._split_arguments(original, module, args, kwargs)
                output = original(module, *args, **kwargs)
                return self._split(constraints, RETURN, output)
            finally:
                self._running.discard(id(module))

        return forward

    def _split_arguments(
        self, original: Forward, module: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments of a call, split."""
        constraints = [c for c in self._of_module[id(module)] if c.place.argument != RETURN]
        if not constraints:
            return args, kwargs

        signature = inspect.signature(original)
        bound = signature.bind(module, *args, **kwargs)

        # Arguments that **kwargs takes stand in a dict of their own.
        further: dict[str, PyTree] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                further = bound.arguments.get(name, {})

        for name in dict.fromkeys(c.place.argument for c in constraints):
            arguments = bound.arguments if name in bound.arguments else further
            if name in arguments:
                arguments[name] = self._split(constraints, name, arguments[name])
        return bound.args[1:], bound.kwargs

    def _split(self, constraints: Sequence[Constraint], argument: str, value: PyTree) -> PyTree:
        for constraint in constraints:
            if constraint.place.argument == argument:
                value = self._at(constraint, constraint.place.parts, value)
        return value

    def _at(self, constraint: Constraint, parts: tuple[str, ...], value: PyTree) -> PyTree:
        """The value with the tensor at these parts of it split."""
        if parts:
            try:
                return _replaced(value, parts[0], lambda part: self._at(constraint, parts[1:], part))
            except (LookupError, AttributeError, ValueError):
                return self._fault(f"{constraint.place}: {type(value).__name__} has no part {parts[0]!r}.", value)

        if value is None:
            return value

        if not isinstance(value, torch.Tensor):
            where = f"{constraint.place.argument}."
            hint = f'Name one of its tensors by the way to it, as in "{constraint.place.module}:{where}0".'
            return self._fault(
                f"{constraint.place}: found {type(value).__name__}, which is not a tensor. {hint}", value
            )

        self._met_rules.add(constraint.rule)
        constraint = constraint.at_rank(value.ndim)
        faults = constraint.find_faults(tuple(value.shape), self._mesh)
        if faults:
            self._faults |= dict.fromkeys(faults)
            return value

        # Within torch.func.vmap a tensor has a dim less than in the program.
        if in_transform():
            return value
        return constrained(value, constraint.spec, constraint.gathered(value.ndim))

    def _fault(self, line: str, value: PyTree) -> PyTree:
        self._faults[line] = None
        return value


def check_activations(plan: ResolvedPlan, rows: Collection[str]) -> None:
    """Refuse constraints with which XLA's partitioner errs."""
    lines = find_moving_axes(plan.activations, plan.mesh, rows)
    if lines:
        shown = "\n".join(f"  {line}" for line in lines)
        raise NotImplementedError(
            f"{caller()}: activations cannot be split as asked by the plan on a mesh of three axes or more, where XLA "
            f"gives wrong gradients. Give each axis one dim, or use one axis beside those of the batch.\n\n"
            f"{shown}"
        )


def _replaced(value: PyTree, part: str, change: Callable[[PyTree], PyTree]) -> PyTree:
    """A copy of a container with one part of it changed."""
    if isinstance(value, tuple | list):
        sequence: Any = value
        items = list(sequence)
        names = getattr(sequence, "_fields", ())  # of a named tuple
        at = names.index(part) if part in names else int(part)
        items[at] = change(items[at])
        return sequence._make(items) if names else type(sequence)(items)

    if isinstance(value, Mapping):  # also a ModelOutput of transformers
        mapping: Any = copy.copy(cast(Mapping[str, PyTree], value))
        mapping[part] = change(mapping[part])
        return mapping

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{part: change(getattr(value, part))})
    raise LookupError(part)
