"""What a candidate should take, by arithmetic alone: memory by part, flops over the peak, bytes over the wire."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

from torch import nn

from torch_shard._plans import experts_of, is_table, layers_of, product_of
from torch_shard._sharding import ResolvedPlan, axes_of
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.chips import GIB, KERNELS, Chip
from torch_shard._tune.facts import Facts
from torch_shard._tune.layers import Repeats
from torch_shard._tune.products import PASSES

MXU = 0.6
"""Part of the peak that programs reach in their products."""

LOOP = 1.15
"""So much longer do products take in loops that keep what they compute: it is stacked, and not fused across layers."""

KEPT = 0.5
"""Part of the values between products that is kept for the backward pass: the others are computed again, or fused."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes of one device, by arithmetic.

    Attributes:
        parameters: And buffers.
        gradients: Of all parameters.
        moments: The optimizer's state.
        activations: Kept for the backward pass, logits among them.
        gathered: Parameters of one layer, whole.
    """

    parameters: float
    gradients: float
    moments: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))

    @property
    def state(self) -> float:
        """What is there whatever the program is."""
        return self.parameters + self.moments

    def __str__(self) -> str:
        sizes = {name: size for name, size in dataclasses.asdict(self).items() if size >= 0.005 * GIB}
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a candidate should take of one device.

    Attributes:
        memory: By part.
        compute: Seconds.
        wire: Bytes that it receives by axis.
        exposed: Seconds in which it waits for them.
    """

    memory: Parts
    compute: float
    wire: Mapping[str, float]
    exposed: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exposed


@dataclasses.dataclass(frozen=True)
class Model:
    """What arithmetic needs to know of a model and its step.

    Attributes:
        facts: What a step does.
        module: The model.
        moments: Bytes of the optimizer's state for each byte of parameters.
        itemsize: Bytes of a number that products are computed in.
        trainable: Names of parameters with gradients.
        repeats: Layers that are proved to be one program, over and over.
    """

    facts: Facts
    module: nn.Module
    moments: float
    itemsize: int
    trainable: frozenset[str]
    repeats: Repeats | None = None


def estimate(model: Model, candidate: Candidate, plan: ResolvedPlan, moments: ResolvedPlan, *, chip: Chip) -> Estimate:
    """Estimate what a candidate takes.

    Args:
        model: With its facts.
        candidate: Which one.
        plan: Its plan.
        moments: That of the optimizer's state.
        chip: The devices.
    """
    split = _split_of(model, plan)
    wire = _wire(model, candidate, plan, split)
    compute = _compute(model, candidate, split, moments, chip=chip)
    data = sum(size for axis, size in wire.items() if axis != "model") / chip.link
    exposed = wire.get("model", 0.0) / chip.link + max(data - compute / 2, 0.0)
    return Estimate(_memory(model, candidate, plan, moments, split=split), compute, wire, exposed)


@dataclasses.dataclass(frozen=True)
class _Split:
    """What the axis `model` splits: the part of the flops, and paths of layers whose results are sums over it."""

    flops: float
    rows: tuple[str, ...]
    sequence: bool


def _split_of(model: Model, plan: ResolvedPlan) -> _Split:
    split, rows, num = 0.0, list[str](), plan.mesh.shape.get("model", 1)
    if num == 1:
        return _Split(0.0, (), False)
    by_module = model.facts.by_module
    for path, layer in layers_of(model.module):
        names = [f"{path}.{name}" if path else name for name, _ in layer.named_parameters(recurse=False)]
        specs = {name: plan.entries[name].padded_spec for name in names if name in plan.entries}
        held = {name: spec for name, spec in specs.items() if "model" in axes_of(spec)}
        if not held:
            continue
        split += by_module.get(path, 0.0)
        product, (name, *_) = product_of(layer), held
        sums = is_table(layer) or bool(experts_of(layer))
        if product is not None and name.endswith("weight"):
            sums = "model" in axes_of((held[name][product.in_dim],))
        rows += [path] * sums
    attention = PASSES * model.facts.attention if rows else 0.0
    known = sum(by_module.values())
    return _Split(min((split + attention) / known, 1.0) if known else 0.0, tuple(rows), bool(plan.activations))


def _compute(model: Model, candidate: Candidate, split: _Split, moments: ResolvedPlan, *, chip: Chip) -> float:
    """Seconds of arithmetic and of the update."""
    facts, num = model.facts, candidate.sizes.get("model", 1)
    again = (
        {"block": facts.repeated / max(facts.flops, 1.0), "dots": 0.02}.get(str(candidate.remat), 0.0)
        if facts.layers
        else 0.0
    )
    kernels = facts.attention * PASSES
    flops = max(facts.flops - kernels, 0.0) / MXU + kernels / KERNELS
    own = (split.flops / num + 1 - split.flops) / candidate.data_shards
    if facts.layers and candidate.remat == "none" and candidate.scan_layers is not False:
        own *= LOOP
    held = sum(_local_bytes(moments, name) for name in model.trainable)
    update = held * (2 + 2 * model.moments + 2 * (candidate.accumulate_steps > 1) * candidate.accumulate_steps)
    return flops * (1 + again) * own / chip.flops + update / chip.bandwidth


def _wire(model: Model, candidate: Candidate, plan: ResolvedPlan, split: _Split) -> Mapping[str, float]:
    """Bytes that a device receives in a step, by axis, by the best known ways."""
    found, sizes = collections.Counter[str](), candidate.sizes
    times = candidate.accumulate_steps
    data = [axis for axis in ("batch", "replica") if sizes.get(axis, 1) > 1]
    for name, entry in plan.entries.items():
        if entry.tied_to is not None or name not in model.trainable:
            continue
        axes = set(axes_of(entry.padded_spec))
        own = math.prod(entry.shape) / (sizes.get("model", 1) if "model" in axes else 1) * model.itemsize
        held = math.prod(sizes[axis] for axis in data if axis in axes)
        for axis in data:
            share = (sizes[axis] - 1) / sizes[axis]
            gathers = 3 * own * times if axis in axes else 2 * own / held
            found[axis] += int(gathers * share)
    if num := len(split.rows):
        shards = sizes["model"]
        passes = 3 if candidate.remat == "block" and model.facts.layers else 2
        out = sum(model.facts.outputs.get(path, 0) for path in split.rows) / candidate.data_shards
        found["model"] += int(passes * out * 2 * (shards - 1) / shards) if num else 0
    return {axis: float(size) for axis, size in found.items() if size}


def _memory(model: Model, candidate: Candidate, plan: ResolvedPlan, moments: ResolvedPlan, *, split: _Split) -> Parts:
    trainable = [name for name in plan.entries if name in model.trainable]
    parameters = sum(_local_bytes(plan, name) for name in plan.entries)
    updated = sum(_local_bytes(moments, name) for name in trainable)
    own = sum(_local_bytes(plan, name) for name in trainable)
    accumulated = own if candidate.accumulate_steps > 1 else 0
    whole = [_bytes_whole(plan, name, model.itemsize) - _local_bytes(plan, name) / 2 for name in trainable]
    return Parts(
        parameters=parameters,
        gradients=max(own, updated) + accumulated,
        moments=updated * model.moments,
        activations=_activations(model, candidate, split),
        gathered=max([0.0, *whole]) * 2,
    )


def _activations(model: Model, candidate: Candidate, split: _Split) -> float:
    """Bytes that are kept for the backward pass, and of the layer that is computed again."""
    facts, num = model.facts, candidate.sizes.get("model", 1)
    rows = candidate.data_shards * candidate.accumulate_steps
    stream = {_width_of(model, path) for path in split.rows}

    def own(size: float, width: int) -> float:
        """Of one device: the stream is split along the sequence alone, all else as features are."""
        shards = num if split.rows and (split.sequence or width not in stream) else 1
        return size / rows / shards

    total = 0.0
    for saved in facts.saved:
        size = own(saved.num_bytes, saved.width) * (1 if saved.kind == "product" else KEPT)
        if not saved.repeated or candidate.remat == "none" or (candidate.remat == "dots" and saved.kind == "product"):
            total += size
    if candidate.remat == "none" or not facts.layers:
        return total
    across = num if split.sequence else 1
    return total + facts.inputs / rows / across + facts.layer * KEPT / rows / (num if split.rows else 1)


def _width_of(model: Model, path: str) -> int:
    layer = model.module.get_submodule(path)
    if is_table(layer):
        return next(layer.parameters()).shape[-1]
    product = product_of(layer)
    return product.num_out if product is not None else 0


def _local_bytes(plan: ResolvedPlan, name: str) -> int:
    entry = plan.entries[name]
    return 0 if entry.tied_to is not None else entry.count_bytes(entry.local_shape) or 0


def _bytes_whole(plan: ResolvedPlan, name: str, itemsize: int) -> float:
    """Of an entry where it is used: whole but for `model`."""
    entry = plan.entries[name]
    shards = plan.mesh.shape.get("model", 1) if "model" in axes_of(entry.padded_spec) else 1
    is_split = set(axes_of(entry.padded_spec)) - {"model"}
    return math.prod(entry.shape) / shards * itemsize if is_split else 0.0


def find_rows_fault(candidate: Candidate, rows: Iterable[int]) -> str:
    """Say that the rows of a batch do not divide; empty if they do."""
    shards = candidate.data_shards * candidate.accumulate_steps
    uneven = [num for num in rows if num % shards]
    if not uneven:
        return ""
    within = f" in {candidate.accumulate_steps} microbatches" if candidate.accumulate_steps > 1 else ""
    return f"{uneven[0]} rows do not divide over {candidate.data_shards} shards{within}"
