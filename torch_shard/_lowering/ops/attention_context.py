"""Attention where each device has a part of the sequence of its rows, and needs the keys of all of it.

Three ways, with the same numbers. Gather: all keys and values on each device, for its own queries; their gradients are
scattered. Heads: each device exchanges its part of all heads for the whole of some (Jacobs et al., 2023). Ring: keys
and values go from device to device, and what each pair adds is merged in float32 by logarithmic totals (Liu et al.,
2023); what is sent next does not wait for what is computed. How causal masks are balanced: `attention_balance`.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys, D width of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torch_shard._common.dtypes import dtype_of_sums
from torch_shard._lowering.ops.attention_balance import chunks_of, exchanged, pairs_of, why_unbalanced
from torch_shard._lowering.ops.attention_blocks import in_blocks, in_blocks_backward
from torch_shard._lowering.ops.attention_kernels import kernel_on_mesh
from torch_shard._lowering.ops.dropout import KeptWeights
from torch_shard._lowering.rows import RowSplit
from torch_shard._sharding import Context


class OnMesh:
    """Attention on the devices of a mesh: each has its rows of the batch, its heads, and its part of the sequence.

    Without a context the sequence is whole, as where heads are exchanged for it. What scores are about is their scale,
    their band (how many keys before its place and after it a query sees) and their soft cap.
    """

    def __init__(self, rows: RowSplit, qkv, segments, sinks, about, dropout: float, context: Context | None) -> None:
        batch_size, num_heads, num_queries, _ = qkv[0].shape
        _, num_key_heads, num_keys, _ = qkv[1].shape
        self._rows = rows
        self._about = about
        self._dropout = dropout
        self._shape = (batch_size, num_heads, num_queries, num_keys)
        self._axis = context.axis if context else ""
        self._mode = str(context.mode) if context else "heads"
        self._of_context = (context.axis,) if context else ()
        self._num = rows.size_of(self._of_context)

        # Over which axes rows and heads are split, where they divide.
        self._batch = () if batch_size % rows.num_shards else rows.axes
        feature_axes = rows.other_axes
        self._heads = () if num_heads % rows.size_of(feature_axes) else feature_axes
        num_shards = rows.size_of(self._heads)
        self._times = num_shards // math.gcd(num_key_heads, num_shards)
        self._split = PartitionSpec(self._batch, self._heads, *self._of_context)

        if self._mode == "heads":
            num_parts = num_shards * self._num
            if num_heads % num_parts or num_key_heads * self._times % num_parts:
                # Not in a step: a capture refuses it.
                self._mode = "gather"

        # In a ring, blocks of queries and of keys align only if there are as many.
        is_uneven = self._mode == "ring" and num_queries != num_keys and about["band"] != (None, None)
        kernel = None
        if not dropout and not is_uneven:
            more = {"num_heads": num_heads // num_shards, "sinks": sinks}
            kernel = kernel_on_mesh(rows, self._mode, self._of_context, qkv, segments, **about, **more)
        self._kernel, self._extra, self._extra_specs = kernel or (None, (), ())
        self.has_kernel = kernel is not None

        lengths = (num_queries, num_keys)
        why = why_unbalanced(self._mode, lengths, about["band"], self._num, has_kernel=self.has_kernel)
        self._num_chunks = 1 if why else 2

    def forward(self, q, k, v, segments, sinks, seed):
        """The output, and the logarithm of each row's total weight."""
        run = {"gather": self._gather, "heads": self._exchange, "ring": self._ring}[self._mode]
        mapped = self._mapped(run, (self._split,) * 3, (self._split, self._split))
        tensors = (q, self._spread(k), self._spread(v))
        return mapped(tensors, tuple(segments), tuple(sinks), tuple(seed), self._extra)

    def backward(self, grad, saved, segments, sinks, seed):
        """Gradients of q, k and v, and of the sinks if there are any."""
        q, k, v, out, log_total = saved
        run = {"gather": self._gather_back, "heads": self._exchange_back, "ring": self._ring_back}[self._mode]
        out_specs = (*(self._split,) * 3, (PartitionSpec(self._of_sinks()),) * len(sinks))
        mapped = self._mapped(run, (self._split,) * 6, out_specs)
        tensors = (grad, q, self._spread(k), self._spread(v), out, log_total)
        grads = mapped(tensors, tuple(segments), tuple(sinks), tuple(seed), self._extra)
        grad_q, grad_k, grad_v, grads_sinks = grads
        return grad_q, self._joined_heads(grad_k, k), self._joined_heads(grad_v, v), *grads_sinks

    def _mapped(self, fn, splits, out_specs):
        # A device needs the segments of the tokens that it computes with: of its part, or of the whole sequence.
        whole = PartitionSpec(self._batch)
        part = PartitionSpec(self._batch, *self._of_context)
        segment_specs = {"gather": (part, whole), "heads": (whole, whole), "ring": (part, part)}[self._mode]

        def run(tensors, segments, sinks, seed, extra):
            specs = (
                splits,
                segment_specs[: len(segments)],
                (PartitionSpec(self._of_sinks()),) * len(sinks),
                (PartitionSpec(),) * len(seed),
                self._extra_specs,
            )
            local = fn
            if self._kernel is not None:
                # Kernels of half precision have no other.
                local = jax.default_matmul_precision("default")(fn)
            mapped = jax.shard_map(local, mesh=self._rows.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            return mapped(tensors, segments, sinks, seed, extra)

        return run

    def _spread(self, x):
        """The heads of keys, each so often that they divide over the axes."""
        return x if self._times == 1 else jnp.repeat(x, self._times, axis=1)

    @staticmethod
    def _joined_heads(grad, x):
        """A gradient of what `_spread` gives, as that of the keys themselves: summed over repeated heads."""
        return grad.reshape(*x.shape[:2], -1, *grad.shape[2:]).sum(2)

    def _of_sinks(self):
        return (*self._heads, *self._of_context) if self._mode == "heads" else self._heads

    # One device

    def _attend(self, q, k, v, segments, sinks, drawn, extra, *, start=None, dtype=None, band=None):
        if self._kernel is not None:
            kernel = self._kernel(q, k, v, segments, extra, functools.partial(self._places, q.shape[2]), band)
            return kernel.forward(q, k, v, [sink.astype(jnp.float32) for sink in sinks])
        kept = self._kept(q, k, drawn, start)
        return in_blocks(q, k, v, segments, **self._about, kept=kept, sinks=sinks, start=start, dtype=dtype)

    def _attend_back(self, grad, saved, segments, sinks, drawn, extra, *, start=None, dtype=None, band=None):
        if self._kernel is not None:
            q, k, v = saved[:3]
            kernel = self._kernel(q, k, v, segments, extra, functools.partial(self._places, q.shape[2]), band)
            return kernel.backward(grad, saved, [sink.astype(jnp.float32) for sink in sinks])
        kept = self._kept(saved[0], saved[1], drawn, start)
        return in_blocks_backward(
            grad, saved, segments, **self._about, kept=kept, sinks=sinks, start=start, dtype=dtype
        )

    def _kept(self, q, k, seed, start):
        if not self._dropout:
            return None
        # Each device draws for its part of the weights of all.
        first_row = _place(self._batch, len(q))
        first_head = _place(self._of_sinks(), k.shape[1])
        first = (first_row, first_head, *(start or (0, 0)))
        return KeptWeights(q, k, seed[0], self._dropout, of=self._shape, start=first)

    def _starts(self, device, length):
        """Where each of its chunks of this length begins, that a device computes."""
        chunks = (device,) if self._num_chunks == 1 else chunks_of(device, self._num)
        return jnp.stack([chunk * length for chunk in chunks])

    def _places(self, length):
        """Of all queries that this device computes."""
        length //= self._num_chunks
        starts = self._starts(lax.axis_index(self._axis), length)
        return (starts[:, None] + jnp.arange(length)).reshape(-1)

    def _exchanged(self, x, dim=2):
        return x if self._num_chunks == 1 else exchanged(x, self._axis, dim)

    def _sum_of_sinks(self, grads, sinks, *, over_context):
        axes = (*self._batch, *self._of_context) if over_context else self._batch
        sums = []
        for grad, sink in zip(grads, sinks, strict=True):
            total = lax.psum(grad, axes) if axes else grad
            sums.append(total.astype(sink.dtype))
        return tuple(sums)

    # Gather

    def _whole(self, x):
        return lax.all_gather(x, self._axis, axis=2, tiled=True)

    def _gather(self, tensors, segments, sinks, seed, extra):
        q, k, v = tensors
        start = (lax.axis_index(self._axis) * q.shape[2], 0)
        q = self._exchanged(q)
        segments = self._exchanged_segments(segments)
        out, log_total = self._attend(q, self._whole(k), self._whole(v), segments, sinks, seed, extra, start=start)
        # The totals are for the backward pass alone, which has the same order of chunks.
        return self._exchanged(out), log_total

    def _exchanged_segments(self, segments):
        """Those of the queries go with them; those of the keys are whole."""
        if not segments:
            return ()
        of_queries, *of_keys = segments
        return (self._exchanged(of_queries, 1), *of_keys)

    def _gather_back(self, tensors, segments, sinks, seed, extra):
        grad, q, k, v, out, log_total = tensors
        start = (lax.axis_index(self._axis) * q.shape[2], 0)
        q = self._exchanged(q)
        segments = self._exchanged_segments(segments)
        grad = self._exchanged(grad)
        saved = (q, self._whole(k), self._whole(v), self._exchanged(out), log_total)
        grads = self._attend_back(grad, saved, segments, sinks, seed, extra, start=start)
        grad_q, grad_k, grad_v, *grads_sinks = grads

        def scattered(grad, x):
            return lax.psum_scatter(grad.astype(x.dtype), self._axis, scatter_dimension=2, tiled=True)

        of_sinks = self._sum_of_sinks(grads_sinks, sinks, over_context=True)
        return self._exchanged(grad_q), scattered(grad_k, k), scattered(grad_v, v), of_sinks

    # Heads

    def _to_heads(self, x):
        return lax.all_to_all(x, self._axis, 1, 2, tiled=True) if self._axis else x

    def _to_sequence(self, x):
        return lax.all_to_all(x, self._axis, 2, 1, tiled=True) if self._axis else x

    def _exchange(self, tensors, segments, sinks, seed, extra):
        q, k, v = map(self._to_heads, tensors)
        out, log_total = self._attend(q, k, v, segments, sinks, seed, extra)
        return self._to_sequence(out), self._to_sequence(log_total)

    def _exchange_back(self, tensors, segments, sinks, seed, extra):
        grad, *saved = map(self._to_heads, tensors)
        grads = self._attend_back(grad, tuple(saved), segments, sinks, seed, extra)
        grads_sinks = grads[3:]

        # Of q, k and v, which are the first that were saved.
        grads_inputs = []
        for grad_input, x in zip(grads[:3], saved[:3], strict=True):
            grads_inputs.append(self._to_sequence(grad_input.astype(x.dtype)))
        return *grads_inputs, self._sum_of_sinks(grads_sinks, sinks, over_context=False)

    # Ring

    def _next(self, x):
        pairs = [(device, (device + 1) % self._num) for device in range(self._num)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self._axis, pairs), x)

    def _rounds(self, step, q, k):
        """Which chunks of queries see which of keys after so many steps, if these are their own, and how they do."""
        device = lax.axis_index(self._axis)
        pairs = [(0, 0)] if self._num_chunks == 1 else pairs_of(step, device, self._num)
        query_starts = self._starts(device, q.shape[3])
        key_starts = self._starts((device - step) % self._num, k.shape[3])
        for queries, keys in pairs:
            # Only in the first round, and on the diagonal, does the band hide keys: other pairs see each other whole.
            is_own = not step and isinstance(queries, int)
            about = {
                "start": (query_starts[queries], key_starts[keys]),
                "dtype": dtype_of_sums(q.dtype),
                "band": self._about["band"] if is_own else (None, None),
            }
            yield queries, keys, is_own, about

    def _in_turn(self, *values):
        """Values that wait for each other, so that the scores of one pair at a time are held; a kernel holds none."""
        return values if self._kernel is not None else lax.optimization_barrier(values)

    def _chunked(self, *arrays, dim=2):
        """Those that this device computes, (chunks, ...)."""
        chunks = []
        for array in arrays:
            chunks.append(jnp.stack(jnp.split(self._exchanged(array, dim), self._num_chunks, dim)))
        return tuple(chunks)

    def _joined(self, x):
        return self._exchanged(jnp.concatenate(tuple(x), 2))

    def _ring(self, tensors, segments, sinks, seed, extra):
        q, k, v = self._chunked(*tensors)
        segments = self._chunked(*segments, dim=1)
        dtype = dtype_of_sums(q.dtype)
        outs = jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype)
        totals = jnp.full(q.shape[:-1], jnp.finfo(dtype).min, dtype)
        if sinks:
            totals = jnp.maximum(totals, sinks[0].astype(dtype)[:, None])

        arriving = (k, v, segments[1:])
        for step in range(self._num):
            # Sent on before it is computed with, so that neither waits for the other.
            present = arriving
            if step + 1 < self._num:
                arriving = self._next(present)

            for queries, keys, _, about in self._rounds(step, q, present[0]):
                k_part, v_part, key_segments = jax.tree.map(lambda x, keys=keys: x[keys], present)
                pair_segments = (*(x[queries] for x in segments[:1]), *key_segments)
                q_part, outs, totals = self._in_turn(q[queries], outs, totals)
                out, total = self._attend(q_part, k_part, v_part, pair_segments, (), seed, extra, **about)
                out, total = _merged(outs[queries], totals[queries], out, total)
                outs = outs.at[queries].set(out)
                totals = totals.at[queries].set(total)
        return self._joined(outs.astype(tensors[0].dtype)), self._joined(totals)

    def _ring_back(self, tensors, segments, sinks, seed, extra):
        grad, q, k, v, *results = self._chunked(*tensors)
        segments = self._chunked(*segments, dim=1)
        dtype = dtype_of_sums(q.dtype)
        grad_q = jnp.zeros(q.shape, dtype)
        grads_sinks = [jnp.zeros(sink.shape, dtype) for sink in sinks]

        # The gradients of keys and values go round with them, and are at home again after the last round.
        sums = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
        arriving = (k, v, segments[1:])
        for step in range(self._num):
            present = arriving
            if step + 1 < self._num:
                arriving = self._next(present)

            for queries, keys, is_own, about in self._rounds(step, q, present[0]):
                k_part, v_part, key_segments = jax.tree.map(lambda x, keys=keys: x[keys], present)
                pair_segments = (*(x[queries] for x in segments[:1]), *key_segments)
                saved = (q[queries], k_part, v_part, *(x[queries] for x in results))
                grad_q, sums, saved = self._in_turn(grad_q, sums, saved)

                # The sinks are among the scores of each query once.
                pair_sinks = sinks if is_own else ()
                grads = self._attend_back(grad[queries], saved, pair_segments, pair_sinks, seed, extra, **about)
                of_q, of_k, of_v, *of_sinks = grads
                grad_q = grad_q.at[queries].add(of_q)
                sums = (sums[0].at[keys].add(of_k), sums[1].at[keys].add(of_v))
                if pair_sinks:
                    grads_sinks = [total + part for total, part in zip(grads_sinks, of_sinks, strict=True)]
            sums = self._next(sums)

        grads_inputs = []
        for total, x in zip((grad_q, *sums), tensors[1:4], strict=True):
            grads_inputs.append(self._joined(total.astype(x.dtype)))
        return *grads_inputs, self._sum_of_sinks(grads_sinks, sinks, over_context=True)


def _place(axes, length):
    return lax.axis_index(axes) * length if axes else 0


def _merged(out, total, more, more_total):
    """Two parts of a mean as one: by their weights, of which the highest is taken out first."""
    highest = jnp.maximum(total, more_total)
    weight = jnp.exp(total - highest)
    more_weight = jnp.exp(more_total - highest)
    both = weight + more_weight
    mean = (out * weight[..., None] + more * more_weight[..., None]) / both[..., None]
    return mean, highest + jnp.log(both)


def on_mesh(qkv, segments, sinks, about, dropout: float, rows: RowSplit | None) -> OnMesh | None:
    """Attention of such arrays by hand on the devices of the step; None where it is the compiler's.

    That is where neither a plan splits the sequence, and evenly, nor there is a kernel.
    """
    if rows is None:
        return None
    q, k, _ = qkv
    context = rows.context
    if context is not None:
        size = rows.mesh.shape[context.axis]
        if size == 1 or q.shape[2] % size or k.shape[2] % size:
            context = None

    attention = OnMesh(rows, qkv, segments, sinks, about, dropout, context)
    if context is None and not attention.has_kernel:
        return None
    return attention
