"""The batch of a step that was not finite, kept beside the checkpoints, so that the step can be repeated."""

from pathlib import Path

import jax
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torch_shard._common.files import replacing
from torch_shard._common.types import PyTree
from torch_shard._loss import array_paths, flatten_batch
from torch_shard._train import ShardedBatch, TrainStep

BAD_BATCH = "bad_batch.safetensors"


def save_bad_batch(step: TrainStep, placed: ShardedBatch, directory: Path) -> Path:
    """Write the whole batch, its leaves by their places in it; every process must call this, and the first writes."""
    leaves, path = step.gradient_step.on_host(placed), directory / BAD_BATCH
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            named = zip(placed.signature.paths, leaves, strict=True)
            save_file({name: leaf.contiguous() for name, leaf in named}, partial)
    return path


def read_bad_batch(directory: Path, like: PyTree) -> PyTree:
    """The batch of a bad step.

    Args:
        directory: Where `fit(on_bad_step="explain")` has kept it.
        like: A batch of the same structure.
    """
    path = directory / BAD_BATCH
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {BAD_BATCH}: fit(on_bad_step='explain') writes it.")
    try:
        leaves = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    paths = array_paths(like)
    if sorted(paths) != sorted(leaves):
        raise ValueError(f"the batch has {', '.join(leaves)}, and that of the step {', '.join(paths)}")
    _, signature = flatten_batch(like)
    return signature.rebuild([leaves[path] for path in paths])
