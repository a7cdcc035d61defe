"""Mixtures of gated experts as one operator, each device with its own tokens and its own experts.

HF's models sort all tokens by expert, whole on each device, and then leave grouped products. As one operator, tokens
stay split over the axes of the batch, and experts over the others: a device sorts its own tokens, runs its own experts
on them (see `expert_blocks`), and one sum over the axes of the experts gives each token its result.

Shapes: T tokens, K experts of each token, E experts, D model, F inner width of an expert, H = 2 F.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

from torch_shard._common.axes import manual_axes
from torch_shard._common.overrides import instead_of_attribute, is_transformed
from torch_shard._common.pieces import InPieces
from torch_shard._lowering.ops.expert_blocks import experts_backward, experts_forward, sort_slots
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import current_rows

Forward = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.library.custom_op("torch_shard::experts", mutates_args=())
def _experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str
) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_experts.register_fake
def _shape(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str
) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("torch_shard::experts_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_backward.register_fake
def _backward_shapes(
    grad: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape), up.new_empty(up.shape), down.new_empty(down.shape)


class _Experts(torch.autograd.Function):
    """`(activation, x_TD, ids_TK, weights_TK, up_EHD, down_EDF) -> out_TD`."""

    @staticmethod
    def forward(ctx: Any, activation: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.activation = activation
        ctx.save_for_backward(*tensors)
        return torch.ops.torch_shard.experts(*tensors, activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, ids, weights, up, down = ctx.saved_tensors
        needed = [need for i, need in enumerate(ctx.needs_input_grad[1:]) if i != 1]
        if torch.is_grad_enabled():  # for a derivative of this derivative
            wanted = [t for t, need in zip((x, weights, up, down), needed, strict=True) if need]
            out = _by_grouped_products(x, ids, weights, up, down, ctx.activation)
            given = iter(torch.autograd.grad(out, wanted, grads[0], create_graph=True))
            found = [next(given) if need else None for need in needed]
        else:
            each = torch.ops.torch_shard.experts_backward(*grads, x, ids, weights, up, down, ctx.activation)
            found = [grad if need else None for grad, need in zip(each, needed, strict=True)]
        return None, found[0], None, *found[1:]


def _by_grouped_products(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str
) -> torch.Tensor:
    """The same in operators that PyTorch has derivatives of."""
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}[activation]
    expert, order = ids.flatten().sort(stable=True)
    token, ends = order // ids.shape[1], (expert[:, None] <= torch.arange(len(up))).sum(0).to(torch.int32)
    gate, inner = F.grouped_mm(x[token].to(up.dtype), up.mT, offs=ends).chunk(2, -1)
    out = F.grouped_mm(act(gate) * inner, down.mT, offs=ends) * weights.flatten()[order, None]
    return torch.zeros(x.shape, dtype=out.dtype).index_add(0, token, out).to(x.dtype)


@instead_of_attribute("transformers.integrations.moe.ExpertsInterface", "__getitem__")
def experts_interface(interface: Any, name: str) -> Forward:
    """HF's table of implementations of experts, with ours for the grouped products."""
    found = super(type(interface), interface).__getitem__(name)  # pyright: ignore[reportAttributeAccessIssue]
    moe: Any = sys.modules["transformers.integrations.moe"]
    if found is not moe.grouped_mm_experts_forward:
        return found

    def forward(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activation = _activation(module, moe)
        if activation is None or not _fits(module, x, ids, weights):
            return found(module, x, ids, weights)
        up, down = (torch.clone(each) for each in (module.gate_up_proj, module.down_proj))  # as precision has them
        if torch.is_autocast_enabled("cpu"):  # products, as in HF's loop over experts
            up, down = (each.to(torch.get_autocast_dtype("cpu")) for each in (up, down))
        return _Experts.apply(activation, x, ids, weights, up, down)  # pyright: ignore

    return forward


_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""By the names of the classes of activations, PyTorch's and HF's."""


def _activation(module: Any, moe: Any) -> str | None:
    """The activation of gated experts that are nothing else; None if they are."""
    flags = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    is_known = [getattr(module, flag, None) for flag in flags] == [True, True, False, False, False, False]
    act = getattr(module, "act_fn", None)
    if not is_known or type(module)._apply_gate is not moe._default_apply_gate or _is_hooked(act):
        return None
    return _NAMES.get(type(act).__name__)


def _is_hooked(module: Any) -> bool:
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def _fits(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
    up, down = module.gate_up_proj, module.down_proj
    num_experts, hidden, width = up.shape
    return (
        x.ndim == 2
        and x.numel() > 0
        and ids.shape == weights.shape == (len(x), ids.shape[-1])
        and x.shape[1] == width
        and down.shape == (num_experts, width, hidden // 2)
        and num_experts == module.num_experts
        and up.dtype == down.dtype
        and all(t.is_floating_point() for t in (x, weights, up))
        and not is_transformed([x, ids, weights, up, down])
    )


def _split(num_tokens: int, num_experts: int) -> tuple[jax.sharding.Mesh | None, tuple[str, ...], tuple[str, ...]]:
    """The mesh, the axes over which tokens are split, and those over which experts are; None on one device."""
    split = current_rows()
    if split is None or manual_axes():
        return None, (), ()
    over: tuple[str, ...] = ()
    for axis, size in split.mesh.shape.items():
        if axis not in split.axes and num_experts % (size * math.prod(split.mesh.shape[a] for a in over)) == 0:
            over = (*over, axis)
    return split.mesh, split.axes if num_tokens % split.num_shards == 0 else (), over


@lowers(torch.ops.torch_shard.experts.default, pieces=True)
def experts(x, ids, weights, up, down, activation):
    """Of each token, the sum over the axes of the experts."""
    mesh, rows, over = _split(len(x), len(up))
    up, down = _put_together(up, mesh, over), _put_together(down, mesh, over)

    def run(x, ids, weights, up, down):
        here = sort_slots(ids, _first(over, len(up)), len(up), num_experts)
        return _sum(experts_forward((x, weights, up, down), here, activation), over)

    num_experts = len(up)
    tokens, of_experts = PartitionSpec(rows), PartitionSpec(over)
    return _mapped(run, mesh, (tokens, tokens, tokens, of_experts, of_experts), tokens)(x, ids, weights, up, down)


@lowers(torch.ops.torch_shard.experts_backward.default, pieces=True)
def backward(grad, x, ids, weights, up, down, activation):
    """Gradients of tokens are summed over the axes of the experts, those of the experts over the axes of the batch."""
    mesh, rows, over = _split(len(x), len(up))
    up, down = _put_together(up, mesh, over), _put_together(down, mesh, over)
    num_experts = len(up)

    def run(grad, x, ids, weights, up, down):
        here = sort_slots(ids, _first(over, len(up)), len(up), num_experts)
        found = experts_backward(grad, (x, weights, up, down), here, activation)
        return tuple(_sum(g, axes) for g, axes in zip(found, (over, over, rows, rows), strict=True))

    tokens, of_experts = PartitionSpec(rows), PartitionSpec(over)
    specs = (*(tokens,) * 4, of_experts, of_experts)
    return _mapped(run, mesh, specs, (tokens, tokens, of_experts, of_experts))(grad, x, ids, weights, up, down)


def _put_together(stack, mesh, over):
    """Matrices of experts that are in pieces: on the device that has the expert all of its pieces meet."""
    if not isinstance(stack, InPieces):
        return stack
    if mesh is None:
        return stack.whole()
    sharding = NamedSharding(mesh, PartitionSpec(over))
    return lax.with_sharding_constraint(stack.array, sharding).reshape(stack.shape)


def _first(axes, num_here):
    return lax.axis_index(axes) * num_here if axes else 0


def _sum(value, axes):
    return lax.psum(value, axes) if axes else value


def _mapped(run, mesh, in_specs, out_specs):
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
