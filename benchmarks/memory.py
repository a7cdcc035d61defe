"""Bytes per device while a step runs, by XLA's own count, against hand-written JAX. Nothing is executed."""

from collections.abc import Iterator
from typing import Any

import jax
import torch

import torch_shard as ts
from benchmarks import cases, sides
from benchmarks.handwritten import HandwrittenStep
from benchmarks.rows import Row, sized

MESHES = ((1, 1), (4, 2))
REMAT = ("dots", "block")
"""Of the models with repeated layers, beside the default."""


def rows(quick: bool) -> Iterator[Row]:
    """Every model, on one device and on eight."""
    for make in (cases.mlp, cases.gpt) if quick else cases.ALL:
        for batch, model in MESHES[-1:] if quick else MESHES:
            torch.manual_seed(0)
            case, mesh = make(quick), ts.make_mesh(batch=batch, model=model)
            ours = sides.Ours(case.model, case.loss_fn, mesh, case.specs)
            rival = HandwrittenStep(case.rival, ours.optimizer, mesh, ours.values())
            theirs = rival.lower(case.batch).compile()
            name = f"{case.name} ({batch},{model}), bytes per device"
            yield _row(f"{name} ÷ hand-written JAX", ours.compiled(case.batch), theirs)
            for remat in REMAT if make in (cases.gpt, cases.llama) and not quick else ():
                again = sides.Ours(case.model, case.loss_fn, mesh, case.specs, remat=remat)
                yield _row(f"{name}, remat={remat} ÷ hand-written JAX", again.compiled(case.batch), theirs)


def num_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results and temporaries on one device; what is donated counts once."""
    found = _analysis(compiled)
    return (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    )


def _analysis(compiled: jax.stages.Compiled) -> Any:
    return compiled.memory_analysis()


def _row(name: str, ours: jax.stages.Compiled, rival: jax.stages.Compiled) -> Row:
    parts = [
        f"{a.temp_size_in_bytes / 1e6:.3g} temporary, {a.argument_size_in_bytes / 1e6:.3g} arguments, "
        f"{a.alias_size_in_bytes / 1e6:.3g} donated"
        for a in (_analysis(ours), _analysis(rival))
    ]
    return sized(name, num_bytes(ours), num_bytes(rival), note=" : ".join(parts))
