"""Tokens to the devices that have their experts, and back: where experts are split over axes of the batch.

Each device sends a token once to each device that has any of its experts, however many of them are there; what comes is
at most every token of every device, so none is dropped, whatever the router chooses, and shapes are fixed. Only what is
needed goes over the wire, by one ragged all-to-all each way. On CPUs, which have none, an all-to-all of whole parts
stands for it; as with the ragged one, rows that nobody writes hold anything: NaN, so that tests see who reads them.

Shapes: T tokens of a device, K experts of each token, n devices that exchange tokens, D any width, C = T min(K, n).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_shard._common.dtypes import widened
from torch_shard._lowering.rows import RowSplit

RAGGED = ("tpu", "cuda", "rocm", "gpu")
"""Platforms that have a ragged all-to-all."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a mixture of experts, on all devices together.

    Attributes:
        num_tokens: How many there are.
        num_choices: Experts of each.
        width: Of a token, in bytes.
        num_experts: How many there are.
        num_bytes: Of all their matrices and biases.
    """

    num_tokens: int
    num_choices: int
    width: int
    num_experts: int
    num_bytes: int

    @staticmethod
    def of(ids_TK: Any, matrices: Sequence[Any]) -> "Sizes":
        """Of the chosen experts, and of the matrices and biases of a model: arrays or tensors."""
        up, down, *_ = matrices
        width = next(size for size in up.shape[1:] if size in down.shape[1:])  # (E, H, D) and (E, D, F), or transposed
        num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in matrices)
        num_tokens, num_choices = ids_TK.shape
        return Sizes(num_tokens, num_choices, width * up.dtype.itemsize, len(up), num_bytes)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Over which axes of a mesh experts are split, within a function that is mapped over it.

    Attributes:
        axes: Of the first dim of the experts' matrices, in the order of its spec, with their sizes.
        via: Those over which tokens are split too, so that these move.
        num_shards: Into how many parts the tokens are split.
        is_ragged: Whether the devices have a ragged all-to-all.
    """

    axes: dict[str, int]
    via: tuple[str, ...]
    num_shards: int
    is_ragged: bool

    @property
    def num_parts(self) -> int:
        """Number of parts of the experts."""
        return math.prod(self.axes.values())

    @property
    def num_peers(self) -> int:
        """Number of devices that exchange tokens."""
        return math.prod(self.axes[axis] for axis in self.via)

    def bytes_of_tokens(self, sizes: Sizes) -> float:
        """What a device receives, forward and backward, if tokens are sent to experts that are equally likely."""
        share = 1 / self.num_peers
        num_peers = self.num_peers * (1 - (1 - share) ** sizes.num_choices)  # that have an expert of a token
        times = 2 + 3  # there and back; then the token and its gradient there, and a gradient back
        return times * sizes.num_tokens / self.num_shards * num_peers * (1 - share) * sizes.width

    def bytes_of_experts(self, sizes: Sizes) -> float:
        """The same if experts are gathered instead, forward and backward, and their gradients scattered."""
        beside = self.num_parts // self.num_peers
        return 3 * sizes.num_bytes / beside * (1 - 1 / self.num_peers)

    def room_of_tokens(self, sizes: Sizes) -> float:
        """The bytes that a device has to keep free for tokens: for all of all peers, if they choose its experts."""
        num_tokens = sizes.num_tokens / self.num_shards * self.num_peers
        return num_tokens * (sizes.num_choices + 2) * sizes.width  # as they come, as results, and one for each choice

    def moves_tokens(self, sizes: Sizes) -> bool:
        """Whether tokens are sent, and experts not gathered: it must be less over the wire, and less to hold."""
        experts = sizes.num_bytes * self.num_peers / self.num_parts
        return self.bytes_of_tokens(sizes) < self.bytes_of_experts(sizes) and self.room_of_tokens(sizes) <= experts

    def peers(self, ids_TK: jax.Array, num_here: int) -> jax.Array:
        """To which device along `via` each slot goes; `num_peers` where another device of this place has the expert."""
        part, peer, is_mine = ids_TK // num_here, jnp.zeros_like(ids_TK), ids_TK >= 0
        places = dict[str, jax.Array]()
        for axis, size in reversed(self.axes.items()):
            places[axis], part = part % size, part // size
        for axis in self.via:
            peer = peer * self.axes[axis] + places[axis]
        for axis in self.axes:
            is_mine &= (places[axis] == lax.axis_index(axis)) if axis not in self.via else True
        return jnp.where(is_mine & (part == 0), peer, self.num_peers)


@dataclasses.dataclass(frozen=True)
class Route:
    """Which token goes where.

    Attributes:
        exchange: Over which axes.
        token: Of each row to be sent, its token, (C,); those of no use last.
        row: Of each slot, its row among these, (T, K).
        is_first: Whether no earlier slot of the token has the same row.
        sent: Number of rows to each device, (n,).
        received: From each, (n,).
    """

    exchange: Exchange
    token: jax.Array
    row: jax.Array
    is_first: jax.Array
    sent: jax.Array
    received: jax.Array

    @property
    def is_written(self) -> jax.Array:
        """Of each row that `send` gives, (n T,), whether it was sent."""
        num_tokens = len(self.row)
        return (jnp.arange(num_tokens) < self.received[:, None]).reshape(-1)

    def send(self, values: jax.Array) -> jax.Array:
        """Rows of tokens, (T, ...), to where their experts are: (n T, ...), those of the i-th device from i T on.

        Rows that nobody sent are zero: whoever multiplies them by zero must not find NaN.
        """
        num_tokens, peers = len(values), self.exchange.num_peers
        at = jnp.full(peers, lax.axis_index(self.exchange.via) * num_tokens, jnp.int32)
        starts, out = _starts(self.sent), _unwritten((peers * num_tokens, *values.shape[1:]), values.dtype)
        found = self._exchanged(values[self.token], out, starts, self.sent, at, self.received, num_tokens)
        is_written = self.is_written.reshape(-1, *(1 for _ in values.shape[1:]))
        return jnp.where(is_written, found, jnp.zeros_like(found))

    def back(self, values: jax.Array) -> jax.Array:
        """What the experts made of the rows, (n T, ...), to their tokens, summed over the devices: (T, ...)."""
        num_tokens, peers = len(self.row), self.exchange.num_peers
        starts = lax.all_to_all(_starts(self.sent), self.exchange.via, 0, 0, tiled=True)
        out = _unwritten((len(self.token), *values.shape[1:]), values.dtype)
        places = jnp.arange(peers, dtype=jnp.int32) * num_tokens
        found = self._exchanged(values, out, places, self.received, starts, self.sent, num_tokens)
        rows = jnp.where(self.is_first, self.row, 0)
        mask = self.is_first.reshape(*rows.shape, *(1 for _ in values.shape[1:]))
        return jnp.sum(jnp.where(mask, widened(found[rows]), 0), axis=1).astype(values.dtype)

    def _exchanged(
        self,
        values: jax.Array,
        out: jax.Array,
        starts: jax.Array,
        sent: jax.Array,
        places: jax.Array,
        received: jax.Array,
        most: int,
    ) -> jax.Array:
        """`jax.lax.ragged_all_to_all`, of at most so many rows to each."""
        via = self.exchange.via
        if self.exchange.is_ragged:
            return lax.ragged_all_to_all(values, out, starts, sent, places, received, axis_name=via)
        rows = jnp.arange(most)
        parts = jnp.where(
            (rows < sent[:, None]).reshape(len(sent), most, *(1 for _ in values.shape[1:])),
            values[jnp.clip(starts[:, None] + rows, 0, len(values) - 1)],
            _unwritten((), values.dtype),
        )
        parts = lax.all_to_all(parts, via, 0, 0, tiled=True)
        at = lax.all_to_all(places, via, 0, 0, tiled=True)[:, None] + rows
        at = jnp.where(rows < received[:, None], at, len(out))  # beyond the end: dropped
        return out.at[at].set(parts, mode="drop")


def find_exchange(split: RowSplit, rows: tuple[str, ...], sizes: Sizes) -> Exchange | None:
    """How tokens could come to experts that the plan has over axes of the batch; None if it has not."""
    axes = {axis: split.mesh.shape[axis] for axis in split.experts}
    via = tuple(axis for axis in rows if axes.get(axis, 1) > 1)
    exchange = Exchange(axes, via, split.size_of(rows), is_ragged=split.platform in RAGGED)
    return exchange if via and sizes.num_experts % exchange.num_parts == 0 else None


def find_route(exchange: Exchange, ids_TK: jax.Array, num_here: int) -> Route:
    """The way of each token."""
    num_peers, (num_tokens, num_choices) = exchange.num_peers, ids_TK.shape
    peer = exchange.peers(ids_TK.astype(jnp.int32), num_here)
    earlier = jnp.tril(jnp.ones((num_choices, num_choices), bool), -1)
    is_first = ~jnp.any((peer[:, :, None] == peer[:, None, :]) & earlier, -1) & (peer < num_peers)
    order = jnp.argsort(jnp.where(is_first, peer, num_peers).reshape(-1), stable=True).astype(jnp.int32)
    row = jnp.argsort(order).astype(jnp.int32).reshape(ids_TK.shape)
    sent = jnp.sum((peer[..., None] == jnp.arange(num_peers)) & is_first[..., None], (0, 1), dtype=jnp.int32)
    received = lax.all_to_all(sent, exchange.via, 0, 0, tiled=True)
    token = order[: num_tokens * min(num_choices, num_peers)] // num_choices
    return Route(exchange, token, row, is_first, sent, received)


def _starts(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts) - counts


def _unwritten(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    is_number = jnp.issubdtype(dtype, jnp.floating)
    return jnp.full(shape, jnp.nan if is_number else jnp.iinfo(dtype).min, dtype)
