"""What a training step costs, against every other way to train the same model from the same values.

All sides of a case train in one process, in turn, on the same batch; before they are timed, their losses over the
first steps must agree. Rivals without a mesh run on one device only.
"""

from collections.abc import Iterator

import jax
import torch

import torch_shard as ts
from benchmarks import cases, sides
from benchmarks.cases import Case
from benchmarks.flax_models import flax_nnx
from benchmarks.handwritten import HandwrittenStep
from benchmarks.rows import Row, timed
from benchmarks.sides import Side
from benchmarks.timing import race

MESHES = ((1, 1), (8, 1), (4, 2))
BY_HAND = "hand-written JAX"
TARGETS = {"torchax": 0.70, "GPT, eager torch": 0.65}
NOTES = {"ResNet, torchax": "which keeps no running statistics"}


def rows(quick: bool) -> Iterator[Row]:
    """Every model on every mesh."""
    for make in cases.ALL:
        for batch, model in MESHES:
            if not quick or batch * model == 1 or (make is cases.gpt and model > 1):
                torch.manual_seed(0)
                mesh = ts.make_mesh(jax.devices()[: batch * model], batch=batch, model=model)
                yield from case_rows(make(quick), mesh, quick)


def case_rows(case: Case, mesh: jax.sharding.Mesh, quick: bool) -> Iterator[Row]:
    """Ours over each rival."""
    found = by_hand(case, mesh, quick)
    if mesh.size == 1:
        found |= without_mesh(case, quick)
    times = race(found, case.batch, 3 if quick else 21)
    axes = ",".join(str(size) for size in mesh.shape.values())
    for name in list(found)[1:]:
        target = case.target if name == BY_HAND else TARGETS.get(name, TARGETS.get(f"{case.name}, {name}"))
        note = NOTES.get(f"{case.name}, {name}", "")
        yield timed(f"{case.name} ({axes}) ÷ {name}", times["ours"], times[name], target, note)


def by_hand(case: Case, mesh: jax.sharding.Mesh, quick: bool) -> dict[str, Side]:
    """Ours and the hand-written rivals, on any mesh."""
    ours = sides.Ours(case.model, case.loss_fn, mesh, case.specs)
    start = ours.values()
    rivals = {BY_HAND: case.rival} | ({} if quick else {f"{BY_HAND}, {n}": r for n, r in case.harder.items()})
    return {"ours": ours} | {n: HandwrittenStep(r, ours.optimizer, mesh, start) for n, r in rivals.items()}


def without_mesh(case: Case, quick: bool) -> dict[str, Side]:
    """The rivals that run on one device; a quick run has a few of those that take long to compile."""
    found = {"eager torch": sides.eager_torch(case.model, case.loss_fn)}
    if not quick or case.name == "GPT":
        found["Flax NNX"] = flax_nnx(case.model)
        found["torchax"] = sides.torchax_step(case.model, case.loss_fn)
        found["loop of single adapters"] = sides.documents_loop(case.model, case.loss_fn)
    if not quick:
        found["torch.compile"] = sides.compiled_torch(case.model, case.loss_fn)
    return found
