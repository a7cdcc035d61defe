"""What may be chosen: meshes, recipes, and how layers run; a choice is a few words, from which its options are made."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from torch import nn

from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, quietly, replicated, tp
from torch_shard._sharding import ShardingPlan

Make = Callable[[nn.Module, Mesh], ShardingPlan]

DATA, BOTH, HYBRID = ("batch",), ("batch", "model"), ("replica", "batch")

WIDEST = 16
"""An axis `model` has at most so many devices: what it sends is waited for."""


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
    "fsdp": Recipe(DATA, fsdp),
    "replicated": Recipe(DATA, replicated),
    "replicated + ZeRO-1": Recipe(DATA, replicated, fsdp),
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
"""The first is the default: what a user takes who does not tune, on one axis with all devices."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice.

    Attributes:
        axes: Names and sizes of the mesh's axes.
        recipe: One of `RECIPES`.
        remat: As `make_train_step` takes it, as the next one.
        scan_layers: See there.
        in_loops: Whether layers that are alike run in loops, which compile in a fraction of the time.
        offload: Whether moments and what layers keep wait in the host's memory.
    """

    axes: tuple[tuple[str, int], ...]
    recipe: str
    remat: str | int = "none"
    scan_layers: bool | str = "auto"
    in_loops: bool = True
    offload: bool = False

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

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes)
        how = f"remat={self.remat}, {'in loops' if self.in_loops else 'one by one'}{', offload' * self.offload}"
        return f"({mesh}) {self.recipe}, {how}"

    @property
    def how(self) -> dict[str, Any]:
        """Keyword arguments of `make_train_step` about layers and memory."""
        away = {"offload": ("optimizer", "activations")} if self.offload else {}
        return {"remat": self.remat, "scan_layers": self.scan_layers, **away}

    def options(self, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`."""
        recipe = RECIPES[self.recipe]
        made: dict[str, Any] = {"mesh": mesh, **self.how}
        with quietly():
            made["plan"] = recipe.plan(model, mesh)
            if recipe.optimizer_plan is not None:
                made["optimizer_plan"] = recipe.optimizer_plan(model, mesh)
        return made


def families(num_devices: int, *, has_experts: bool, has_spec: bool) -> Iterator[Candidate]:
    """Every mesh with every recipe for it that makes a program of its own, the default first.

    Args:
        num_devices: All of which are used.
        has_experts: Whether the model has experts in one tensor: `expert(tp)` is then for `fsdp_tp`, as that advises.
        has_spec: Whether the user says how the batch is split.
    """
    sizes = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
    for name, recipe in RECIPES.items():
        if name.startswith("fsdp_tp" if has_experts else "expert"):
            continue
        if recipe.axes == DATA and (sizes or name == "fsdp"):
            yield Candidate((("batch", num_devices),), name)
        elif recipe.axes == HYBRID and not has_spec:
            yield from (Candidate((("replica", num_devices // n), ("batch", n)), name) for n in sizes[:-1])
        elif recipe.axes == BOTH:
            widths = [n for n in sizes if n <= WIDEST and (n < num_devices or name == "tp")]
            yield from (Candidate((("batch", num_devices // n), ("model", n)), name) for n in widths)


def variants(
    family: Candidate, loops: Sequence[bool], *, auto_is_loop: bool, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """The ways in which the layers of a family may run, that of the default first."""
    remats = (fixed["remat"],) if "remat" in fixed else ("none", "dots", "block") if True in loops else ("none",)
    for remat, in_loops in itertools.product(remats, loops):
        if in_loops and remat == "none" and not auto_is_loop and len(loops) > 1:
            continue  # few layers on TPUs are slower so
        is_auto = in_loops == (auto_is_loop or remat != "none")
        scan = fixed.get("scan_layers", "auto" if is_auto else in_loops)
        yield dataclasses.replace(family, remat=remat, scan_layers=scan, in_loops=in_loops)
    if True in loops and "offload" not in fixed:
        yield dataclasses.replace(family, remat=remats[-1], scan_layers=fixed.get("scan_layers", "auto"), offload=True)
