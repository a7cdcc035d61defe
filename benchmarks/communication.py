"""Collectives of one step, from the compiled program, against the textbook's minimum for the plan. Nothing is executed.

Bytes are those that a device sends by a ring (`counts.Traffic.wire_bytes`), so that an all-reduce and the pair of
reduce-scatter and all-gather that does the same weigh the same.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

import torch_shard as ts
from benchmarks import cases, counts, sides
from benchmarks.cases import Case
from benchmarks.counts import Traffic
from benchmarks.distributed import zero3_specs
from benchmarks.handwritten import HandwrittenStep
from benchmarks.rows import Row, sized


def rows(quick: bool) -> Iterator[Row]:
    """Megatron's split with separate and with fused q, k, v; ZeRO-3."""
    torch.manual_seed(0)
    separate, fused = cases.gpt(quick), cases.gpt(quick, fused=True)
    yield from _megatron("GPT (4,2), separate q, k, v", separate, 1.10)
    yield from _megatron("GPT (4,2), fused qkv", fused, None)
    yield from _zero3("GPT (8,1), all parameters split", separate)


def _megatron(name: str, case: Case, target: float | None) -> Iterator[Row]:
    """Per block two all-reduces of activations each way, and each gradient reduced once."""
    mesh = ts.make_mesh(batch=4, model=2)
    ours = sides.Ours(case.model, case.loss_fn, mesh, case.specs)
    layers, (num_rows, length), width = len(case.model.h), case.batch[0].shape, case.model.pos.weight.shape[1]
    activations = num_rows // 4 * length * width * 4
    grads = _local_bytes(ours)
    textbook = Traffic(
        4 * layers + 1,
        4 * layers * activations + grads,
        counts.wire_bytes("all-reduce", 4 * layers * activations, 2) + counts.wire_bytes("all-reduce", grads, 4),
    )
    yield from _against(name, ours, case, mesh, textbook, target)
    if target is not None:
        rival = HandwrittenStep(case.rival, ours.optimizer, mesh, ours.values())
        theirs = counts.collectives(rival.lower(case.batch).compile().as_text(), mesh.size)
        mine = counts.collectives(ours.compiled(case.batch).as_text(), mesh.size)
        yield _bytes_row(f"{name}, bytes sent ÷ hand-written JAX", mine, counts.total(theirs))


def _zero3(name: str, case: Case) -> Iterator[Row]:
    """Each parameter gathered forward and backward, its gradient scattered."""
    mesh = ts.make_mesh(batch=8, model=1)
    ours = sides.Ours(case.model, case.loss_fn, mesh, zero3_specs(case.model))
    whole = sum(4 * p.numel() for p in case.model.parameters())
    wire = 2 * counts.wire_bytes("all-gather", whole, 8) + counts.wire_bytes("reduce-scatter", whole / 8, 8)
    textbook = Traffic(3 * (len(case.model.h) + 1), 2 * whole + whole // 8, wire)
    yield from _against(name, ours, case, mesh, textbook, None)


def _against(
    name: str, ours: sides.Ours, case: Case, mesh: jax.sharding.Mesh, textbook: Traffic, target: float | None
) -> Iterator[Row]:
    found = counts.collectives(ours.compiled(case.batch).as_text(), mesh.size)
    number = counts.total(found).count
    yield _bytes_row(f"{name}, bytes sent ÷ textbook", found, textbook, target)
    yield Row(
        f"{name}, collectives ÷ textbook",
        str(number),
        str(textbook.count),
        number / textbook.count,
        note="a gradient reduction for each parameter counts as one",
    )


def _bytes_row(name: str, found: dict[str, Traffic], textbook: Traffic, target: float | None = None) -> Row:
    return sized(name, counts.total(found).wire_bytes, textbook.wire_bytes, target, note=counts.describe(found))


def _local_bytes(ours: sides.Ours) -> int:
    """Bytes of the gradients on one device."""
    plan: Any = ours.step.plan
    return sum(4 * int(np.prod(plan[n].shard_shape(tuple(p.shape)))) for n, p in ours.model.named_parameters())
