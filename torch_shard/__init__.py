"""Train torch models on JAX meshes: the names that users import."""

from torch_shard import collectives
from torch_shard._device.backend import disable_globally, enable_globally, jax_device
from torch_shard._device.placement import gather, place
from torch_shard._fit.bad_step import BadStepError
from torch_shard._fit.fit import fit
from torch_shard._inspect.compare import Comparison, compare_with_torch
from torch_shard._inspect.drawing import Drawing, visualize_sharding
from torch_shard._inspect.explain import Explanation, explain_capture
from torch_shard._interop.effects import debug_print
from torch_shard._interop.transforms import jax_checkpoint, jax_grad, jax_jit, jax_value_and_grad
from torch_shard._interop.views import call_jax, call_torch, jax_view, torch_view
from torch_shard._io.checkpointer import Checkpointer
from torch_shard._io.export import export_safetensors, export_torch
from torch_shard._io.load import load_safetensors, load_torch
from torch_shard._materialize.materialize import materialize
from torch_shard._sharding.mesh import make_mesh
from torch_shard._sharding.plan import ShardingPlan
from torch_shard._spmd.arg_kinds import ArgKind
from torch_shard._spmd.maps import jax_pmap, jax_shard_map, jax_vmap
from torch_shard._spmd.replicas import assert_replica_integrity, gather_from_jax_processes, unshard
from torch_shard._spmd.tpmap import tpmap
from torch_shard._train.make import make_eval_step, make_train_step
from torch_shard._train.state import TrainState
from torch_shard._train.train_step import EvalStep, TrainStep

__version__ = "0.1.0"
__all__ = [
    "ArgKind",
    "BadStepError",
    "Checkpointer",
    "Comparison",
    "Drawing",
    "EvalStep",
    "Explanation",
    "ShardingPlan",
    "TrainState",
    "TrainStep",
    "assert_replica_integrity",
    "call_jax",
    "call_torch",
    "collectives",
    "compare_with_torch",
    "debug_print",
    "disable_globally",
    "enable_globally",
    "explain_capture",
    "export_safetensors",
    "export_torch",
    "fit",
    "gather",
    "gather_from_jax_processes",
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
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "materialize",
    "place",
    "torch_view",
    "tpmap",
    "unshard",
    "visualize_sharding",
]
