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

from torch_shard._common.specs import axes_of, describe_spec, has_three_axes
from torch_shard._sharding.mesh import find_spec_faults

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
        if ndim != 2 or len(self.spec) != 3:
            return self
        batch, _, features = self.spec
        return replace(self, spec=PartitionSpec(batch, features))

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
        faults = find_spec_faults(without_free(self.spec), shape, mesh)
        return [f"{self.place} {shape}: {fault} (rule {self.rule!r}). {remedy}" for fault, remedy in faults]


def without_free(spec: PartitionSpec) -> PartitionSpec:
    """The same spec with None for each dim that is left to the compiler."""
    free = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(*(None if part is free else part for part in spec))


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
    modules = dict(model.named_modules(remove_duplicate=False))
    # A module that stands under several names goes by the first.
    first_names: dict[int, str] = {}
    for name, module in modules.items():
        first_names.setdefault(id(module), name)

    faults: list[str] = []
    candidates: dict[Place, list[Constraint]] = {}
    for key, spec in rules.items():
        rule_place = read_place(key)
        # With a shape of zeros, these are the faults that depend on no shape: axes that the mesh lacks or has twice.
        spec_faults = find_spec_faults(without_free(spec), (0,) * len(spec), mesh)
        faults += [f'activations rule "{key}": {fault}. {remedy}' for fault, remedy in spec_faults]

        # The name of the whole model is empty. A glob is of submodules, only an empty rule is of the whole.
        matches = make_matcher(rule_place.module)
        matched = [name for name in modules if matches(name) and (name or not rule_place.module)]
        if not matched:
            closest = difflib.get_close_matches(rule_place.module, modules, n=1, cutoff=0)
            hint = f' The closest name is "{closest[0]}".' if closest else ""
            faults.append(f'activations rule "{key}" matches no module.{hint}')

        for name in matched:
            place = replace(rule_place, module=first_names[id(modules[name])])
            candidates.setdefault(place, []).append(Constraint(place, spec, key))

    chosen: list[Constraint] = []
    clashes: list[str] = []
    for constraints in candidates.values():
        faults += _argument_faults(model, constraints[0])
        highest = max(ranks[constraint.rule] for constraint in constraints)
        choice = _choose([constraint for constraint in constraints if ranks[constraint.rule] == highest])
        if isinstance(choice, Constraint):
            chosen.append(choice)
        else:
            clashes.append(choice)
    return chosen, faults + clashes


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

    lines: list[str] = []
    for axis, constraint_of_dim in dims.items():
        if len(constraint_of_dim) > 1:
            places = [f"{dim} of {c.place} {describe_spec(c.spec)}" for dim, c in constraint_of_dim.items()]
            lines.append(f'axis "{axis}" is in dim {" and ".join(places)}.')
    return lines


def _argument_faults(model: torch.nn.Module, constraint: Constraint) -> list[str]:
    place = constraint.place
    module = model.get_submodule(place.module)
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if place.argument == RETURN or place.argument in parameters or takes_any:
        return []

    takes = ", ".join(parameters) or "nothing"
    rule = f'activations rule "{constraint.rule}"'
    what = f"{place.module} ({type(module).__name__})"
    return [f"{rule}: forward of {what} has no argument {place.argument}; it takes {takes}."]


def _choose(asked: list[Constraint]) -> Constraint | str:
    """The one that counts, or why none does."""
    exact = [constraint for constraint in asked if "*" not in read_place(constraint.rule).module]
    first, *others = exact or asked
    for other in others:
        if other.spec != first.spec:
            shown = " and ".join(f'"{c.rule}": {describe_spec(c.spec)}' for c in (first, other))
            remedy = f'Add a rule for "{first.place}" itself.'
            return f"activations rules {shown} give {first.place} different specs. {remedy}"
    return first


# Patterns of names: exact, globs over dotted segments, or regular expressions.


def make_matcher(key: str | re.Pattern[str]) -> Callable[[str], object]:
    """Tell whether a name is what a rule says: an exact name, a glob or a regex."""
    if isinstance(key, re.Pattern):
        return key.fullmatch
    if "*" not in key:
        return key.__eq__
    # Every segment takes its closing dot along, so that `**` may stand for no segment at all.
    pattern = ""
    for segment in key.split("."):
        pattern += r"(?:[^.]*\.)*" if segment == "**" else re.escape(segment).replace(r"\*", "[^.]*") + r"\."
    compiled = re.compile(pattern)
    return lambda name: compiled.fullmatch(name + ".")
