"""JAX's attention kernels as torchprime runs them, in the place of a function that a model calls.

Shapes: B rows, N heads, K heads of the keys, T time, H of one head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.sharding import PartitionSpec as P

import torch_shard as ts

BLOCK = 256
"""Rows of a block. In the sources they are up to 2048, for which the compiler takes ten times as long to make code.

Of splash attention's partial gradients of queries there are as many as in the source.
"""

NAME = "published"
"""Of the attention, as transformers know it."""

Attend = Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]


def causal(q_BNTH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, scale: float) -> torch.Tensor:
    """What the kernels compute."""
    return torch.nn.functional.scaled_dot_product_attention(
        q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=scale, enable_gqa=True
    )


def _attend(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, __: Any, scaling: float, **___: Any) -> Any:
    return causal(q, k, v, scaling).transpose(1, 2), None


transformers.AttentionInterface.register(NAME, _attend)
transformers.AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def flash(q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, scale: float) -> jax.Array:
    """The older kernel, which takes as many heads of keys as of queries, and is two in the backward pass."""
    rows, keys = min(BLOCK, q_BNTH.shape[2]), min(2 * BLOCK, q_BNTH.shape[2])
    sizes = BlockSizes(
        block_q=rows,
        block_k_major=keys,
        block_k=rows,
        block_b=1,
        block_q_major_dkv=rows,
        block_k_major_dkv=keys,
        block_q_dkv=rows,
        block_k_dkv=rows,
        block_q_dq=rows,
        block_k_dq=rows,
        block_k_major_dq=keys,
    )
    k, v = (jnp.repeat(x, q_BNTH.shape[1] // x.shape[1], axis=1) for x in (k_BKTH, v_BKTH))
    return flash_attention(q_BNTH * scale, k, v, causal=True, block_sizes=sizes)


def fused_splash(q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, scale: float) -> jax.Array:
    """Splash attention, one kernel in the backward pass."""
    length = q_BNTH.shape[2]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv_compute")
    sizes: dict[str, Any] = {f"block_{name}": min(BLOCK, length) for name in names} | {
        "block_kv_dkv": min(2048, length)
    }
    kernel: Any = splash.make_splash_mha_single_device(
        mask=splash.MultiHeadMask([splash.CausalMask((length, length))] * q_BNTH.shape[1]),
        block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=True),
    )
    return jax.vmap(kernel)(q_BNTH * scale, k_BKTH, v_BKTH)


def use(kernel: Attend, axes: P) -> None:
    """Let the programs of this process run a kernel, each device its rows and heads."""
    ts.override(causal, in_specs=(axes, axes, axes, None), out_specs=axes, check_vma=False, matmul_precision="default")(
        lambda q, k, v, scale: _at_once(kernel, scale)(q, k, v)
    )


def _at_once(kernel: Attend, scale: float) -> Callable[..., jax.Array]:
    """The same, which gives what its derivative reads even where nobody does: so XLA sees that both are one call."""

    def derived(*qkv: jax.Array) -> Any:
        return jax.vjp(lambda q, k, v: kernel(q, k, v, scale), *qkv)

    run = jax.custom_vjp(lambda *qkv: derived(*qkv)[0])
    run.defvjp(derived, lambda pull, grad: pull(grad))
    return run
