"""What may be chosen: meshes, recipes, and how layers run; a choice is a few words, from which its options are made."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh
from torch import nn

from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, quietly, replicated, tp
from torch_shard._sharding import ShardingPlan

Make = Callable[[nn.Module, Mesh], ShardingPlan]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to split a model.

    Attributes:
        axis: Of the mesh, beside `batch`; empty if there is no other.
        plan: Makes the plan.
        optimizer_plan: Makes that of the optimizer's state, if that is split further (ZeRO-1).
    """

    axis: str
    plan: Make
    optimizer_plan: Make | None = None


# A vocabulary that does not divide is padded, or the largest table would be whole on each device.
_tp = functools.partial(tp, pad_vocab=True)
_fsdp_tp = functools.partial(fsdp_tp, pad_vocab=True)

RECIPES: dict[str, Recipe] = {
    "fsdp": Recipe("", fsdp),
    "replicated": Recipe("", replicated),
    "replicated + ZeRO-1": Recipe("", replicated, fsdp),
    "hsdp": Recipe("replica", hsdp),
    "hsdp + ZeRO-1": Recipe("replica", hsdp, functools.partial(fsdp, fsdp=("batch", "replica"))),
    "tp": Recipe("model", _tp),
    "tp + ZeRO-1": Recipe("model", _tp, _fsdp_tp),
    "fsdp_tp": Recipe("model", _fsdp_tp),
    "fsdp_tp(sequence)": Recipe("model", functools.partial(_fsdp_tp, sequence=True)),
    "expert": Recipe("model", expert),
    "expert(tp)": Recipe("model", functools.partial(expert, tp="model")),
    "expert(tp, sequence)": Recipe("model", functools.partial(expert, tp="model", sequence=True)),
}


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

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes)
        how = f"remat={self.remat}, {'in loops' if self.in_loops else 'one by one'}"
        return f"({mesh}) {self.recipe}, {how}{', offload' if self.offload else ''}"

    def options(self, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`."""
        recipe = RECIPES[self.recipe]
        options: dict[str, Any] = {"mesh": mesh, "remat": self.remat, "scan_layers": self.scan_layers}
        if self.offload:
            options["offload"] = ("optimizer", "activations")
        with quietly():
            options["plan"] = recipe.plan(model, mesh)
            if recipe.optimizer_plan is not None:
                options["optimizer_plan"] = recipe.optimizer_plan(model, mesh)
        return options


def other_layouts(num_devices: int, *, has_experts: bool, has_spec: bool) -> Iterator[Candidate]:
    """Meshes and recipes beside FSDP over all devices, in the order in which they are looked at.

    Args:
        num_devices: All of which are used.
        has_experts: Whether the model has experts in one tensor: `expert(tp)` is then for `fsdp_tp`, as that advises.
        has_spec: Whether the user says how the batch is split, which a mesh with another axis of rows would not follow.
    """
    split, in_sequence = ("expert(tp)", "expert(tp, sequence)") if has_experts else ("fsdp_tp", "fsdp_tp(sequence)")
    # What won on pods of 8 to 512 chips (docs/tpu.md, "Tuned before there is a pod"), then what won on fewer.
    layouts = [
        ("hsdp + ZeRO-1", 4),
        (in_sequence, 4),
        ("replicated + ZeRO-1", 1),
        ("hsdp + ZeRO-1", 8),
        (in_sequence, 2),
        ("replicated", 1),
        (split, 2),
        ("hsdp + ZeRO-1", 2),
        (split, 4),
        ("tp", 2),
    ]
    for name, size in layouts:
        axis = RECIPES[name].axis
        if num_devices % size or num_devices == 1 or (axis == "replica" and has_spec):
            continue
        rest = num_devices // size
        # FSDP within groups of one device is data parallelism, and `tp` alone has no need of an axis of rows.
        if rest == 1 and name != "tp":
            continue
        if axis == "replica":
            yield Candidate((("replica", size), ("batch", rest)), name)
        elif axis:
            yield Candidate((("batch", rest), (axis, size)), name)
        else:
            yield Candidate((("batch", num_devices),), name)
