"""What may be chosen: meshes, recipes, and how layers run; a choice is a few words, from which its options are made."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from torch import nn
from torch.fx import Graph, Node

from torch_shard._common.fx import fill_in, operator_name, outputs_of
from torch_shard._common.types import PyTree
from torch_shard._cost import Chip
from torch_shard._plans import expert, fsdp, fsdp_tp, hsdp, quietly, replicated, tp
from torch_shard._sharding import ResolvedPlan, ShardingPlan, axes_of, holdings
from torch_shard._train import TrainStep
from torch_shard._tune.cache import digest

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


# What a step should take, by arithmetic: an order in which to compile, and no more than that.


MXU = 0.6
"""Part of the peak that programs reach in their products."""

LOOP = 1.2
"""So much longer do layers take in loops that keep what they compute: it is stacked, and not fused across layers."""

AGAIN = {"block": 1 / 3, "dots": 0.03}
"""Part of the arithmetic that is done once more."""

KEPT = {"none": 2.0, "dots": 1.2, "block": 0.3}
"""Values that are kept for the backward pass, over the results of products."""

HOST_LINK = 16e9
"""Bytes per second between a device and the memory of its host, where that is not known."""

SUMMED = 0.2
"""Part of the results of products that is a sum over the axis `model`, as Megatron splits layers: two in each."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a step does for its whole batch, read from one capture.

    Attributes:
        flops: Of products, forward and backward.
        results: Bytes of the results of products, forward.
        moments: Bytes of the optimizer's state for each byte of parameters.
        itemsize: Bytes of a number that products are computed in.
        trainable: Names of parameters with gradients.
        fingerprint: Alike for programs that are alike.
    """

    flops: float
    results: float
    moments: float
    itemsize: int
    trainable: tuple[str, ...]
    fingerprint: str


def facts_of(step: TrainStep) -> Facts:
    """Read what a step does that has been captured."""
    program, dtype = step.programs[-1].loss, step.options.compute_dtype
    graphs = [(program.program.graph.module.graph, 1)]
    if program.rolled is not None:
        regions = [call.region for call in program.rolled.calls.values()]
        graphs += [(region.graph.module.graph, region.num_results) for region in regions]
    products = [node for graph, num_results in graphs for node in _forward(graph, num_results) if _flops(node)]
    texts = [f"{graph}{[node.meta.get('val') for node in graph.nodes]}" for graph, _ in graphs]
    return Facts(
        flops=3 * sum(map(_flops, products)),
        results=float(_bytes([node.meta["val"] for node in products])),
        moments=_bytes(step.structs.opt_state) / max(_bytes(step.structs.params), 1),
        itemsize=4 if dtype is None else dtype.itemsize,
        trainable=tuple(holdings(step.model).trainable),
        fingerprint=digest(str([step.structs.opt_state, *texts])),
    )


def _forward(graph: Graph, num_results: int) -> Iterator[Node]:
    """The nodes up to the first results of a graph, which the backward pass follows."""
    waiting = set(outputs_of(graph)[:num_results])
    for node in graph.nodes:
        if waiting:
            yield node
        waiting.discard(node)


def _flops(node: Node) -> float:
    """Of one product; zero for what is none."""
    out: Any = node.meta.get("val")
    args: list[Any] = [*fill_in(node.args, lambda given: given.meta.get("val"))]
    match operator_name(node):
        case "mm" | "bmm" | "matmul" | "linear" | "_grouped_mm" | "grouped_mm":
            return 2 * out.numel() * args[0].shape[-1]
        case "addmm" | "baddbmm":
            return 2 * out.numel() * args[1].shape[-1]
        case "einsum":
            letters = args[2].split("->")[0].split(",")
            sizes = {k: n for of, x in zip(letters, args[:2], strict=True) for k, n in zip(of, x.shape, strict=True)}
            return 2 * math.prod(sizes.values())
        case "convolution":
            return 2 * out.numel() * math.prod(args[1].shape[1:])
        case "attention":
            return 4 * args[0].numel() * args[1].shape[-2]
        case "experts":
            return 2 * args[1].numel() * sum(math.prod(matrix.shape[1:]) for matrix in args[3])
        case _:
            return 0.0


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a candidate should take of one device.

    Attributes:
        seconds: Of a step.
        memory: Bytes in all.
        state: Of these, parameters and moments, which are there whatever the program is.
    """

    seconds: float
    memory: float
    state: float


def estimate(candidate: Candidate, plan: ResolvedPlan, moments: ResolvedPlan, facts: Facts, *, chip: Chip) -> Estimate:
    """Estimate what a candidate takes."""
    width, remat, shards = candidate.sizes.get("model", 1), str(candidate.remat), candidate.data_shards
    sizes = {name: math.prod(plan.entries[name].shape) for name in facts.trainable}
    split = sum(size for name, size in sizes.items() if "model" in axes_of(plan.entries[name].sharding.spec))
    share = split / max(sum(sizes.values()), 1)
    flops = facts.flops * (share / width + 1 - share) / shards * (1 + AGAIN.get(remat, 0.0))
    flops *= LOOP if candidate.in_loops and remat == "none" else 1.0
    gradients, updated = (_local_bytes(found, facts.trainable) for found in (plan, moments))
    compute = flops / (MXU * chip.flops) + updated * (2 + 2 * facts.moments) / chip.bandwidth
    hidden = _wire(candidate, plan, sizes) * facts.itemsize / chip.link
    sums = (3 if remat == "block" else 2) * SUMMED * facts.results / shards * 2 * (width - 1) / width
    seconds = compute + sums / chip.link + max(hidden - compute / 2, hidden / 10)
    state, moments_size = _local_bytes(plan, plan.entries), updated * facts.moments
    kept = KEPT.get(remat, 1.0) * facts.results / shards / width
    if candidate.offload:  # there and back
        seconds += 2 * (moments_size + kept) / (chip.host_link or HOST_LINK)
        return Estimate(seconds, state + gradients, state)
    return Estimate(seconds, state + moments_size + gradients + kept, state + moments_size)


def _wire(candidate: Candidate, plan: ResolvedPlan, sizes: Mapping[str, int]) -> float:
    """Numbers of parameters and gradients that a device receives, which arithmetic may hide."""
    found, axes_of_rows = 0.0, {"batch", "replica"} & set(candidate.sizes)
    for name, size in sizes.items():
        axes = {axis: candidate.sizes[axis] for axis in axes_of(plan.entries[name].sharding.spec)}
        own = size / axes.pop("model", 1)
        held = math.prod(axes.values())
        for axis in axes_of_rows:  # two gathers and a scatter; or a sum of what is held
            times = 3 if axis in axes else 2 / held
            found += own * times * (1 - 1 / candidate.sizes[axis])
    return found


def _local_bytes(plan: ResolvedPlan, names: Iterable[str]) -> int:
    entries = [plan.entries[name] for name in names]
    return sum(entry.count_bytes(entry.local_shape) or 0 for entry in entries if entry.tied_to is None)
