"""Plans written as logical names of dims, with rules for them."""

from collections import Counter
from collections.abc import Iterable

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import error_prefix
from torch_shard._common.validate import check_kind
from torch_shard._common.wrappers import check_module
from torch_shard._plans.decisions import entries_of, places_with_globs, with_globs
from torch_shard._plans.logical_names import OLDER, logical_names
from torch_shard._plans.logical_rules import Dim
from torch_shard._sharding import ShardingPlan, axes_of, check_mesh

Rules = list[tuple[str, tuple[str, ...]]]


@error_prefix("plans.to_logical")
def to_logical(
    plan: ShardingPlan, model: nn.Module, mesh: Mesh
) -> tuple[Rules, dict[str, tuple[Dim, ...]], dict[str, tuple[Dim, ...]]]:
    """Write a plan as rules of flax and MaxText, with the logical names that they are about.

    Dims have the names that `from_logical` knows. Where a plan splits dims of one name in several ways, the name stands
    for the way that most have, and the others get names of their own, which no model of MaxText has. Every
    split can be said so; `plan.stored` is not a split, and is left to the reader: `plan | ShardingPlan(stored=...)`.

    Args:
        plan: Any plan for this model.
        model: Whose entries are named.
        mesh: Where the plan would lie.

    Returns:
        What `from_logical` takes: the rules, the names of the dims of all entries, and those of activations.

    Raises:
        ValueError: The plan does not fit the model and the mesh.

    Example:
        >>> import torch, torch_shard as ts
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> mesh = ts.make_mesh(batch=4, model=2)
        >>> rules, names, _ = ts.plans.to_logical(ts.plans.tp(mlp, mesh), mlp, mesh)
        >>> rules, names["2.weight"]
        ([('mlp', ('model',))], ('embed', 'mlp'))
    """
    check_kind("plan", plan, ShardingPlan)
    model = check_module("model", model)
    resolved = plan.resolve(model, check_mesh(mesh))
    known = logical_names(model, OLDER)
    specs = {
        name: _parts(sharding.spec, entry.ndim)
        for (name, sharding), entry in zip(resolved.items(), entries_of(model).values(), strict=True)
    }
    namer = _Namer(
        (dim, axes)
        for name, parts in specs.items()
        for dim, axes in zip(_plain(known.get(name), len(parts)), parts, strict=True)
    )
    names = {name: namer.names(_plain(known.get(name), len(parts)), parts) for name, parts in specs.items()}
    asked: dict[str, tuple[Dim, ...]] = {}
    for constraint in resolved.activations:
        parts = _parts(constraint.spec, len(constraint.spec))
        free = [part is PartitionSpec.UNCONSTRAINED for part in constraint.spec]
        made = namer.names(["activation" if axes else None for axes in parts], parts)
        asked[str(constraint.place)] = tuple(
            PartitionSpec.UNCONSTRAINED if is_free else dim for dim, is_free in zip(made, free, strict=True)
        )
    return namer.rules, with_globs(names, list(names)), places_with_globs(asked, model)


def _parts(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    """The axes of each dim."""
    free = PartitionSpec.UNCONSTRAINED
    parts = [() if part is free else tuple(axes_of((part,))) for part in spec]
    return [*parts, *(() for _ in range(rank - len(parts)))]


def _plain(dims: tuple[Dim, ...] | None, rank: int) -> list[str | None]:
    """One name for each dim: of several, the first."""
    return [dim[0] if isinstance(dim, tuple) else dim for dim in dims or (None,) * rank]


class _Namer:
    """Names that each stand for the same axes everywhere.

    Attributes:
        rules: For them, as far as they are given.
    """

    def __init__(self, used: Iterable[tuple[str | None, tuple[str, ...]]]) -> None:
        counts = Counter((name, axes) for name, axes in used if name is not None)
        self._usual: dict[str, tuple[str, ...]] = {}
        for (name, axes), _ in counts.most_common():
            self._usual.setdefault(name, axes)
        self.rules: Rules = []

    def names(self, dims: Iterable[str | None], parts: Iterable[tuple[str, ...]]) -> tuple[Dim, ...]:
        """The names of a tensor's dims that have these axes, and rules for those that are new."""
        made: list[str | None] = []
        for dim, axes in zip(dims, parts, strict=True):
            name = dim
            if axes and (dim is None or self._usual.get(dim) != axes or dim in made):
                name = "_".join((dim or "split", *axes))
            elif dim is not None and (self._usual.get(dim, ()) != axes or dim in made):
                name = None
            if axes and name is not None and (name, axes) not in self.rules:
                self.rules.append((name, axes))
            made.append(name)
        return tuple(made)
