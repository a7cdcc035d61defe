"""What `torch-shard preview` and `prove` are pointed at: a file, a function, or a model of transformers."""

import dataclasses
import importlib
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
import torch
from jax.sharding import Mesh

from torch_shard._common.types import PyTree
from torch_shard._entries import LossFn
from torch_shard._plans import fsdp_tp
from torch_shard._scan import Remat
from torch_shard._train import Step, TrainFunction, TrainStep, make_train_step

NEEDED = ("model", "loss_fn", "batch", "plan", "optimizer")
"""Names that a previewed file has to define."""

Hub = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Models of transformers by name: of the class, and the fields of its configuration."""


def _fields(hidden: int, inner: int, layers: int, heads: int, **others: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, **others}


LENGTH, ROWS = 2048, 4
"""Of the sequences of an example, and how many of them each shard of a batch has."""

_WIDE = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": LENGTH}

EXAMPLES: Hub = {
    "llama-3-8b": ("Llama", _fields(4096, 14336, 32, 32, **_WIDE)),
    "llama-3-70b": ("Llama", _fields(8192, 28672, 80, 64, **_WIDE)),
    "llama-3-405b": ("Llama", _fields(16384, 53248, 126, 128, **_WIDE)),
}

TINY_LENGTH, TINY_ROWS, WORDS = 16, 8, 64

_LLAMA = _fields(32, 64, 2, 4, num_key_value_heads=4, vocab_size=WORDS, max_position_embeddings=TINY_LENGTH)
_LLAMA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

TINY: Hub = {
    "llama-tiny": ("Llama", _LLAMA),
    "gemma3-tiny": ("Gemma3", {**_LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "mixtral-tiny": ("Mixtral", {**_LLAMA, "num_local_experts": 4}),
    "qwen3-moe-tiny": ("Qwen3Moe", {**_LLAMA, "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 32}),
}


def _of_hub(models: Hub, name: str) -> torch.nn.Module:
    """A model with random values."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"{name} is a model of transformers: pip install 'torch_shard[hf]'.") from error
    family, fields = models[name]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    return getattr(transformers, f"{family}ForCausalLM")(config(**fields))


def _next_token(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tiny(name: str) -> tuple[torch.nn.Module, LossFn, PyTree]:
    """A small model with random values, its loss, and a batch; the name is one of `TINY`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _of_hub(TINY, name)
        tokens = torch.randint(3, WORDS, (TINY_ROWS, TINY_LENGTH))
    return model.eval(), loss_with_logits, {"input_ids": tokens, "labels": tokens}


def loss_with_logits(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, PyTree]:
    """The loss of a model of transformers, with its logits as a metric."""
    out = model(**batch)
    return out.loss, {"logits": out.logits}


def find_step(
    target: str, choose_mesh: Callable[[Mesh | None], Mesh], remat: Remat | int | None = None
) -> tuple[Step, PyTree]:
    """The step to be previewed, and the batch that it takes.

    Args:
        target: A Python file that defines `model`, `loss_fn`, `batch`, `plan` and `optimizer`, or a function with
            `@ts.train_step` above it and a `batch`, its arguments; `module:function`, which is called with the mesh and
            returns a step and a batch; or the name of an example.
        choose_mesh: Gives the devices. It is called with the mesh that the file has made, if any, and when the file has
            run: a script says first how many devices JAX is to show, which JAX does not take later.
        remat: What the backward pass computes again, where the target is no function; None for its default.
    """
    if target in EXAMPLES:
        return _of_example(target, choose_mesh(None), remat)
    if target.endswith(".py"):
        defined = read_file(Path(target), ())
        function = next((value for value in defined.values() if isinstance(value, TrainFunction)), None)
        if function is not None:
            check_defined(target, defined, ("batch",))
            return _of_decorated(function, defined, choose_mesh, remat)
        check_defined(target, defined, NEEDED)
        return _of_file(defined, choose_mesh, remat)
    return _of_function(target, choose_mesh(None))


def _of_example(name: str, mesh: Mesh, remat: Remat | int | None) -> tuple[Step, PyTree]:
    with torch.device("meta"):
        model, batch = _of_hub(EXAMPLES, name), torch.empty(ROWS * mesh.shape["batch"], LENGTH, dtype=torch.int64)
    how: dict[str, Any] = {"remat": remat or "block", "compute_dtype": torch.bfloat16}
    return make_train_step(model, _next_token, optax.adamw(3e-4), mesh=mesh, plan=fsdp_tp, **how), batch


def _of_file(
    defined: Mapping[str, Any], choose_mesh: Callable[[Mesh | None], Mesh], remat: Remat | int | None
) -> tuple[Step, PyTree]:
    """The script's own step, or one like it on another mesh."""
    model, loss_fn, batch, plan, optimizer = (defined[name] for name in NEEDED)
    step, own_mesh = defined.get("step"), defined.get("mesh")
    mesh = choose_mesh(own_mesh if isinstance(own_mesh, Mesh) else None)
    options: dict[str, Any] = {}
    if isinstance(step, TrainStep):
        if remat is None and step.mesh == mesh:
            return step, batch
        options = {field.name: getattr(step.options, field.name) for field in dataclasses.fields(step.options)}
    options |= {"mesh": mesh, "plan": plan}
    if remat is not None:
        options["remat"] = remat
    return make_train_step(model, loss_fn, optimizer, **options), batch


def _of_decorated(
    function: TrainFunction[Any, Any],
    defined: Mapping[str, Any],
    choose_mesh: Callable[[Mesh | None], Mesh],
    remat: Remat | int | None,
) -> tuple[Step, PyTree]:
    """The step of a decorated function, for the arguments that the script has as `batch`."""
    batch, own_mesh = defined["batch"], defined.get("mesh")
    options: dict[str, Any] = {"mesh": choose_mesh(own_mesh if isinstance(own_mesh, Mesh) else None)}
    if remat is not None:
        options["remat"] = remat
    function = function.on(**options)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return function.begin(*arguments), function.batch(*arguments)


def read_file(path: Path, needed: Sequence[str]) -> Mapping[str, Any]:
    """What a Python file defines, run as a script is but for what is under `if __name__ == "__main__"`."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    arguments, sys.argv = sys.argv, [str(path)]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        defined: Mapping[str, Any] = runpy.run_path(str(path))
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"in line {lines[-1]}" if lines else "as it is read"
        raise ValueError(
            f"{path} fails {where}: {type(error).__name__}: {error} (What is to run in training alone, such as "
            'step.init and the loop, belongs under if __name__ == "__main__".)'
        ) from error
    finally:
        sys.path.pop(0)
        sys.argv = arguments
    check_defined(path, defined, needed)
    return defined


def check_defined(path: Path | str, defined: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Refuse a file that does not define all that is needed."""
    missing = [name for name in needed if name not in defined]
    if missing:
        raise ValueError(f"{path} defines no {', '.join(missing)}; it has to define {', '.join(needed)}.")


def find_proved(target: str) -> tuple[torch.nn.Module, LossFn, PyTree]:
    """The model, the loss and the batch that are to be proved.

    Args:
        target: A Python file that defines `model`, `loss_fn` and `batch`; or the name of a small model.
    """
    if target in TINY:
        return tiny(target)
    if not target.endswith(".py"):
        raise ValueError(f"{target} is neither a Python file nor one of {', '.join(TINY)}.")
    defined = read_file(Path(target), NEEDED[:3])
    return defined["model"], defined["loss_fn"], defined["batch"]


def _of_function(target: str, mesh: Mesh) -> tuple[Step, PyTree]:
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(
            f"{target} is neither a Python file, nor module:function, nor an example ({', '.join(EXAMPLES)})."
        )
    # As `python -m` does it: the script's own directory is not on the path of an installed command.
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name}.") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ValueError(f"{module} has no function {name}.")
    made = function(mesh) if inspect.signature(function).parameters else function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Step)):  # pyright: ignore
        raise ValueError(f"{module}:{name} must return a step, as make_train_step gives it, and a batch.")
    return made
