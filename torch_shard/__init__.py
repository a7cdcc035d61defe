"""Train torch models on JAX meshes: the names that users import."""

import importlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# The command `torch-shard` answers --help, --version and tutorials without torch and JAX, whose imports take seconds.
# In that process alone, `__getattr__` finds the names when they are asked for; and so it would in a program of a user
# that happens to have the same name.
# As `python -m torch_shard` its name is not known yet when this runs: "-m" stands for it.
_NAME = Path(next(iter(sys.argv), "")).name
_IS_COMMAND = _NAME in ("torch-shard", "torch-shard.exe") or (
    _NAME == "-m" and any(pair == ("-m", "torch_shard") for pair in itertools.pairwise(sys.orig_argv))
)

if TYPE_CHECKING or not _IS_COMMAND:
    from torch_shard import collectives, optim, plans
    from torch_shard._cost import Preview
    from torch_shard._device import data_shard, disable_globally, enable_globally, gather, jax_device, place
    from torch_shard._fit import (
        BadStepError,
        BestCheckpoint,
        Callback,
        EarlyStopping,
        Profile,
        Rows,
        Run,
        Utilization,
        fit,
    )
    from torch_shard._generate import generate
    from torch_shard._hosts import Launch, broadcast, initialize
    from torch_shard._inspect import (
        Explanation,
        NanReport,
        Proof,
        Proofs,
        compare_with_torch,
        explain_capture,
        find_nan,
        prove,
    )
    from torch_shard._interop import (
        Kernel,
        call_jax,
        call_torch,
        debug_print,
        jax_checkpoint,
        jax_grad,
        jax_jit,
        jax_value_and_grad,
        jax_view,
        lowering,
        override,
        register,
        torch_view,
    )
    from torch_shard._io import Checkpointer, export_safetensors, export_torch, load_safetensors, load_torch
    from torch_shard._lowering import ConstrainedValue, ConstrainedValues
    from torch_shard._materialize import materialize
    from torch_shard._sharding import Context, Padded, Pieces, Pipeline, ShardingPlan, make_mesh
    from torch_shard._spmd import (
        ArgKind,
        assert_replica_integrity,
        gather_from_jax_processes,
        jax_pmap,
        jax_shard_map,
        jax_vmap,
        tpmap,
        unshard,
    )
    from torch_shard._state import TrainState
    from torch_shard._train import (
        ApplyStep,
        Comparison,
        EvalStep,
        TrainFunction,
        TrainStep,
        make_apply,
        make_eval_step,
        make_train_step,
        train_step,
    )
    from torch_shard._tune import Tuning, load_tuned, tune

    register()  # the device `jax`, and methods on torch.Tensor: all that importing this package changes

if TYPE_CHECKING:
    __version__: str

__all__ = [
    "ApplyStep",
    "ArgKind",
    "BadStepError",
    "BestCheckpoint",
    "Callback",
    "Checkpointer",
    "Comparison",
    "ConstrainedValue",
    "ConstrainedValues",
    "Context",
    "EarlyStopping",
    "EvalStep",
    "Explanation",
    "Kernel",
    "Launch",
    "NanReport",
    "Padded",
    "Pieces",
    "Pipeline",
    "Preview",
    "Profile",
    "Proof",
    "Proofs",
    "Rows",
    "Run",
    "ShardingPlan",
    "TrainFunction",
    "TrainState",
    "TrainStep",
    "Tuning",
    "Utilization",
    "assert_replica_integrity",
    "broadcast",
    "call_jax",
    "call_torch",
    "collectives",
    "compare_with_torch",
    "data_shard",
    "debug_print",
    "disable_globally",
    "enable_globally",
    "explain_capture",
    "export_safetensors",
    "export_torch",
    "find_nan",
    "fit",
    "gather",
    "gather_from_jax_processes",
    "generate",
    "initialize",
    "jax_checkpoint",
    "jax_device",
    "jax_grad",
    "jax_jit",
    "jax_pmap",
    "jax_shard_map",
    "jax_value_and_grad",
    "jax_view",
    "jax_vmap",
    "load_safetensors",
    "load_torch",
    "load_tuned",
    "lowering",
    "make_apply",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "materialize",
    "optim",
    "override",
    "place",
    "plans",
    "prove",
    "torch_view",
    "tpmap",
    "train_step",
    "tune",
    "unshard",
]

if not _IS_COMMAND:
    for _name in __all__:  # what users import stands under its public name in help(), signatures and repr
        if getattr(globals()[_name], "__module__", None) is not None:
            globals()[_name].__module__ = __name__

_PACKAGES = (
    *("_cost", "_device", "_fit", "_generate", "_hosts", "_inspect", "_interop", "_io", "_lowering", "_materialize"),
    *("_sharding", "_spmd", "_state", "_train", "_tune"),
)

_OPTIONAL = ("hf", "lightning")
"""Modules for a library that need not be there: imported when they are asked for."""


def __getattr__(name: str) -> object:
    """Find what is asked for seldom: the version, `hf`, `lightning`; in the command `torch-shard`, every other name."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("torch_shard")
    if name in _OPTIONAL:
        return importlib.import_module(f"torch_shard.{name}")
    if name not in __all__:
        answer = importlib.import_module("torch_shard._common.other_names").answer_to(name, __all__)
        said = f"module {__name__!r} has no attribute {name!r}" + (answer and f". {answer}")
        raise AttributeError(said, name=name, obj=sys.modules[__name__])  # of which Python suggests a name that is near
    importlib.import_module("torch_shard._interop").register()
    if name in ("collectives", "optim", "plans"):
        return importlib.import_module(f"torch_shard.{name}")
    packages = (importlib.import_module(f"torch_shard.{package}") for package in _PACKAGES)
    return next(getattr(package, name) for package in packages if hasattr(package, name))
