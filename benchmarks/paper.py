"""On paper: steps compiled for more devices than there are, and never run.

Strong: one GPT, one global batch, on meshes of 8 to 512 simulated devices. Weak: the batch grows with the mesh, and the
width with its root, parameters split over both axes, so that each device's share stays as it is. Each size has a
process of its own, with so many simulated CPU devices.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

import torch_shard as ts
from benchmarks import counts, models, sides
from benchmarks import handwritten_models as by_hand
from benchmarks.handwritten import HandwrittenStep
from benchmarks.memory import num_bytes
from benchmarks.processes import Failed, isolated
from benchmarks.rows import Point, Row, sized

MESHES = {8: (4, 2), 16: (8, 2), 32: (8, 4), 64: (16, 4), 128: (16, 8), 256: (32, 8), 512: (32, 16)}
WEAK_WIDTHS = {8: 64, 16: 96, 32: 128, 64: 192, 128: 256, 256: 384, 512: 512}
LAYERS, HEADS, VOCAB, LENGTH, STRONG_WIDTH, STRONG_ROWS = 4, 16, 512, 64, 256, 64
BOTH = {
    name: jax.P("batch", "model") if spec[0] is None else jax.P("model", "batch")
    for name, spec in models.MEGATRON.items()
}
"""Megatron's split, and each weight's other dim over `batch`."""

TIMEOUT_S = 600
PANELS = {"bytes": "bytes per device", "sent": "bytes sent per device", "seconds": "tracing and compilation, seconds"}


def rows(quick: bool) -> Iterator[Row | Point]:
    """Both sides at every size that this machine can compile."""
    for kind in ("strong",) if quick else ("strong", "weak"):
        base: dict[str, Any] = {}
        for devices in list(MESHES)[: 2 if quick else None]:
            try:
                found = {s: _measured(s, kind, devices, 1 if quick else LAYERS) for s in ("ours", "hand-written JAX")}
            except Failed as error:
                yield Row(f"{kind}, {devices} devices", note=f"not compiled: {str(error)[-200:]}")
                break
            for side, numbers in found.items():
                for key, panel in PANELS.items():
                    yield Point(f"paper-{kind}", panel, side, "devices", devices, numbers[key])
            base = base or found["ours"]
            yield from _rows(f"{kind}, {devices} devices", found, base)


def _rows(name: str, found: dict[str, Any], base: dict[str, Any]) -> Iterator[Row]:
    ours, rival = found["ours"], found["hand-written JAX"]
    yield sized(f"{name}, bytes per device ÷ hand-written JAX", ours["bytes"], rival["bytes"])
    yield sized(f"{name}, bytes sent per device ÷ hand-written JAX", ours["sent"], rival["sent"])
    ratio, text = ours["seconds"] / rival["seconds"], (f"{s['seconds']:.3g} s" for s in (ours, rival))
    yield Row(f"{name}, tracing and compilation ÷ hand-written JAX", *text, ratio)
    if ours is not base:
        yield sized(f"{name}, bytes per device ÷ on 8 devices", ours["bytes"], base["bytes"])


def _measured(side: str, kind: str, devices: int, layers: int) -> dict[str, float]:
    return isolated(
        "benchmarks.paper:on_paper",
        num_devices=devices,
        timeout_s=TIMEOUT_S,
        side=side,
        kind=kind,
        devices=devices,
        layers=layers,
    )


def on_paper(side: str, kind: str, devices: int, layers: int = LAYERS) -> dict[str, float]:
    """Bytes, bytes sent and seconds of one compilation in this process."""
    batch_axis, model_axis = MESHES[devices]
    width = STRONG_WIDTH if kind == "strong" else WEAK_WIDTHS[devices]
    num_rows = STRONG_ROWS if kind == "strong" else 2 * batch_axis
    mesh = ts.make_mesh(batch=batch_axis, model=model_axis)
    torch.manual_seed(0)
    model, batch = models.GPT(layers, width, HEADS, VOCAB, LENGTH), models.token_batch(num_rows, LENGTH, VOCAB)
    specs = models.GPT_SPECS if kind == "strong" else models.GPT_SPECS | BOTH
    ours = sides.Ours(model, models.token_loss, mesh, specs)
    start = time.perf_counter()
    if side == "ours":
        compiled = ours.step.lower(sides.shapes(ours), batch).compile()
    else:
        rows = NamedSharding(mesh, jax.P("batch"))
        whole = by_hand.gpt(HEADS, constrain=lambda x: jax.lax.with_sharding_constraint(x, rows))
        rival = HandwrittenStep(whole, ours.optimizer, mesh, ours.values())
        start = time.perf_counter()
        compiled = rival.lower(batch).compile()
    took = time.perf_counter() - start
    sent = counts.total(counts.collectives(compiled.as_text(), mesh.size)).wire_bytes
    return {"bytes": num_bytes(compiled), "sent": sent, "seconds": took}
