"""LSTM, GRU and RNN as one operator per layer and direction, however long the sequence.

PyTorch's own composites unroll: one piece of graph per time step. Here the product with the inputs is one linear layer
over all steps, and what depends on the step before is an operator that a lowering can loop over. Dropout between
layers stays PyTorch's own.

Shapes: T steps, B batch, C input width, H hidden width, G gates times H, P width of the output.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import autocast_only
from torch_shard._common.autocast_policy import LOWER
from torch_shard._common.axes import vary_like
from torch_shard._common.dtypes import widened
from torch_shard._common.overrides import captured_op, gradients_again, instead_of, is_plain
from torch_shard._common.types import PyTree
from torch_shard._lowering.ops.packed import Lengths
from torch_shard._lowering.ops.registry import lowers
from torch_shard._lowering.rows import on_rows

aten = torch.ops.aten

NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

Tensors = list[torch.Tensor]

Mask = torch.Tensor | None
"""Which steps there are, (T, B), of padded sequences: a state passes the others as it is."""


@captured_op(
    "torch_shard::recurrence",
    "(str kind, Tensor gates, Tensor[] state, Tensor[] weights, bool reverse, Tensor? mask) -> Tensor[]",
)
def _recurrence_shapes(kind, gates, state, *_):
    return [gates.new_empty(len(gates), *s.shape) for s in state]


@captured_op(
    "torch_shard::recurrence_backward",
    "(str kind, Tensor gates, Tensor[] state, Tensor[] weights, bool reverse, Tensor? mask, Tensor[] outputs, "
    "Tensor[] grads) -> Tensor[]",
)
def _backward_shapes(kind, gates, state, weights, *_):
    return [torch.empty_like(t) for t in (gates, *state, *weights)]


class _Recurrence(torch.autograd.Function):
    """All states of one layer in one direction: `(gates_TBG, state, weights) -> (h_TBP, c_TBH for an LSTM)`.

    Weights are `(w_hh, b_hh, w_hr)`, the latter two where there are any.
    """

    @staticmethod
    def forward(ctx: Any, kind: str, num_state: int, reverse: bool, mask: Mask, *tensors: torch.Tensor) -> tuple:
        gates, state, weights = tensors[0], list(tensors[1 : 1 + num_state]), list(tensors[1 + num_state :])
        outputs = torch.ops.torch_shard.recurrence(kind, gates, state, weights, reverse, mask)
        ctx.options = kind, num_state, reverse, mask
        ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kind, num_state, reverse, mask = ctx.options
        tensors, outputs = ctx.saved_tensors[:-num_state], ctx.saved_tensors[-num_state:]
        if torch.is_grad_enabled():
            unrolled = _unrolled(kind, num_state, reverse, mask, *tensors)
            return None, None, None, None, *gradients_again(unrolled, tensors, ctx.needs_input_grad[4:], grads)
        gates, state, weights = tensors[0], list(tensors[1 : 1 + num_state]), list(tensors[1 + num_state :])
        options = kind, gates, state, weights, reverse, mask, list(outputs), list(grads)
        return None, None, None, None, *torch.ops.torch_shard.recurrence_backward(*options)


def _unrolled(kind: str, num_state: int, reverse: bool, mask: Mask, *tensors: torch.Tensor) -> Tensors:
    """The same in plain operators."""
    gates, state, weights = tensors[0], tensors[1 : 1 + num_state], tensors[1 + num_state :]
    steps: list[tuple[torch.Tensor, ...]] = []
    for t in reversed(range(len(gates))) if reverse else range(len(gates)):
        new = _cell(kind, gates[t], state, weights)
        if mask is not None:
            new = tuple(torch.where(mask[t, :, None], n, s) for n, s in zip(new, state, strict=True))
        state = new
        steps.append(state)
    return [torch.stack(values) for values in zip(*(reversed(steps) if reverse else steps), strict=True)]


def _cell(kind: str, given: torch.Tensor, state: tuple, weights: tuple) -> tuple[torch.Tensor, ...]:
    h, (w_hh, bias, projection) = state[0], split_weights(kind, state, weights)
    own = F.linear(h, w_hh, bias)
    if kind == "lstm":
        i, f, g, o = (given + own).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if projection is None else F.linear(h, projection)), c
    if kind == "gru":
        (given_r, given_z, given_n), (own_r, own_z, own_n) = given.chunk(3, -1), own.chunk(3, -1)
        n = (given_n + (given_r + own_r).sigmoid() * own_n).tanh()
        return ((h - n) * (given_z + own_z).sigmoid() + n,)
    return ((given + own).tanh() if kind == "rnn_tanh" else (given + own).relu(),)


T = TypeVar("T", jax.Array, torch.Tensor)


def split_weights(kind: str, state: Sequence[T], weights: Sequence[T]) -> tuple[T, T | None, T | None]:
    """`(w_hh, b_hh or None, w_hr or None)`, of tensors or arrays."""
    has_projection = kind == "lstm" and state[0].shape[-1] != state[1].shape[-1]
    projection = weights[-1] if has_projection else None
    return weights[0], (weights[1] if len(weights) == 2 + has_projection else None), projection


def _direction(
    kind: str, x_TBC: torch.Tensor, state: Tensors, params: Tensors, reverse: bool, biased: bool, mask: Mask
) -> Tensors:
    w_ih, w_hh, *others = params
    gates = F.linear(x_TBC, w_ih, others.pop(0) if biased else None)
    run = _Recurrence.apply if is_plain([x_TBC, *state, *params]) else _unrolled
    return run(kind, len(state), reverse, mask, gates, *state, w_hh, *others)  # pyright: ignore


def _net(
    kind: str,
    x: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Tensors,
    biased: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    mask: Mask = None,
) -> tuple[torch.Tensor, ...]:
    states = list(hx) if kind == "lstm" else [hx]
    num_runs = num_layers * (1 + bidirectional)
    each = len(params) // num_runs
    x, finals = x.transpose(0, 1) if batch_first else x, []
    for layer in range(num_layers):
        outputs = []
        for direction in range(1 + bidirectional):
            run = layer * (1 + bidirectional) + direction
            own = params[run * each : (run + 1) * each]
            found = _direction(kind, x, [s[run] for s in states], own, direction == 1, biased, mask)
            outputs.append(found[0])
            finals.append([steps[0 if direction else -1] for steps in found])
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    last = [torch.stack(values) for values in zip(*finals, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *last


def _fits(args: tuple[PyTree, ...]) -> bool:
    """Tell whether our operator means the same as PyTorch's composite, which stays in all other cases."""
    if len(args) != 9 or not isinstance(args[3], bool):  # packed sequences; arguments by name
        return False
    x, hx, params = args[0], args[1] if isinstance(args[1], (tuple, list)) else [args[1]], args[2]
    tensors = [x, *hx, *params]
    return (
        x.ndim == 3
        and x.shape[0 if not args[8] else 1] > 0
        and all(h.ndim == 3 and h.shape[1] == x.shape[1 if not args[8] else 0] for h in hx)
        and is_plain(tensors)
    )


def _of_packed(kind: str, data: torch.Tensor, packed: Lengths, *others: Any) -> tuple[torch.Tensor, ...]:
    mask = packed.mask_TB
    out, *last = _net(kind, data.unflatten(0, mask.shape), *others, batch_first=False, mask=mask)
    return out.flatten(0, 1), *last


def _narrowed(values: PyTree, dtype: torch.dtype) -> PyTree:
    """What autocast gives cuDNN: all that is floating point in the lower precision."""
    lower = (torch.float32, *LOWER)
    return torch_pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype in lower else t, values)


def _replacing(kind: str, composite: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            with autocast_only():
                return call(*_narrowed(args, dtype), **_narrowed(kwargs, dtype))
        if len(args) == 9 and isinstance(args[1], Lengths):
            return _of_packed(kind, *args)
        return _net(kind, *args) if not kwargs and _fits(args) else composite(*args, **kwargs)

    return call


for _kind in NUM_GATES:
    for _composite in {getattr(torch._VF, _kind), getattr(torch, _kind)}:
        instead_of(_composite)(_replacing(_kind, _composite))


def _own(h, w_hh, bias):
    product = _product(h, w_hh.T)
    return product if bias is None else product + bias


def _product(x, weight):
    """In the precision of the weight, added up as wide as `x`."""
    return jnp.matmul(x.astype(weight.dtype), weight, preferred_element_type=x.dtype)


def _lstm(pre, c):
    i, f, g, o = jnp.split(pre, 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    return i, f, g, o, f * c + i * g


def _gru(given, own):
    (given_r, given_z, given_n), (own_r, own_z, own_n) = jnp.split(given, 3, -1), jnp.split(own, 3, -1)
    r, z = jax.nn.sigmoid(given_r + own_r), jax.nn.sigmoid(given_z + own_z)
    return r, z, jnp.tanh(given_n + r * own_n), own_n


@lowers(torch.ops.torch_shard.recurrence.default, on_mesh=True)
def recurrence(kind, gates, state, weights, reverse, mask, *, split=None):
    """States after each step: `[h_TBP]`, for an LSTM `[h_TBP, c_TBH]`.

    Each device runs its rows with whole weights: nothing goes over the wire from step to step.
    """

    def run(gates, mask, state, weights):
        return _states(kind, gates, state, weights, reverse, mask), ()

    outputs, _ = on_rows(run, [gates, mask, state], [weights], split, dims=[1, 1, 0], out_dims=[1] * len(state))
    return list(outputs)


def _states(kind, gates, state, weights, reverse, mask):
    w_hh, bias, projection = split_weights(kind, state, weights)

    def step(state, given):
        given, there = given
        new = cell(state, given)
        new = new if there is None else _held(there, new, state)
        return new, tuple(n.astype(gates.dtype) for n in new)

    def cell(state, given):
        own = _own(state[0], w_hh, bias)
        if kind == "lstm":
            _, _, _, o, c = _lstm(given + own, state[1])
            h = o * jnp.tanh(c)
            return (h if projection is None else _product(h, projection.T), c)
        if kind == "gru":
            _, z, n, _ = _gru(given, own)
            return ((state[0] - n) * z + n,)
        return (jnp.tanh(given + own) if kind == "rnn_tanh" else jax.nn.relu(given + own),)

    # What goes from step to step is wide: in bfloat16 it would lose what is small beside the rest.
    start = vary_like(tuple(map(widened, state)), gates, list(weights))
    return jax.lax.scan(step, start, (gates, mask), reverse=reverse)[1]


def _held(there, new, old):
    """The new values of the sequences that have this step, the old ones of the others."""
    return tuple(jnp.where(there[:, None], n, o) for n, o in zip(new, old, strict=True))


@lowers(torch.ops.torch_shard.recurrence_backward.default, on_mesh=True)
def recurrence_backward(kind, gates, state, weights, reverse, mask, outputs, grads, *, split=None):
    """Gradients of `(gates, *state, *weights)`."""

    def run(gates, mask, outputs, grads, state, weights):
        found = _gradients(kind, gates, state, weights, reverse, mask, outputs, grads)
        return found[: 1 + len(state)], found[1 + len(state) :]

    by_rows, out_dims = [gates, mask, outputs, grads, state], [1, *(0 for _ in state)]
    own, sums = on_rows(run, by_rows, [weights], split, dims=[1, 1, 1, 1, 0], out_dims=out_dims)
    return [*own, *sums]


def _gradients(kind, gates, state, weights, reverse, mask, outputs, grads):
    w_hh, bias, projection = split_weights(kind, state, weights)
    before = [_shifted(s, steps, reverse) for s, steps in zip(state, outputs, strict=True)]
    own = _own(widened(before[0]), w_hh, bias)
    back = {"lstm": _lstm_back, "gru": _gru_back}.get(kind, _rnn_back)
    factors, step = back(kind, gates, own, before, outputs, w_hh, projection)
    start = vary_like(tuple(jnp.zeros_like(widened(s)) for s in state), list(grads), factors, w_hh, projection)

    def masked_step(later, given):
        given, there = given
        earlier, found = step(later, given)
        if there is not None:
            passed = tuple(map(jnp.add, later, given[0]))
            earlier, found = _held(there, earlier, passed), _held(there, found, map(jnp.zeros_like, found))
        return earlier, tuple(value.astype(gates.dtype) for value in found)

    grad_state, (grad_given, grad_own, *for_projection) = jax.lax.scan(
        masked_step, start, ((tuple(grads), factors), mask), reverse=not reverse
    )
    grad_weights = [jnp.einsum("tbg,tbp->gp", grad_own, before[0])]
    if bias is not None:
        grad_weights.append(jnp.sum(grad_own, (0, 1)))
    if projection is not None:
        grad_h, h = for_projection[0], factors[-1]
        grad_weights.append(jnp.einsum("tbp,tbh->ph", grad_h, h))
    return grad_given, *(g.astype(s.dtype) for g, s in zip(grad_state, state, strict=True)), *grad_weights


def _shifted(first, steps, reverse):
    """The state before each step."""
    return jnp.concatenate([steps[1:], first[None]] if reverse else [first[None], steps[:-1]])


def _lstm_back(kind, gates, own, before, outputs, w_hh, projection):
    i, f, g, o, _ = _lstm(gates + own, before[1])
    tanh = jnp.tanh(outputs[1])
    # What the gradients of h (before its projection) and of c are multiplied by, for the gates i, f, g and for o.
    by_c = jnp.concatenate([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g)], -1)
    factors = (by_c, tanh * o * (1 - o), o * (1 - tanh * tanh), f, o * tanh)

    def step(later, given):
        (grad_h, grad_c), (by_c, by_h, h_to_c, f, _) = given
        grad_out = grad_h + later[0]
        grad_h = grad_out if projection is None else _product(grad_out, projection)
        grad_c = grad_c + later[1] + grad_h * h_to_c
        grad = jnp.concatenate([jnp.concatenate([grad_c] * 3, -1) * by_c, grad_h * by_h], -1)
        return (_product(grad, w_hh), grad_c * f), (grad, grad, *(() if projection is None else (grad_out,)))

    return factors, step


def _gru_back(kind, gates, own, before, outputs, w_hh, projection):
    r, z, n, own_n = _gru(gates, own)
    factors = ((1 - z) * (1 - n * n), (before[0] - n) * z * (1 - z), own_n * r * (1 - r), r, z)

    def step(later, given):
        (grad_h,), (by_n, by_z, by_r, r, z) = given
        grad_h = grad_h + later[0]
        grad_n = grad_h * by_n
        first_two = [grad_n * by_r, grad_h * by_z]
        grad_own = jnp.concatenate([*first_two, grad_n * r], -1)
        return (grad_h * z + _product(grad_own, w_hh),), (jnp.concatenate([*first_two, grad_n], -1), grad_own)

    return factors, step


def _rnn_back(kind, gates, own, before, outputs, w_hh, projection):
    h = outputs[0]
    factors = (1 - h * h if kind == "rnn_tanh" else (h > 0).astype(h.dtype),)

    def step(later, given):
        (grad_h,), (factor,) = given
        grad = (grad_h + later[0]) * factor
        return (_product(grad, w_hh),), (grad, grad)

    return factors, step


# What PyTorch runs of a cell on devices that are not the CPU: eager LSTMs and GRUs there come to these.


@lowers(aten._thnn_fused_lstm_cell.default)
def lstm_cell(input_gates, hidden_gates, cell, input_bias=None, hidden_bias=None):
    """Returns `(hidden, cell, gates)`: the gates, as they are multiplied with, are kept for the backward pass."""
    gates = _with_biases(input_gates + hidden_gates, input_bias, hidden_bias)
    i, f, g, o = jnp.split(gates, 4, axis=1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    new_cell = f * cell + i * g
    return o * jnp.tanh(new_cell), new_cell, jnp.concatenate([i, f, g, o], axis=1)


@lowers(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(grad_hidden, grad_cell, cell, new_cell, gates, has_bias):
    """Returns the gradients of the gates before their functions, of the cell, and of each bias."""
    i, f, g, o = jnp.split(gates, 4, axis=1)
    squashed = jnp.tanh(new_cell)
    grad_hidden = jnp.zeros_like(new_cell) if grad_hidden is None else grad_hidden
    through_cell = grad_hidden * o * (1 - squashed**2)
    through_cell = through_cell if grad_cell is None else through_cell + grad_cell
    grad_i = through_cell * g * i * (1 - i)
    grad_f = through_cell * cell * f * (1 - f)
    grad_g = through_cell * i * (1 - g**2)
    grad_o = grad_hidden * squashed * o * (1 - o)
    grad_gates = jnp.concatenate([grad_i, grad_f, grad_g, grad_o], axis=1)
    return grad_gates, through_cell * f, jnp.sum(grad_gates, 0) if has_bias else None


@lowers(aten._thnn_fused_gru_cell.default)
def gru_cell(input_gates, hidden_gates, hidden, input_bias=None, hidden_bias=None):
    """Returns `(hidden, workspace)`: reset, update and new gate, the hidden state, and what the reset gate is of."""
    input_r, input_z, input_n = jnp.split(_with_biases(input_gates, input_bias), 3, axis=1)
    hidden_r, hidden_z, hidden_n = jnp.split(_with_biases(hidden_gates, hidden_bias), 3, axis=1)
    r, z = jax.nn.sigmoid(input_r + hidden_r), jax.nn.sigmoid(input_z + hidden_z)
    n = jnp.tanh(input_n + r * hidden_n)
    return n + z * (hidden - n), jnp.concatenate([r, z, n, hidden, hidden_n], axis=1)


@lowers(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(grad_hidden, workspace, has_bias):
    """Returns the gradients of both kinds of gates, of the hidden state, and of both biases."""
    r, z, n, hidden, hidden_n = jnp.split(workspace, 5, axis=1)
    grad_n = grad_hidden * (1 - z) * (1 - n**2)
    grad_z = grad_hidden * (hidden - n) * z * (1 - z)
    grad_r = grad_n * hidden_n * r * (1 - r)
    grad_input = jnp.concatenate([grad_r, grad_z, grad_n], axis=1)
    grad_recurrent = jnp.concatenate([grad_r, grad_z, grad_n * r], axis=1)
    biases = (jnp.sum(grad_input, 0), jnp.sum(grad_recurrent, 0)) if has_bias else (None, None)
    return grad_input, grad_recurrent, grad_hidden * z, *biases


def _with_biases(gates, *biases):
    for bias in biases:
        gates = gates if bias is None else gates + bias
    return gates
