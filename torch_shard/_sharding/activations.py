"""Rules for what modules take and return: by the names of modules and arguments, checked before anything is traced."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._sharding.mesh import axes_of, describe_spec, find_spec_faults, has_three_axes

RETURN = "return"
"""In the place of an argument: what a module returns. No argument of Python can have this name."""


@dataclass(frozen=True)
class Place:
    """Where a tensor enters or leaves a module.

    Attributes:
        module: Its name, or a glob.
        argument: Of `forward`, or `RETURN`.
        parts: The way to the tensor within tuples (numbers), dicts (keys) and records (attributes).
    """

    module: str
    argument: str = RETURN
    parts: tuple[str, ...] = ()

    @property
    def matrix(self) -> str | None:
        """The name of the matrix that what is here was multiplied by, if it is all that a layer returns."""
        is_result = (self.argument, self.parts) == (RETURN, ())
        return f"{self.module}.weight".lstrip(".") if is_result else None

    def __str__(self) -> str:
        within = ".".join((self.argument, *self.parts))
        return self.module if within == RETURN else f"{self.module}:{within}"


@dataclass(frozen=True)
class Constraint:
    """How a plan splits the tensor at one place.

    Attributes:
        place: Of one module.
        spec: As the rule has it.
        rule: The pattern.
        of_matrix: Axes over which the module's own matrix is split, if it is about what that returns.
    """

    place: Place
    spec: PartitionSpec
    rule: str
    of_matrix: tuple[str, ...] = ()

    def at_rank(self, ndim: int) -> "Constraint":
        """The same for a tensor of so many dims.

        Where a spec speaks of (batch, sequence, features), one of two dims has its sequence within its rows, or has
        none: its rows are split as the batch is, its features as they are.
        """
        is_merged = ndim == 2 and len(self.spec) == 3
        return replace(self, spec=PartitionSpec(self.spec[0], self.spec[2])) if is_merged else self

    def gathered(self, ndim: int) -> tuple[str, ...]:
        """The axes over which the gradient of a tensor is gathered before the module's own backward pass reads it.

        That multiplies it twice, for the module's input and for its matrix. Where the matrix is split over an axis that
        splits what it returns along a dim of rows (a row layer, in front of a stream that is split along its sequence),
        both products need these rows whole, and XLA's partitioner would gather them for each.
        """
        rows = axes_of(without_free(self.spec)[: ndim - 1])
        return tuple(axis for axis in self.of_matrix if axis in rows)

    def find_faults(self, shape: tuple[int, ...], mesh: Mesh) -> list[str]:
        """Say what keeps a tensor of this shape from being split so, and what to do; empty if nothing does."""
        found = find_spec_faults(without_free(self.spec), shape, mesh)
        return [f"{self.place} {shape}: {fault} (rule {self.rule!r}). {remedy}" for fault, remedy in found]


def without_free(spec: PartitionSpec) -> PartitionSpec:
    """The same spec with None for each dim that is left to the compiler."""
    return PartitionSpec(*(None if part is PartitionSpec.UNCONSTRAINED else part for part in spec))


def read_place(key: str) -> Place:
    """Read a rule such as `"model.layers.*"`, `"lm_head:input"` or `"encoder:return.last_hidden_state"`."""
    module, _, rest = key.partition(":")
    argument, *parts = (rest or RETURN).split(".")
    return Place(module, argument, tuple(parts))


def find_type_fault(key: object, spec: object) -> str | None:
    """Say what is wrong with a rule by itself."""
    if not isinstance(key, str):
        return f"activations rule {key!r}: a rule is a name or a glob of modules, got {type(key).__name__}."
    if not isinstance(spec, PartitionSpec):
        return f'activations rule "{key}": expected a PartitionSpec, got {spec!r}. To replicate, say P().'
    place = read_place(key)
    if key.endswith(":") or not all((place.argument.isidentifier(), *place.parts)):
        return (
            f'activations rule "{key}": after the name of a module come a colon and the name of an argument of its '
            'forward, or "return", as in "lm_head:input", "encoder:return.last_hidden_state".'
        )
    return None


def resolve_activations(
    rules: Mapping[str, PartitionSpec], model: torch.nn.Module, mesh: Mesh, ranks: Mapping[str, int]
) -> tuple[list[Constraint], list[str]]:
    """What rules ask for of each module of a model, and all that is wrong with them.

    At each place those of the highest rank count. Of them an exact name beats a glob; two globs that give one place
    different specs are a fault.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in reversed(list(names.items()))}
    faults: list[str] = []
    found: dict[Place, list[Constraint]] = {}
    for key, spec in rules.items():
        place = read_place(key)
        of_axes = find_spec_faults(without_free(spec), (0,) * len(spec), mesh)  # those that depend on no shape
        faults += [f'activations rule "{key}": {fault}. {remedy}' for fault, remedy in of_axes]
        matches = make_matcher(place.module)
        matched = [name for name in names if matches(name) and (name or not place.module)]  # a glob is of submodules
        if not matched:
            closest = difflib.get_close_matches(place.module, names, n=1, cutoff=0)
            hint = "".join(f' The closest name is "{name}".' for name in closest)
            faults.append(f'activations rule "{key}" matches no module.{hint}')
        for name in matched:
            own = Place(first[id(names[name])], place.argument, place.parts)
            found.setdefault(own, []).append(Constraint(own, spec, key))
    for place in found:
        faults += _argument_faults(model, found[place][0])
    highest = {place: max(ranks[c.rule] for c in asked) for place, asked in found.items()}
    chosen = [_choose([c for c in asked if ranks[c.rule] == highest[place]]) for place, asked in found.items()]
    return [c for c in chosen if isinstance(c, Constraint)], [*faults, *(c for c in chosen if isinstance(c, str))]


def find_moving_axes(constraints: Sequence[Constraint], mesh: Mesh, rows: Collection[str]) -> list[str]:
    """Say which axes constraints have in several dims, where XLA's partitioner errs; empty where it does not.

    It does on meshes of three axes, in products of factors that have two axes in other dims each (jaxlib 0.10.2;
    validation/fuzz). One axis may move, as that of sequence parallelism does.
    """
    dims: dict[str, dict[int, Constraint]] = {}
    for constraint in constraints:
        for dim, part in enumerate(without_free(constraint.spec)):
            for axis in axes_of((part,)):
                if axis not in rows and mesh.shape[axis] > 1:
                    dims.setdefault(axis, {}).setdefault(dim, constraint)
    if not has_three_axes(mesh) or len(dims) < 2:
        return []
    return [
        f'axis "{axis}" is in dim '
        + " and ".join(f"{d} of {c.place} {describe_spec(c.spec)}" for d, c in at.items())
        + "."
        for axis, at in dims.items()
        if len(at) > 1
    ]


def _argument_faults(model: torch.nn.Module, constraint: Constraint) -> list[str]:
    place = constraint.place
    module = model.get_submodule(place.module)
    known = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    if place.argument == RETURN or place.argument in known or takes_any:
        return []
    takes = ", ".join(known) or "nothing"
    what = f"{place.module} ({type(module).__name__})"
    return [
        f'activations rule "{constraint.rule}": forward of {what} has no argument {place.argument}; it takes {takes}.'
    ]


def _choose(asked: list[Constraint]) -> Constraint | str:
    """The one that counts, or why none does."""
    exact = [c for c in asked if "*" not in read_place(c.rule).module]
    first, *others = exact or asked
    clash = next((c for c in others if c.spec != first.spec), None)
    if clash is None:
        return first
    shown = " and ".join(f'"{c.rule}": {describe_spec(c.spec)}' for c in (first, clash))
    return f'activations rules {shown} give {first.place} different specs. Add a rule for "{first.place}" itself.'


# Patterns of names: exact, globs over dotted segments, or regular expressions.


def make_matcher(key: str | re.Pattern[str]) -> Callable[[str], object]:
    """Tell whether a name is what a rule says: an exact name, a glob or a regex."""
    if isinstance(key, re.Pattern):
        return key.fullmatch
    if "*" not in key:
        return key.__eq__
    # Every segment takes its closing dot along, so that `**` may stand for no segment at all.
    parts = (
        r"(?:[^.]*\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\." for part in key.split(".")
    )
    whole = re.compile("".join(parts))
    return lambda name: whole.fullmatch(name + ".")
