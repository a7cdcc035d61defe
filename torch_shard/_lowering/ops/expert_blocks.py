"""Gated experts in JAX, each over its own tokens in blocks: on every platform the arithmetic is about what is needed.

`jax.lax.ragged_dot_general` becomes a dense product over all experts on TPUs and CPUs where the groups are summed over,
as in the gradients of the experts' matrices. Here the rows of each expert are taken in blocks of one size, as many as
it has; a block that reaches beyond them is followed by the next expert's, or not read, and counts nothing in a sum.

Biases are none, or those of both products, (E, H) and (E, D).

Matrices stay as a model has them, so that none is copied: see `Gate`.

Shapes: T tokens, K experts of each token, E experts, D model, F inner width of an expert, H = 2 F, B rows of a block.
A slot is one of the T * K pairs of a token and its expert.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from torch_shard._common.axes import vary_like
from torch_shard._common.dtypes import dtype_of_sums, widened
from torch_shard._common.expected_trips import expecting
from torch_shard._common.types import PyTree

SMALLEST, WORTH, LARGEST = 8, 256, 1024
"""Rows of a block: half of what an expert has if all have as many, within these bounds.

For each block the expert's matrices are read once, which is as long as the arithmetic of about 256 rows on a TPU v5e
or an H100, and the sum of a gradient is read and written, as long as that of about 1024.
"""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class Gate:
    """How the first product of an expert becomes its inner values, and how its matrices lie.

    Attributes:
        activation: Of the gate, one of `ACTIVATIONS`; or "clamped", that of gpt-oss.
        numbers: Of "clamped", the factor within the sigmoid, and the limit of both halves.
        interleaved: Whether gate and up are every other feature, and not the first half and the second.
        transposed: Whether the matrices are (E, D, H) and (E, F, D), and not (E, H, D) and (E, D, F).
    """

    activation: str
    numbers: tuple[float, ...] = ()
    interleaved: bool = False
    transposed: bool = False

    def into(self, rows_BI: jax.Array, matrix: jax.Array, *bias: jax.Array) -> jax.Array:
        """Product of rows with a matrix of one expert as it lies, and its bias added."""
        found = rows_BI @ (matrix if self.transposed else matrix.T)
        return (found + bias[0]).astype(found.dtype) if bias else found

    def back(self, grads_BO: jax.Array, matrix: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """Gradient of the rows of `into`."""
        return jnp.matmul(grads_BO, matrix.T if self.transposed else matrix, preferred_element_type=dtype)

    def outer(self, grads_BO: jax.Array, rows_BI: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Gradient of the matrix of `into`, as it lies."""
        first, second = (rows_BI, grads_BO) if self.transposed else (grads_BO, rows_BI)
        return jnp.einsum("bi,bo->io", first, second, preferred_element_type=dtype)

    def halves(self, pre_BH: jax.Array) -> Sequence[jax.Array]:
        """Features of the gate, and those that it is multiplied with."""
        return every_other(pre_BH) if self.interleaved else jnp.split(pre_BH, 2, -1)


@jax.custom_vjp
def every_other(x_BH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Features 0, 2, 4, ... and 1, 3, 5, ...

    The gradient puts them beside each other. XLA's own, which pads each with zeros in between, takes TPU's compiler
    minutes and gigabytes for a few thousand features.
    """
    return x_BH[:, ::2], x_BH[:, 1::2]


every_other.defvjp(lambda x: (every_other(x), None), lambda _, grads: (jnp.stack(grads, 2).reshape(len(grads[0]), -1),))


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots in the order of their experts.

    Attributes:
        order: The slots, those of no expert here last; followed by a block of zeros.
        place: Of each slot in this order, (T, K).
        starts: Of each expert in this order, (E,).
        ends: See there.
        block: Rows of a block.
        expected: Number of blocks of an expert, if all have as many slots.
    """

    order: jax.Array
    place: jax.Array
    starts: jax.Array
    ends: jax.Array
    block: int
    expected: float

    def read(self, sorted_values: jax.Array) -> jax.Array:
        """`(T, K, ...)` of what was written in order; zero where the expert is not here."""
        here = (self.place < self.ends[-1]).reshape(self.place.shape + (1,) * (sorted_values.ndim - 1))
        return jnp.where(here, sorted_values[self.place], 0)


def sort_slots(ids_TK: jax.Array, first: int | jax.Array, num_here: int, num_experts: int) -> Slots:
    """Sort slots by their experts, of which `num_here` from `first` on are here."""
    ids = ids_TK.reshape(-1).astype(jnp.int32) - first
    ids = jnp.where((ids >= 0) & (ids < num_here), ids, num_here)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32).reshape(ids_TK.shape)
    ends = jnp.sum(ids[:, None] <= jnp.arange(num_here), axis=0, dtype=jnp.int32)
    mean = len(ids) / num_experts
    block = _block(mean, len(ids))
    return Slots(
        order=jnp.pad(order, (0, block)),
        place=place,
        starts=jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]),
        ends=ends,
        block=block,
        expected=max(mean / block + 0.5, 1.0),
    )


def _block(mean: float, num_slots: int) -> int:
    step = 128 if mean >= 256 else SMALLEST
    return min(max(math.ceil(mean / 2 / step) * step, WORTH), LARGEST, math.ceil(num_slots / SMALLEST) * SMALLEST)


def run_blocks(
    slots: Slots,
    experts: PyTree,
    zeros: tuple[PyTree, PyTree],
    step: Callable[[PyTree, jax.Array, jax.Array], tuple[PyTree, PyTree]],
) -> tuple[PyTree, PyTree]:
    """Run a function for all blocks of all experts.

    Args:
        slots: Sorted.
        experts: Arrays (E, ...), of which each block is given its expert's.
        zeros: Of a row of each value that is written in order; and of each sum over an expert's blocks, which is taken
            in float32 at least and returned in the dtype of its zero.
        step: Takes an expert, the slots of a block, and which of them are the expert's; returns the rows of the values,
            and what is added to the sums.
    """
    rows, sums = zeros
    written = jax.tree.map(lambda row: jax.lax.empty((len(slots.order), *row.shape), row.dtype), rows)
    wide = jax.tree.map(widened, sums)
    written, wide = vary_like((written, wide), experts, slots.order)
    blocks = (slots.ends - slots.starts + slots.block - 1) // slots.block
    after = jnp.cumsum(blocks)

    def of_block(number: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        written, sums = carry
        own = jnp.sum(after <= number, dtype=jnp.int32)  # by the block, so that XLA copies no expert before its loop
        at = slots.starts[own] + (number - after[own] + blocks[own]) * slots.block
        chosen = jax.lax.dynamic_slice_in_dim(slots.order, at, slots.block)
        expert = jax.tree.map(lambda x: x[own], experts)
        found, more = step(expert, chosen, at + jnp.arange(slots.block) < slots.ends[own])
        written = jax.tree.map(lambda to, v: jax.lax.dynamic_update_slice_in_dim(to, v, at, 0), written, found)
        return written, jax.tree.map(jnp.add, sums, more)

    def of_expert(written: PyTree, bounds: tuple[jax.Array, jax.Array]) -> tuple[PyTree, PyTree]:
        with expecting(slots.expected):
            written, found = jax.lax.fori_loop(*bounds, of_block, (written, wide))
        return written, jax.tree.map(lambda x, zero: x.astype(zero.dtype), found, sums)

    return jax.lax.scan(of_expert, written, (after - blocks, after))


def gated(pre_BH: jax.Array, gate: Gate) -> jax.Array:
    """The inner values of experts: one half through the activation, times the other."""
    first, up = gate.halves(pre_BH)
    if gate.activation != "clamped":
        return ACTIVATIONS[gate.activation](widened(first)).astype(first.dtype) * up
    alpha, limit = gate.numbers
    first, up = widened(first), widened(up)
    first, up = (jnp.where(x > limit, limit, x) for x in (first, up))  # at the limit, the gradient goes through
    up = jnp.where(up < -limit, -limit, up)
    return ((up + 1) * first * jax.nn.sigmoid(alpha * first)).astype(pre_BH.dtype)


def experts_forward(tensors: tuple[jax.Array, ...], slots: Slots, gate: Gate) -> jax.Array:
    """`x_TD, weights_TK, up, down, *biases` to the sum over each token's experts that are here, (T, D)."""
    x_TD, weights_TK, *matrices = tensors
    narrow, num_choices = x_TD.astype(matrices[0].dtype), weights_TK.shape[1]

    def step(expert: tuple[jax.Array, ...], chosen: jax.Array, _: jax.Array) -> tuple[jax.Array, tuple[()]]:
        up, down, *biases = expert
        inner = gated(gate.into(narrow[chosen // num_choices], up, *biases[:1]), gate)
        return gate.into(inner, down, *biases[1:]), ()

    row = jnp.zeros(x_TD.shape[1:], narrow.dtype)
    found, _ = run_blocks(slots, tuple(matrices), (row, ()), step)
    return jnp.sum(slots.read(found) * weights_TK[..., None], axis=1).astype(x_TD.dtype)


def experts_backward(
    grad_TD: jax.Array, tensors: tuple[jax.Array, ...], slots: Slots, gate: Gate
) -> tuple[jax.Array, ...]:
    """Gradients by `x_TD, weights_TK, up, down, *biases`; of the first two, what the experts here give.

    The weight of a slot stands behind the product with `down`, so that its gradient is the product of the inner values
    with the gradient that comes to them, and that product need not be computed again.
    """
    x_TD, weights_TK, *matrices = tensors
    dtype, num_choices = matrices[0].dtype, weights_TK.shape[1]
    wide = dtype_of_sums(dtype)
    narrow, grad, weights = x_TD.astype(dtype), grad_TD.astype(dtype), weights_TK.reshape(-1)

    def step(expert: tuple[jax.Array, ...], chosen: jax.Array, is_own: jax.Array) -> tuple[PyTree, PyTree]:
        up, down, *biases = expert
        x_BD, grad_BD = narrow[chosen // num_choices], grad[chosen // num_choices]
        weight_B1 = jnp.where(is_own, weights[chosen], 0)[:, None]
        pre_BH = gate.into(x_BD, up, *biases[:1])
        inner_BF, pull = jax.vjp(functools.partial(gated, gate=gate), pre_BH)
        back_BF = gate.back(grad_BD, down, wide)
        grad_weight = jnp.sum(inner_BF.astype(wide) * back_BF, axis=-1)
        grad_weight += sum(jnp.sum((grad_BD * bias).astype(wide), axis=-1) for bias in biases[1:])
        (pre_BH,) = pull((back_BF * weight_B1).astype(dtype))
        weighted_BD = (grad_BD * weight_B1).astype(dtype)
        grads = gate.outer(pre_BH, x_BD, wide), gate.outer(weighted_BD, inner_BF, wide)
        of_biases = (jnp.sum(x, 0, dtype=wide) for x in (pre_BH, weighted_BD)[: len(biases)])
        return (gate.back(pre_BH, up), grad_weight), (*grads, *of_biases)

    rows = jnp.zeros(x_TD.shape[1:], dtype), jnp.zeros((), wide)
    sums = tuple(jnp.zeros_like(x[0]) for x in matrices)
    (grad_x, grad_weights), of_matrices = run_blocks(slots, tuple(matrices), (rows, sums), step)
    grad_x = jnp.sum(slots.read(grad_x), axis=1, dtype=wide)
    return grad_x.astype(x_TD.dtype), slots.read(grad_weights).astype(weights_TK.dtype), *of_matrices
