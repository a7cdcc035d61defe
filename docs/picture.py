"""The picture of the README, made from a run of the demo: `torch-shard demo` first, then `python docs/picture.py`.

On the left the mesh, with what each device holds of one layer and of the batch; on the right the loss.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import nn

from docs.pages import BLUE, ORANGE, Theme, plain, save_both
from torch_shard._common.simulated import simulate_devices
from torch_shard._demo import PLAN, Settings
from torch_shard._fit import METRICS, read_metrics

IMAGES = Path(__file__).parent / "images"
SHOWN = {"up": "blocks.0.up.weight", "down": "blocks.0.down.weight"}


def held(mesh: Mesh, batch_size: int, model: nn.Module) -> dict[Any, list[str]]:
    """What each device holds of the batch and of the shown entries, as JAX says it: torch's slices as text."""
    plan, shapes = PLAN.resolve(model, mesh), {name: tuple(p.shape) for name, p in model.named_parameters()}
    shown = [(f"{label}.weight", shapes[name], plan[name]) for label, name in SHOWN.items()]
    rows: dict[Any, list[str]] = {device: [] for device in mesh.devices.flat}
    for label, shape, sharding in [("batch", (batch_size,), NamedSharding(mesh, P("batch"))), *shown]:
        for device, index in sharding.devices_indices_map(shape).items():
            rows[device].append(f"{label}[{', '.join(map(_slice, index, shape))}]")
    return rows


def _slice(part: slice, size: int) -> str:
    start, stop, _ = part.indices(size)
    return ":" if (start, stop) == (0, size) else f"{start}:{stop}"


def draw_mesh(axes: Axes, mesh: Mesh, rows: dict[Any, list[str]], theme: Theme) -> None:
    """Draw a box for each device: `batch` goes down, `model` to the right; one color holds the same weights."""
    down, right = mesh.devices.shape
    for (i, j), device in np.ndenumerate(mesh.devices):
        box = FancyBboxPatch(
            (j + 0.05, down - 1 - i + 0.06), 0.9, 0.84,
            boxstyle="round,pad=0,rounding_size=0.04", facecolor=theme["fill"][j % 2], edgecolor=theme["edge"],
        )  # fmt: skip
        axes.add_patch(box)
        top = down - i
        axes.text(j + 0.1, top - 0.28, f"device {device.id}", color=theme["text"], weight="bold", fontsize=8.5)
        for k, line in enumerate(rows[device]):
            axes.text(j + 0.1, top - 0.49 - 0.19 * k, line, color=theme["text"], family="monospace", fontsize=7.5)
    axes.set(xlim=(-0.12, right), ylim=(-0.02, down + 0.28))
    axes.text(right / 2, down + 0.06, f"model = {right}  (tensor parallel)", color=theme["faint"], ha="center")
    axes.text(-0.04, down / 2, f"batch = {down}  (data parallel)", color=theme["faint"], va="center", ha="right",
              rotation=90)  # fmt: skip
    axes.axis("off")


def draw_loss(axes: Axes, records: list[dict[str, Any]], entropy: float, theme: Theme) -> None:
    """Training and validation loss over the steps."""
    train = [(r["batch"], r["loss"]) for r in records if r["kind"] == "train"]
    steps, losses = (np.array(column) for column in zip(*train, strict=True))
    width = min(20, len(losses))
    mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=0.6)
    axes.plot(steps[width - 1 :], mean, color=BLUE, label="training")
    validation = [(r["batch"], r["loss"]) for r in records if r["kind"] == "eval"]
    axes.plot(*zip(*validation, strict=True), "o-", color=ORANGE, markersize=4, label="validation")
    axes.axhline(entropy, color=theme["faint"], linestyle="--", linewidth=1, label="best without context")
    axes.set_title("GPT on the sources of Python's standard library", color=theme["text"], fontsize=9.5)
    axes.set_xlabel("step", color=theme["text"])
    axes.set_ylabel("loss (nats per token)", color=theme["text"])
    plain(axes, theme)
    axes.legend(frameon=False, labelcolor=theme["text"])


def draw(run: Path, images: Path = IMAGES) -> None:
    """Draw the picture of a demo's folder, for light and for dark pages.

    Args:
        run: Where the demo wrote its files.
        images: Where the two SVGs go.
    """
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    batch_size = summary["settings"].pop("batch_size")
    settings = Settings(**summary["settings"])
    mesh = settings.choose_mesh()
    rows = held(mesh, batch_size, settings.make_model())

    def panels(figure: Figure, theme: Theme) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        draw_mesh(left, mesh, rows, theme)
        draw_loss(right, read_metrics(run / METRICS), summary["unigram_entropy"], theme)

    save_both(images / "demo", (10, 3.9), panels)


if __name__ == "__main__":
    simulate_devices(8)
    jax.config.update("jax_platforms", "cpu")
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
