"""Tokens per second and model-flops utilisation in bfloat16 on one GPU; each side in a process of its own, in turn.

`python -c "from benchmarks.gpu import measure; print(measure('ours', 'tiny', 3))"` tries a side without a GPU.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import torch_shard as ts
from benchmarks import handwritten_models as by_hand
from benchmarks import models, sides
from benchmarks.handwritten import HandwrittenStep, Rival
from benchmarks.pieces import Pieces
from benchmarks.processes import Failed, isolated
from benchmarks.rows import Row

OURS = "ours"
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}
"""Of dense bfloat16 products per second, by a part of the device's name."""

MODELS: dict[str, tuple[type, dict[str, int], int]] = {  # class, sizes, rows of a batch
    "GPT-2 124M": (models.GPT, {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "length": 1024}, 16),
    "Llama 1B": (
        models.Llama,
        {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab": 32000, "length": 1024},
        8,
    ),
    "tiny": (
        models.Llama,
        {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "vocab": 256, "length": 32},
        4,
    ),
}


def rows(quick: bool) -> Iterator[Row]:
    """Ours over each rival; without a GPU, what would be measured."""
    device = isolated("benchmarks.gpu:device_name", platform="")
    for model in list(MODELS)[:-1]:
        if not device:
            for rival in list(SIDES)[1:]:
                yield Row(f"{model}, bfloat16, step ÷ {rival}", note="not measured (no GPU)")
            continue
        yield from _measured(model, device, rounds=1 if quick else 3)


def _measured(model: str, device: str, rounds: int) -> Iterator[Row]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for side in (side for side in SIDES if side not in failed):
            try:
                found[side].append(isolated("benchmarks.gpu:measure", platform="", side=side, name=model, steps=20))
            except Failed as error:
                failed[side] = str(error)[-200:]
    for rival in list(SIDES)[1:]:
        name = f"{model}, bfloat16, step ÷ {rival}"
        if trouble := failed.get(OURS) or failed.get(rival):
            yield Row(name, note=f"not measured: {trouble}")
            continue
        pairs = [ours["step_s"] / theirs["step_s"] for ours, theirs in zip(found[OURS], found[rival], strict=True)]
        low, median, high = (float(q) for q in np.quantile(pairs, [0.25, 0.5, 0.75]))
        yield Row(name, _text(found[OURS], device), _text(found[rival], device), median, (low, high))


def _text(found: list[dict[str, float]], device: str) -> str:
    """Tokens per second, and the part of the device's peak that 6 operations per parameter and token come to."""
    tokens = float(np.median([one["tokens"] / one["step_s"] for one in found]))
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in device), None)
    used = f", {6 * found[0]['num_params'] * tokens / peak:.0%} of peak" if peak else ""
    return f"{tokens / 1e3:.3g} k tokens/s{used}"


def device_name() -> str:
    """The GPU's name, or nothing."""
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else ""


def measure(side: str, name: str, steps: int) -> dict[str, float]:
    """Seconds per step over `steps` of them in a row, waiting only for the last, in this process."""
    kind, sizes, num_rows = MODELS[name]
    torch.manual_seed(0)
    model, batch = kind(**sizes), models.token_batch(num_rows, sizes["length"], sizes["vocab"])
    step, wait = SIDES[side](model, batch)
    for _ in range(3):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    took = (time.perf_counter() - start) / steps
    return {"step_s": took, "tokens": batch[0].numel(), "num_params": sum(p.numel() for p in model.parameters())}


Timed = tuple[Callable[[], None], Callable[[], Any]]


def _ours(model: torch.nn.Module, batch: Any) -> Timed:
    step = sides.Ours(model, models.token_loss, ts.make_mesh(batch=1), {}, compute_dtype=torch.bfloat16).step
    held: list[Any] = [step.init(seed=0), None]

    def run() -> None:
        held[:] = step(held[0], batch)

    return run, lambda: jax.block_until_ready(held)


def _by_hand(model: Any, batch: Any) -> Timed:
    on_gpu = bool(device_name())
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else None)
    options = {"pieces": Pieces(attend=attend), "dtype": jnp.bfloat16}
    is_gpt = isinstance(model, models.GPT)
    heads = (model.heads,) if is_gpt else (model.heads, model.kv_heads)
    rival: Rival = (by_hand.gpt if is_gpt else by_hand.llama)(*heads, **options)
    side = HandwrittenStep(rival, optax.adamw(sides.LEARNING_RATE), ts.make_mesh(batch=1), sides.start_of(model))
    side.init()
    held: list[Any] = [side.state, None]

    def run() -> None:
        held[:] = side.jitted(held[0], side.put(batch))

    return run, lambda: jax.block_until_ready(held)


def _torch(model: torch.nn.Module, batch: Any) -> Timed:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device_name() and device.type == "cpu":
        raise RuntimeError("this torch was built without CUDA")
    torch.set_float32_matmul_precision("high")
    model = model.to(device)
    optimizer = sides.torch_adamw(model)

    @torch.compile
    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return models.token_loss(model, batch)

    held: list[Any] = [None]

    def run() -> None:
        optimizer.zero_grad()
        held[0] = loss_of(tuple(t.to(device, non_blocking=True) for t in batch))
        held[0].backward()
        optimizer.step()

    return run, lambda: (held[0].item(), torch.cuda.synchronize() if device.type == "cuda" else None)


SIDES: dict[str, Callable[[Any, Any], Timed]] = {
    OURS: _ours,
    "hand-written JAX": _by_hand,
    "torch.compile with SDPA": _torch,
}
