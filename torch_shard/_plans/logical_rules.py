"""Rules from logical names of dims to axes of a mesh, as flax and MaxText apply them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jax.sharding import PartitionSpec

from torch_shard._common.caller import caller
from torch_shard._plans.decisions import Axes, names_of

Dim: TypeAlias = Any  # str | tuple[str, ...] | None, or PartitionSpec.UNCONSTRAINED, which has no type of its own
"""Of one dim: its logical name, None for none, several where one dim stands for several (heads and their features)."""


@dataclass(frozen=True)
class LogicalRules:
    """Rules in the order of their priority.

    Attributes:
        pairs: A logical name, and the axes for it; the same name may come again, with what to fall back to.
        sizes: Of the axes of a mesh. Those that it lacks, or has with size 1, take part in the choice and are then left
            out, as MaxText does it (`remove_size_one_mesh_axis`).
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: Mapping[str, int]

    @property
    def names(self) -> set[str]:
        """All logical names."""
        return {name for name, _ in self.pairs}

    def spec_of(self, dims: Sequence[Dim]) -> PartitionSpec:
        """The spec of a tensor with these dims: flax's `logical_to_mesh_axes`.

        A rule counts if its name is one of the tensor's, which no rule before it has given axes, and none of its axes
        splits another dim of the tensor.
        """
        split = [() if dim is PartitionSpec.UNCONSTRAINED else names_of(dim) for dim in dims]
        names = [name for part in split for name in part]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is the name of two dims")
        given: dict[str, tuple[str, ...]] = {}
        for name, axes in self.pairs:
            taken = {axis for others in given.values() for axis in others}
            if name in names and name not in given and taken.isdisjoint(axes):
                given[name] = axes
        found = ([axis for name in part for axis in given.get(name, ())] for part in split)
        parts = (tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1) for axes in found)
        pairs = zip(dims, parts, strict=True)
        return PartitionSpec(*(dim if dim is PartitionSpec.UNCONSTRAINED else part for dim, part in pairs))


def read_rules(rules: object, sizes: Mapping[str, int]) -> LogicalRules:
    """Read what a user gave as rules."""
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(
            f"{caller()}: rules must be a sequence of pairs, as in "
            f'[("embed", ["fsdp"]), ("mlp", "tensor")], got {type(rules).__name__}.'
        )
    given = cast(Sequence[object], rules)
    if odd := [rule for rule in given if not _is_rule(rule)]:
        shown = "\n".join(f"  {rule!r}" for rule in odd)
        raise TypeError(
            f"{caller()}: a rule is a logical name with an axis, several or None. These are not:\n\n{shown}"
        )
    pairs = cast(Iterable[tuple[str, Axes | None]], given)
    return LogicalRules(tuple((name, names_of(axes)) for name, axes in pairs), sizes)


def _is_rule(rule: object) -> bool:
    parts = cast(Sequence[object], rule) if isinstance(rule, list | tuple) else ()
    return len(parts) == 2 and isinstance(parts[0], str) and are_names(parts[1])


def are_names(value: object) -> bool:
    """Whether it is None, a name or several."""
    parts = cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]
    return value is None or all(isinstance(part, str) for part in parts)
