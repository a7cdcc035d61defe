"""Functions across the border: a torch callable as a JAX function, JAX as torch, the jax_* adapters."""

from torch_shard._interop.effects import debug_print
from torch_shard._interop.jax_function import CLOSURE, Reader
from torch_shard._interop.kernels import Kernel
from torch_shard._interop.lowering import lowering
from torch_shard._interop.override import override
from torch_shard._interop.transforms import (
    PerClosure,
    Pure,
    adapt,
    jax_checkpoint,
    jax_grad,
    jax_jit,
    jax_value_and_grad,
)
from torch_shard._interop.views import call_jax, call_torch, jax_view, pure_of, register, torch_view
