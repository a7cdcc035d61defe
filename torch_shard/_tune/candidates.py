"""What may be chosen: meshes, recipes, and how layers run; a choice is a few words, from which its options are made."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, quietly, replicated, tp
from torch_shard._sharding import ShardingPlan

Make = Callable[[nn.Module, Mesh], ShardingPlan]

DATA, BOTH, HYBRID = ("batch",), ("batch", "model"), ("replica", "batch")
MICROBATCHES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to split a model.

    Attributes:
        axes: Of the meshes that it is for.
        plan: Makes the plan.
        optimizer_plan: Makes that of the optimizer's state, if that is split further (ZeRO-1).
    """

    axes: tuple[str, ...]
    plan: Make
    optimizer_plan: Make | None = None


# A vocabulary that does not divide is padded, or the largest table would be whole on each device.
_tp, _fsdp_tp = (functools.partial(recipe, pad_vocab=True) for recipe in (tp, fsdp_tp))

RECIPES: dict[str, Recipe] = {
    "replicated": Recipe(DATA, replicated),
    "replicated + ZeRO-1": Recipe(DATA, replicated, fsdp),
    "fsdp": Recipe(DATA, fsdp),
    "hsdp": Recipe(HYBRID, hsdp),
    "hsdp + ZeRO-1": Recipe(HYBRID, hsdp, functools.partial(fsdp, fsdp=("batch", "replica"))),
    "tp": Recipe(BOTH, _tp),
    "tp + ZeRO-1": Recipe(BOTH, _tp, _fsdp_tp),
    "fsdp_tp": Recipe(BOTH, _fsdp_tp),
    "fsdp_tp(sequence)": Recipe(BOTH, functools.partial(_fsdp_tp, sequence=True)),
    "expert": Recipe(BOTH, expert),
    "expert(tp)": Recipe(BOTH, functools.partial(expert, tp="model")),
    "expert(tp, sequence)": Recipe(BOTH, functools.partial(expert, tp="model", sequence=True)),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice.

    Attributes:
        axes: Names and sizes of the mesh's axes.
        recipe: One of `RECIPES`.
        remat: As `make_train_step` takes it, as the next two.
        scan_layers: See there.
        accumulate_steps: See there.
    """

    axes: tuple[tuple[str, int], ...]
    recipe: str
    remat: str | int = "none"
    scan_layers: bool | str = "auto"
    accumulate_steps: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh's axes."""
        return dict(self.axes)

    @property
    def data_shards(self) -> int:
        """Over how many devices rows are split."""
        return self.sizes.get("batch", 1) * self.sizes.get("replica", 1)

    @property
    def family(self) -> tuple[object, ...]:
        """What it has in common with those that differ in how layers run."""
        return self.axes, self.recipe

    @property
    def mesh_text(self) -> str:
        """The mesh, in words."""
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    def __str__(self) -> str:
        parts = [f"({self.mesh_text}) {self.recipe}", f"remat={self.remat}"]
        parts += [f"scan_layers={self.scan_layers}"] if self.scan_layers != "auto" else []
        parts += [f"accumulate_steps={self.accumulate_steps}"] if self.accumulate_steps > 1 else []
        return ", ".join(parts)

    def options(self, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`.

        Args:
            model: Whose names the plan has.
            mesh: With these axes.
        """
        recipe = RECIPES[self.recipe]
        made: dict[str, Any] = {"mesh": mesh}
        with quietly():
            made["plan"] = recipe.plan(model, mesh)
            if recipe.optimizer_plan is not None:
                made["optimizer_plan"] = recipe.optimizer_plan(model, mesh)
        if "replica" in self.sizes:
            made["batch_spec"] = PartitionSpec(("replica", "batch"))
        how = {"remat": self.remat, "scan_layers": self.scan_layers, "accumulate_steps": self.accumulate_steps}
        return {**made, **how}


def families(num_devices: int, *, has_experts: bool, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Every mesh with every recipe for it; with experts, `expert(tp)` for `fsdp_tp`, as that one advises.

    Args:
        num_devices: All of which are used.
        has_experts: Whether the model has experts in one tensor.
        fixed: Options that the user gave.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for name, recipe in RECIPES.items():
        if name.startswith("fsdp_tp" if has_experts else "expert"):
            continue
        if recipe.axes == DATA:
            yield Candidate((("batch", num_devices),), name)
        elif recipe.axes == BOTH:
            yield from (Candidate((("batch", num_devices // n), ("model", n)), name) for n in sizes if n > 1)
        elif fixed.get("batch_spec") is None:
            inner = [n for n in sizes if 1 < n < num_devices]
            yield from (Candidate((("replica", num_devices // n), ("batch", n)), name) for n in inner)


def variants(
    family: Candidate,
    *,
    layers: Sequence[int],
    auto_is_loop: bool,
    most: int,
    microbatches: Iterable[int],
    fixed: Mapping[str, Any],
) -> Iterator[Candidate]:
    """All ways in which the layers of a family may run.

    Args:
        family: A mesh and a recipe.
        layers: Number of repeated layers of each kind.
        auto_is_loop: Whether layers that compute nothing again become loops if nobody says it.
        most: So many layers may run one by one.
        microbatches: Numbers to choose from.
        fixed: Options that the user gave.
    """
    remats: Sequence[Any] = ("none", "dots", "block") if any(num > 1 for num in layers) else ("none",)
    loops: Sequence[Any] = ("auto", False) if 0 < sum(layers) <= most else ("auto",)
    choices = {"remat": remats, "scan_layers": loops, "accumulate_steps": tuple(microbatches)}
    choices = {name: (fixed[name],) if name in fixed else found for name, found in choices.items()}
    for values in itertools.product(*choices.values()):
        made = dataclasses.replace(family, **dict(zip(choices, values, strict=True)))
        is_loop = auto_is_loop or made.remat != "none"
        if "scan_layers" not in fixed and made.scan_layers == "auto" and loops[1:] and not is_loop:
            made = dataclasses.replace(made, scan_layers=True)
        yield made
