"""Files that the demo writes, each whole or not at all."""

import json
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_model, save_model

from torch_shard._common.files import replacing
from torch_shard._demo.model import GPT
from torch_shard._demo.run import History


def prepare_folder(folder: Path) -> None:
    """Make a folder, and find out now, rather than after the training, whether it can be written to.

    Raises:
        OSError: It cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def save_json(value: object, path: Path) -> None:
    """Write what JSON can say."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def save_weights(model: GPT, arguments: dict[str, int], path: Path) -> None:
    """Write a model's weights as safetensors, by torch's names, a tie once.

    Args:
        model: On the CPU.
        arguments: What it was made with; kept in the file's metadata.
        path: Of the file.
    """
    with replacing(path) as partial:
        save_model(model, str(partial), metadata={"model": json.dumps(arguments)})


def load_weights(path: Path) -> GPT:
    """Read a model that `save_weights` wrote, in eval mode."""
    with safe_open(path, "pt") as file:
        model = GPT(**json.loads(file.metadata()["model"]))
    load_model(model, path)
    return model.eval()


def save_plot(history: History, unigram_entropy: float, path: Path) -> None:
    """Draw training and validation loss over the steps.

    Args:
        history: What was measured.
        unigram_entropy: In nats; drawn as a line.
        path: Of the PNG.
    """
    steps, losses = [r["batch"] for r in history.train], [r["loss"] for r in history.train]
    width = min(20, len(losses))
    mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    # A Figure of its own: pyplot would look for a screen.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps[width - 1 :], mean, color="tab:blue", label=f"training, mean of {width} steps")
    validation = [(r["batch"], r["loss"]) for r in history.validation]
    axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.axhline(unigram_entropy, color="grey", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="A GPT on the sources of Python's standard library")
    axes.legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
