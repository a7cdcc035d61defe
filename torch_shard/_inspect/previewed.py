"""What `torch-shard preview` and `prove` are pointed at: a Python file, a function, or one of the ready examples."""

import dataclasses
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.types import PyTree
from torch_shard._inspect.tiny import TINY, tiny
from torch_shard._scan import Remat
from torch_shard._sharding import LossFn, ShardingPlan
from torch_shard._train import Step, make_train_step

NEEDED = ("model", "loss_fn", "batch", "plan", "optimizer")
"""Names that a previewed file has to define."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A model that is known by name, to be made on the meta device.

    Attributes:
        hidden: Width.
        inner: Width within an MLP.
        layers: Number of them.
        heads: Of the queries.
        kv_heads: Of keys and values.
        words: Size of the vocabulary.
        length: Of the sequences.
        rows: In a batch, for each of its shards.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    words: int = 128_256
    length: int = 2048
    rows: int = 4

    def step(self, mesh: Mesh, remat: Remat | int | None) -> tuple[Step, PyTree]:
        """A training step of it with AdamW in bfloat16, weights split over both axes, and the shapes of a batch."""
        import optax
        import transformers

        config: Any = transformers.LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.words,
            max_position_embeddings=self.length,
        )
        with torch.device("meta"):
            model: Any = transformers.LlamaForCausalLM(config)
        step = make_train_step(
            model,
            _next_token,
            optax.adamw(3e-4),
            mesh=mesh,
            plan=_by_both(model),
            remat=remat or "block",
            compute_dtype=torch.bfloat16,
        )
        return step, torch.empty(self.rows * mesh.shape["batch"], self.length, dtype=torch.int64, device="meta")


EXAMPLES = {
    "llama-3-8b": Example(4096, 14336, 32, 32, 8),
    "llama-3-70b": Example(8192, 28672, 80, 64, 8),
    "llama-3-405b": Example(16384, 53248, 126, 128, 8),
}


def _next_token(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _by_both(model: torch.nn.Module) -> ShardingPlan:
    """Matrices over both axes: rows of what widens over `model`, columns of what narrows."""
    narrows = ("o_proj.weight", "down_proj.weight")
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim == 2]
    specs = {n: ("batch", "model") if n.endswith(narrows) else ("model", "batch") for n in matrices}
    return ShardingPlan({n: PartitionSpec(*spec) for n, spec in specs.items()}, default=PartitionSpec())


def find_step(target: str, mesh: Mesh, remat: Remat | int | None = None) -> tuple[Step, PyTree]:
    """The step to be previewed, and the batch that it takes.

    Args:
        target: A Python file that defines `model`, `loss_fn`, `batch`, `plan` and `optimizer`; `module:function`, which
            is called with the mesh and returns a step and a batch; or the name of an example.
        mesh: The devices.
        remat: What the backward pass computes again, where the target is no function; None for its default.

    Raises:
        ValueError: It is none of these, or lacks something.
    """
    if target in EXAMPLES:
        return EXAMPLES[target].step(mesh, remat)
    if target.endswith(".py"):
        return _of_file(Path(target), mesh, remat)
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(
            f"{target} is neither a Python file, nor module:function, nor an example ({', '.join(EXAMPLES)})."
        )
    return _of_function(module, name, mesh)


def read_file(path: Path, needed: Sequence[str]) -> Mapping[str, Any]:
    """What a Python file defines.

    Args:
        path: Of the file, which is run.
        needed: Names that it has to define.

    Raises:
        ValueError: There is none, or it lacks some.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    found: Mapping[str, Any] = runpy.run_path(str(path))
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{path} defines no {', '.join(missing)}; it has to define {', '.join(needed)}.")
    return found


def find_proved(target: str) -> tuple[torch.nn.Module, LossFn, PyTree]:
    """The model, the loss and the batch that are to be proved.

    Args:
        target: A Python file that defines `model`, `loss_fn` and `batch`; or the name of a small model.

    Raises:
        ValueError: It is neither, or lacks something.
        ImportError: The small model needs a library.
    """
    if target in TINY:
        return tiny(target)
    if not target.endswith(".py"):
        raise ValueError(f"{target} is neither a Python file nor one of {', '.join(TINY)}.")
    found = read_file(Path(target), NEEDED[:3])
    return found["model"], found["loss_fn"], found["batch"]


def _of_file(path: Path, mesh: Mesh, remat: Remat | int | None) -> tuple[Step, PyTree]:
    found = read_file(path, NEEDED)
    model, loss_fn, batch, plan, optimizer = (found[name] for name in NEEDED)
    return make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan, remat=remat or "none"), batch


def _of_function(module: str, name: str, mesh: Mesh) -> tuple[Step, PyTree]:
    sys.path.insert(0, os.getcwd())
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name}.") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}.")
    made = found(mesh) if inspect.signature(found).parameters else found()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Step)):  # pyright: ignore
        raise ValueError(f"{module}:{name} must return a step, as make_train_step gives it, and a batch.")
    return made
