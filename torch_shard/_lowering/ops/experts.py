"""Mixtures of gated experts as one operator, each device with its own tokens and its own experts.

HF's models sort all tokens by expert, whole on each device, and then leave grouped products. As one operator, tokens
stay split over the axes of the batch, and experts over the others: a device sorts its own tokens, runs its own experts
on them (see `expert_blocks`), and one sum over the axes of the experts gives each token its result. Where a plan has
experts over an axis of the batch too, tokens are sent to them and back, if that is less than to gather the experts (see
`expert_dispatch`).

Experts may have biases, matrices that lie transposed, and the clamped gate of gpt-oss: see `Gate`.

Shapes: T tokens, K experts of each token, E experts, D model, F inner width of an expert, H = 2 F.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import PartitionSpec
from torch import nn
from torch.fx import GraphModule, Node

from torch_shard._common.fx import args_of, forward_nodes
from torch_shard._common.overrides import captured_op, digest_of, gradients_again, instead_of_attribute, is_transformed
from torch_shard._lowering.ops.expert_blocks import Gate, experts_backward, experts_forward, sort_slots
from torch_shard._lowering.ops.expert_dispatch import Exchange, Sizes, find_exchange, find_route
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import RowSplit

About = tuple[str, tuple[float, ...], bool, bool]
"""The fields of a `Gate`."""

Forward = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@captured_op(
    "torch_shard::experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor[] matrices, str activation, float[] numbers, bool "
    "interleaved, bool transposed) -> Tensor",
)
def _shape(x, *_):
    return x.new_empty(x.shape)


@captured_op(
    "torch_shard::experts_backward",
    "(Tensor grad, Tensor x, Tensor ids, Tensor weights, Tensor[] matrices, str activation, float[] numbers, "
    "bool interleaved, bool transposed) -> Tensor[]",
)
def _backward_shapes(grad, x, ids, weights, matrices, *_):
    return [given.new_empty(given.shape) for given in (x, weights, *matrices)]


class _Experts(torch.autograd.Function):
    """`(about, x_TD, ids_TK, weights_TK, up, down, *biases) -> out_TD`."""

    @staticmethod
    def forward(ctx: Any, about: About, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.about = about
        ctx.save_for_backward(*tensors)
        x, ids, weights, *matrices = tensors
        return torch.ops.torch_shard.experts(x, ids, weights, matrices, *about)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, ids, weights, *matrices = ctx.saved_tensors
        needed = [need for i, need in enumerate(ctx.needs_input_grad[1:]) if i != 1]
        if torch.is_grad_enabled():
            out = _by_grouped_products(x, ids, weights, matrices, Gate(*ctx.about))
            found = gradients_again(out, (x, weights, *matrices), needed, grads)
        else:
            each = torch.ops.torch_shard.experts_backward(grads[0], x, ids, weights, matrices, *ctx.about)
            found = [grad if need else None for grad, need in zip(each, needed, strict=True)]
        return None, found[0], None, *found[1:]


def _by_grouped_products(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: list[torch.Tensor], gate: Gate
) -> torch.Tensor:
    """The same in operators that PyTorch has derivatives of."""
    up, down, *biases = matrices
    up, down = (up, down) if gate.transposed else (up.mT, down.mT)
    expert, order = ids.flatten().sort(stable=True)
    token, ends = order // ids.shape[1], (expert[:, None] <= torch.arange(len(up))).sum(0).to(torch.int32)
    own, is_here = expert.clamp(max=len(up) - 1), (expert < len(up))[:, None]
    pre = F.grouped_mm(x[token].to(up.dtype), up, offs=ends)
    pre = (pre + biases[0][own]).to(up.dtype) if biases else pre
    first, inner = (pre[..., ::2], pre[..., 1::2]) if gate.interleaved else pre.chunk(2, -1)
    out = F.grouped_mm(_inner(first, inner, gate), down, offs=ends)
    out = torch.where(is_here, out + biases[1][own], 0).to(out.dtype) if biases else out
    out = out * weights.flatten()[order, None]
    return torch.zeros(x.shape, dtype=out.dtype).index_add(0, token, out).to(x.dtype)


def _inner(first: torch.Tensor, up: torch.Tensor, gate: Gate) -> torch.Tensor:
    if gate.activation == "clamped":
        alpha, limit = gate.numbers
        first = first.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * first * torch.sigmoid(alpha * first)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
    return act[gate.activation](first) * up


@instead_of_attribute("transformers.integrations.moe.ExpertsInterface", "__getitem__")
def experts_interface(interface: Any, name: str) -> Forward:
    """HF's table of implementations of experts, with ours for the grouped products."""
    found = super(type(interface), interface).__getitem__(name)  # pyright: ignore[reportAttributeAccessIssue]
    moe: Any = sys.modules["transformers.integrations.moe"]
    if found is not moe.grouped_mm_experts_forward:
        return found

    def forward(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        about = _about(module, moe)
        if about is None or not _fits(module, x, ids, weights):
            return found(module, x, ids, weights)
        return apply_experts(about, (x, ids, weights), _matrices(module))

    return forward


def apply_experts(about: About, tokens: tuple[torch.Tensor, ...], held: Sequence[torch.Tensor]) -> torch.Tensor:
    """The operator with its derivative: `x_TD, ids_TK, weights_TK`, and the matrices and biases of a module."""
    matrices = [torch.clone(each) for each in held]  # as precision has them
    if torch.is_autocast_enabled("cpu"):  # products, as in HF's loop over experts
        matrices[:2] = (each.to(torch.get_autocast_dtype("cpu")) for each in matrices[:2])
    return _Experts.apply(about, *tokens, *matrices)  # pyright: ignore


NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""By the names of the classes of activations, PyTorch's and HF's."""

_GATES = {"4d10025d": True, "2356ccb3": False}
"""Of gates that are clamped, by the first digits of the SHA-256 of their source, whether they are interleaved.

The first is that of gpt-oss.
"""


def _about(module: Any, moe: Any) -> About | None:
    """The fields of a `Gate` of gated experts that are nothing else; None if they are."""
    flags = ("has_gate", "has_post_expert_norm", "_is_expert_parallel")
    transposed = bool(getattr(module, "is_transposed", False))
    is_known = [getattr(module, flag, None) for flag in flags] == [True, False, False]
    if not is_known or not hasattr(module, "has_bias") or "_apply_gate" in vars(module):
        return None
    apply_gate = type(module)._apply_gate
    if apply_gate is moe._default_apply_gate:
        act = getattr(module, "act_fn", None)
        name = None if is_hooked(act) else NAMES.get(type(act).__name__)
        return None if name is None else (name, (), False, transposed)
    numbers = tuple(getattr(module, name, None) for name in ("alpha", "limit"))
    interleaved = _GATES.get(digest_of(getattr(apply_gate, "__code__", None)))
    if interleaved is None or not all(isinstance(number, float | int) for number in numbers):
        return None
    return "clamped", tuple(map(float, numbers)), interleaved, transposed  # pyright: ignore[reportArgumentType]


def _matrices(module: Any) -> list[torch.Tensor]:
    biases = [module.gate_up_proj_bias, module.down_proj_bias] if module.has_bias else []
    return [module.gate_up_proj, module.down_proj, *biases]


def is_hooked(module: Any) -> bool:
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def _fits(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
    return (
        fits(x, _matrices(module), transposed=bool(module.is_transposed))
        and ids.shape == weights.shape == (len(x), ids.shape[-1])
        and len(_matrices(module)[0]) == module.num_experts
        and weights.is_floating_point()
        and not is_transformed([ids, weights])
    )


def fits(x: torch.Tensor, matrices: Sequence[torch.Tensor], *, transposed: bool) -> bool:
    """Tell whether tokens `x_TD` and matrices and biases are of the shapes and dtypes that the operator takes."""
    up, down, *biases = matrices
    num_experts, hidden, width = up.mT.shape if transposed else up.shape
    wanted = (num_experts, hidden // 2, width) if transposed else (num_experts, width, hidden // 2)
    return (
        x.ndim == 2
        and x.numel() > 0
        and x.shape[1] == width
        and down.shape == wanted
        and [bias.shape for bias in biases] == [(num_experts, hidden), (num_experts, width)][: len(biases)]
        and len({matrix.dtype for matrix in matrices}) == 1
        and x.is_floating_point()
        and up.is_floating_point()
        and not is_transformed([x, *matrices])
    )


@dataclasses.dataclass(frozen=True)
class Places:
    """Where tokens and experts are.

    Attributes:
        mesh: None on one device.
        rows: The axes over which tokens are split.
        over: Those over which experts are.
        exchange: How tokens come to experts that are split over axes of the tokens; None if there are none such.
    """

    mesh: jax.sharding.Mesh | None
    rows: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    exchange: Exchange | None = None

    @staticmethod
    def of(split: RowSplit, sizes: Sizes) -> "Places":
        """Tokens as the batch, and experts over the other axes that divide, or where the plan has them.

        Experts over axes of the batch are gathered there, unless it is less to send them their tokens, and to hold.
        """
        over: tuple[str, ...] = ()
        for axis, size in split.sizes.items():
            if axis not in split.data_axes and sizes.num_experts % (size * split.size_of(over)) == 0:
                over = (*over, axis)
        axes = (split.data_axes, split.axes)
        rows = next((rows for rows in axes if sizes.num_tokens % split.size_of(rows) == 0), ())
        exchange = find_exchange(split, rows, sizes)
        if exchange is None or not exchange.moves_tokens(sizes):
            return Places(split.mesh, rows, over)
        return Places(split.mesh, rows, tuple(exchange.axes), exchange)

    @property
    def beside_tokens(self) -> tuple[str, ...]:
        """The axes of experts over which tokens are not split: what these give is summed."""
        return tuple(axis for axis in self.over if axis not in self.rows)

    @property
    def beside_experts(self) -> tuple[str, ...]:
        """The axes of tokens over which experts are not split: their gradients are summed."""
        return tuple(axis for axis in self.rows if axis not in self.over)


def _places(ids, matrices, split):
    return Places(None) if split is None else Places.of(split, Sizes.of(ids, matrices))


@lowers(torch.ops.torch_shard.experts.default, on_mesh=True)
def experts(x, ids, weights, matrices, *about, split=None):
    """Of each token, the sum over the axes of the experts."""
    places, num_experts, gate = _places(ids, matrices, split), len(matrices[0]), Gate(*about)

    def run(x, ids, weights, *matrices):
        send, back, here = _ways(places, ids, len(matrices[0]), num_experts)
        return _sum(back(experts_forward((send(x), send(weights), *matrices), here, gate)), places.beside_tokens)

    tokens, of_experts = PartitionSpec(places.rows), PartitionSpec(places.over)
    specs = (*(tokens,) * 3, *(of_experts,) * len(matrices))
    return _mapped(run, places.mesh, specs, tokens)(x, ids, weights, *matrices)


@lowers(torch.ops.torch_shard.experts_backward.default, on_mesh=True)
def backward(grad, x, ids, weights, matrices, *about, split=None):
    """Gradients of tokens are summed over the axes of the experts, those of the experts over the axes of the batch."""
    places, num_experts, gate = _places(ids, matrices, split), len(matrices[0]), Gate(*about)

    def run(grad, x, ids, weights, *matrices):
        send, back, here = _ways(places, ids, len(matrices[0]), num_experts)
        found = experts_backward(send(grad), (send(x), send(weights), *matrices), here, gate)
        of_tokens = (_sum(back(g), places.beside_tokens) for g in found[:2])
        return *of_tokens, *(_sum(g, places.beside_experts) for g in found[2:])

    tokens, of_experts = PartitionSpec(places.rows), (PartitionSpec(places.over),) * len(matrices)
    specs = (*(tokens,) * 4, *of_experts), (tokens, tokens, *of_experts)
    return _mapped(run, places.mesh, *specs)(grad, x, ids, weights, *matrices)


def _ways(places, ids, num_here, num_experts):
    """How values come to the experts and back, and the slots of what came; all stays where tokens stay."""
    send, back = (lambda x: x), (lambda x: x)
    if places.exchange is not None:
        route = find_route(places.exchange, ids, num_here)
        send, back, ids = route.send, route.back, jnp.where(route.is_written[:, None], route.send(ids), -1)
    first = lax.axis_index(places.over) * num_here if places.over else 0
    return send, back, sort_slots(ids, first, num_here, num_experts)


def _sum(value, axes):
    return lax.psum(value, axes) if axes else value


def _mapped(run, mesh, in_specs, out_specs):
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_UNKNOWN = (
    "tokens are sent to gated experts of transformers alone (SiLU, GELU, or the clamped gate of gpt-oss), without "
    'hooks and with experts_implementation="grouped_mm", which is the default.'
)


def report_experts(graphs: Iterable[tuple[str, GraphModule]], rows: RowSplit) -> list[str]:
    """Lines that say where tokens go to experts over the axes of the batch, or these are gathered, by which bytes."""
    found, is_any = dict[str, list[str]](), False
    for path, node in forward_nodes(graphs):
        if node.target is torch.ops.torch_shard.experts.default:
            is_any = True
            if line := _moves(node, rows):
                found.setdefault(line, []).append(path)
    if not is_any and (over := set(rows.experts) & set(rows.data_axes)):
        return [f"Experts over {', '.join(sorted(over))} are computed as the model writes them: {_UNKNOWN}"]
    return [f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {line}" for line, paths in found.items()]


def _moves(node: Node, rows: RowSplit) -> str:
    _, ids, _, matrices, *_ = args_of(node)
    sizes = Sizes.of(ids.meta["val"], [matrix.meta["val"] for matrix in matrices])
    places = Places.of(rows, sizes)
    exchange = find_exchange(rows, places.rows, sizes)
    if exchange is None:
        return ""
    given = exchange.bytes_of_tokens(sizes), exchange.room_of_tokens(sizes), exchange.bytes_of_experts(sizes)
    tokens, room, experts = (f"{num / 2**20:.3g} MiB" for num in given)
    axes = ", ".join(f"{axis}={exchange.axes[axis]}" for axis in exchange.via)
    if places.exchange is None:
        return (
            f"experts over {axes} are gathered, {experts} a step and device; to send them their tokens would be "
            f"{tokens}, and take room for {room}."
        )
    return f"tokens are sent to experts over {axes} and back, {tokens} a step and device; to gather these is {experts}."
