"""Files that the demo writes, each whole or not at all."""

import json
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_model, save_model

from torch_shard._common.files import replacing
from torch_shard._demo.model import GPT


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
