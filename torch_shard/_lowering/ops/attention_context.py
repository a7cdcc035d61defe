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
        shape, (_, num_key_heads, num_keys, _) = qkv[0].shape, qkv[1].shape
        self._rows, self._about, self._dropout, self._of = rows, about, dropout, (*shape[:3], num_keys)
        self._axis, self._mode = (context.axis, str(context.mode)) if context else ("", "heads")
        self._of_context = (context.axis,) if context else ()
        self._num = rows.size_of(self._of_context)
        self._batch = () if shape[0] % rows.num_shards else rows.axes
        others = rows.other_axes
        self._heads = () if shape[1] % rows.size_of(others) else others
        size = rows.size_of(self._heads)
        self._times = size // math.gcd(num_key_heads, size)
        if self._mode == "heads" and (
            shape[1] % (size * self._num) or num_key_heads * self._times % (size * self._num)
        ):
            self._mode = "gather"  # not in a step: a capture refuses it
        self._split = PartitionSpec(self._batch, self._heads, *self._of_context)
        found, num_heads = None, shape[1] // size
        uneven = self._mode == "ring" and shape[2] != num_keys and about["band"] != (None, None)  # blocks do not align
        if not dropout and not uneven:
            more = {"num_heads": num_heads, "sinks": sinks}
            found = kernel_on_mesh(rows, self._mode, self._of_context, qkv, segments, **about, **more)
        self._kernel, self._extra, self._extra_specs = found or (None, (), ())
        self.has_kernel = found is not None
        lengths = shape[2], num_keys
        why = why_unbalanced(self._mode, lengths, about["band"], self._num, has_kernel=self.has_kernel)
        self._num_chunks = 1 if why else 2

    def forward(self, q, k, v, segments, sinks, seed):
        """The output, and the logarithm of each row's total weight."""
        run = {"gather": self._gather, "heads": self._exchange, "ring": self._ring}[self._mode]
        return self._mapped(run, (self._split,) * 3, (self._split, self._split))(
            (q, self._spread(k), self._spread(v)), tuple(segments), tuple(sinks), tuple(seed), self._extra
        )

    def backward(self, grad, saved, segments, sinks, seed):
        """Gradients of q, k and v, and of the sinks if there are any."""
        q, k, v, out, log_total = saved
        run = {"gather": self._gather_back, "heads": self._exchange_back, "ring": self._ring_back}[self._mode]
        out_specs = (*(self._split,) * 3, (PartitionSpec(self._of_sinks()),) * len(sinks))
        mapped = self._mapped(run, (self._split,) * 6, out_specs)
        given = (grad, q, self._spread(k), self._spread(v), out, log_total)
        of_q, *others, of_sinks = mapped(given, tuple(segments), tuple(sinks), tuple(seed), self._extra)
        of_k, of_v = (x.reshape(*k.shape[:2], -1, *x.shape[2:]).sum(2) for x in others)
        return of_q, of_k, of_v, *of_sinks

    def _mapped(self, fn, splits, out_specs):
        of_rows = PartitionSpec(self._batch)
        whole = self._mode == "heads"
        of_segments = (of_rows, of_rows) if whole else (PartitionSpec(self._batch, *self._of_context),) * 2
        of_segments = (of_segments[0], of_rows) if self._mode == "gather" else of_segments

        def run(tensors, segments, sinks, seed, extra):
            specs = (
                splits,
                of_segments[: len(segments)],
                (PartitionSpec(self._of_sinks()),) * len(sinks),
                (PartitionSpec(),) * len(seed),
                self._extra_specs,
            )
            local = fn
            if self._kernel is not None:
                local = jax.default_matmul_precision("default")(fn)  # kernels of half precision have no other
            mapped = jax.shard_map(local, mesh=self._rows.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            return mapped(tensors, segments, sinks, seed, extra)

        return run

    def _spread(self, x):
        """The heads of keys, each so often that they divide over the axes."""
        return x if self._times == 1 else jnp.repeat(x, self._times, axis=1)

    def _of_sinks(self):
        return (*self._heads, *self._of_context) if self._mode == "heads" else self._heads

    # One device

    def _attend(self, q, k, v, segments, sinks, drawn, extra, *, start=None, dtype=None, band=None):
        if self._kernel is not None:
            kernel = self._kernel(q, k, v, segments, extra, functools.partial(self._places, q.shape[2]), band)
            return kernel.forward(q, k, v, [sink.astype(jnp.float32) for sink in sinks])
        return in_blocks(
            q, k, v, segments, **self._about, kept=self._kept(q, k, drawn, start), sinks=sinks, start=start, dtype=dtype
        )

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
        axes = self._of_sinks()
        first = (_place(self._batch, len(q)), _place(axes, k.shape[1]), *(start or (0, 0)))
        return KeptWeights(q, k, seed[0], self._dropout, of=self._of, start=first)

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
        axes = (*self._batch, *(self._of_context if over_context else ()))
        return tuple((lax.psum(g, axes) if axes else g).astype(s.dtype) for g, s in zip(grads, sinks, strict=True))

    # Gather

    def _whole(self, x):
        return lax.all_gather(x, self._axis, axis=2, tiled=True)

    def _gather(self, tensors, segments, sinks, seed, extra):
        q, k, v = tensors
        (q, segments), start = self._own(q, segments), (lax.axis_index(self._axis) * q.shape[2], 0)
        out, log_total = self._attend(q, self._whole(k), self._whole(v), segments, sinks, seed, extra, start=start)
        return self._exchanged(out), log_total  # for the backward pass alone, which has the same order

    def _own(self, q, segments):
        return self._exchanged(q), (*(self._exchanged(x, 1) for x in segments[:1]), *segments[1:])

    def _gather_back(self, tensors, segments, sinks, seed, extra):
        grad, q, k, v, out, log_total = tensors
        (q, segments), start = self._own(q, segments), (lax.axis_index(self._axis) * q.shape[2], 0)
        grad, saved = self._exchanged(grad), (q, self._whole(k), self._whole(v), self._exchanged(out), log_total)
        of_q, of_k, of_v, *of_sinks = self._attend_back(grad, saved, segments, sinks, seed, extra, start=start)
        of_k, of_v = (
            lax.psum_scatter(g.astype(x.dtype), self._axis, scatter_dimension=2, tiled=True)
            for g, x in ((of_k, k), (of_v, v))
        )
        return self._exchanged(of_q), of_k, of_v, self._sum_of_sinks(of_sinks, sinks, over_context=True)

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
        grad, *saved = tensors
        grad, saved = self._to_heads(grad), tuple(map(self._to_heads, saved))
        of_q, of_k, of_v, *of_sinks = self._attend_back(grad, saved, segments, sinks, seed, extra)
        of_q, of_k, of_v = (
            self._to_sequence(g.astype(x.dtype)) for g, x in zip((of_q, of_k, of_v), saved, strict=False)
        )
        return of_q, of_k, of_v, self._sum_of_sinks(of_sinks, sinks, over_context=False)

    # Ring

    def _next(self, x):
        pairs = [(device, (device + 1) % self._num) for device in range(self._num)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self._axis, pairs), x)

    def _rounds(self, step, q, k):
        """Which chunks of queries see which of keys after so many steps, if these are their own, and how they do."""
        device, band = lax.axis_index(self._axis), self._about["band"]
        pairs = [(0, 0)] if self._num_chunks == 1 else pairs_of(step, device, self._num)
        of_queries = self._starts(device, q.shape[3])
        of_keys = self._starts((device - step) % self._num, k.shape[3])
        for queries, keys in pairs:
            is_own = not step and isinstance(queries, int)
            about = {"start": (of_queries[queries], of_keys[keys]), "dtype": dtype_of_sums(q.dtype)}
            yield queries, keys, is_own, about | {"band": band if is_own else (None, None)}

    def _in_turn(self, *values):
        """Values that wait for each other, so that the scores of one pair at a time are held; a kernel holds none."""
        return values if self._kernel is not None else lax.optimization_barrier(values)

    def _chunked(self, *arrays, dim=2):
        """Those that this device computes, (chunks, ...)."""
        own = (self._exchanged(x, dim) for x in arrays)
        return tuple(jnp.stack(jnp.split(x, self._num_chunks, dim)) for x in own)

    def _joined(self, x):
        return self._exchanged(jnp.concatenate(tuple(x), 2))

    def _ring(self, tensors, segments, sinks, seed, extra):
        (q, k, v), segments = self._chunked(*tensors), self._chunked(*segments, dim=1)
        dtype = dtype_of_sums(q.dtype)
        totals = jnp.full(q.shape[:-1], jnp.finfo(dtype).min, dtype)
        totals = jnp.maximum(totals, sinks[0].astype(dtype)[:, None]) if sinks else totals
        outs, held = jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype), (k, v, segments[1:])
        for step in range(self._num):
            here = held
            held = self._next(held) if step + 1 < self._num else held
            for at, of, _, about in self._rounds(step, q, here[0]):
                k, v, of_keys = jax.tree.map(lambda x, of=of: x[of], here)
                own = (*(x[at] for x in segments[:1]), *of_keys)
                own_q, outs, totals = self._in_turn(q[at], outs, totals)
                more = self._attend(own_q, k, v, own, (), seed, extra, **about)
                out, total = _merged(outs[at], totals[at], *more)
                outs, totals = outs.at[at].set(out), totals.at[at].set(total)
        return self._joined(outs.astype(tensors[0].dtype)), self._joined(totals)

    def _ring_back(self, tensors, segments, sinks, seed, extra):
        (grad, q, k, v, *results), segments = self._chunked(*tensors), self._chunked(*segments, dim=1)
        dtype = dtype_of_sums(q.dtype)
        held, sums = (k, v, segments[1:]), (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
        of_q, of_sinks = jnp.zeros(q.shape, dtype), [jnp.zeros(sink.shape, dtype) for sink in sinks]
        for step in range(self._num):
            here = held
            held = self._next(held) if step + 1 < self._num else held
            for at, of, is_own, about in self._rounds(step, q, here[0]):
                k, v, of_keys = jax.tree.map(lambda x, of=of: x[of], here)
                saved, own = (q[at], k, v, *(x[at] for x in results)), (*(x[at] for x in segments[:1]), *of_keys)
                of_q, sums, saved = self._in_turn(of_q, sums, saved)
                of_own = sinks if is_own else ()  # once for each query
                more, *parts = self._attend_back(grad[at], saved, own, of_own, seed, extra, **about)
                of_q = of_q.at[at].add(more)
                sums = tuple(old.at[of].add(new) for old, new in zip(sums, parts[:2], strict=True))
                of_sinks = [old + new for old, new in zip(of_sinks, parts[2:], strict=True)] if of_own else of_sinks
            sums = self._next(sums)
        found = (self._joined(g.astype(x.dtype)) for g, x in zip((of_q, *sums), tensors[1:4], strict=True))
        return *found, self._sum_of_sinks(of_sinks, sinks, over_context=True)


def _place(axes, length):
    return lax.axis_index(axes) * length if axes else 0


def _merged(out, total, more, more_total):
    """Two parts of a mean as one: by their weights, of which the highest is taken out first."""
    highest = jnp.maximum(total, more_total)
    mine, others = jnp.exp(total - highest), jnp.exp(more_total - highest)
    both = mine + others
    return (out * mine[..., None] + more * others[..., None]) / both[..., None], highest + jnp.log(both)


def on_mesh(qkv, segments, sinks, about, dropout: float, rows: RowSplit | None) -> OnMesh | None:
    """Attention of such arrays by hand on the devices of the step; None where it is the compiler's.

    That is where neither a plan splits the sequence, and evenly, nor there is a kernel.
    """
    if rows is None:
        return None
    context, (q, k, _) = rows.context, qkv
    size = 1 if context is None else rows.mesh.shape[context.axis]
    context = None if size == 1 or q.shape[2] % size or k.shape[2] % size else context
    found = OnMesh(rows, qkv, segments, sinks, about, dropout, context)
    return found if context is not None or found.has_kernel else None
