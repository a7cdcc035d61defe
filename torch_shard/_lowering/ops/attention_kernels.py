"""Attention by the kernels of JAX: splash attention on TPU, cuDNN's on GPU, each on its own rows and heads.

A kernel works on one device, so that rows and heads are split over the mesh by hand: rows as the batch is, heads over
all other axes, if they divide. Kernels multiply in half precision, so that float32 stays with the blocks.

A band is how many keys before its own place and after it a query sees; None for all. A cap is a soft cap of the scores,
0 for none; sinks are none, or one array with a number for each head, which is among the scores of each of its queries.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys, D width of a head.
Sources: jax.experimental.pallas.ops.tpu.splash_attention, jax.nn.dot_product_attention.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.types import PyTree
from torch_shard._lowering.ops.attention_balance import balanced_order, why_unbalanced
from torch_shard._lowering.ops.attention_blocks import LONG

_NOBODYS = -3  # no query has this number

LANES, LARGEST = 128, 512
"""Splash attention takes blocks of a multiple of so many queries and keys, and of no more."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for arrays of some shapes, on one device.

    JAX's derivative of it reads what it was given, what it gave, and a number for each row. They are saved as other
    values are, and the derivative is made of them again: the kernel does not run a second time.

    Attributes:
        run: `(others, q, k, v, *sinks) -> out`, as the kernel takes them and gives it; differentiable.
        others: All other arrays that it reads.
        prepare: `(q_BNTD, k_BKSD, v_BKSD) -> (q, k, v)` as it takes them; linear.
        finish: `out -> out_BNTD`: elements of what it gives, each once, or zeros; linear.
    """

    run: Callable[..., jax.Array]
    others: PyTree
    prepare: Callable[..., tuple[jax.Array, ...]]
    finish: Callable[[jax.Array], jax.Array]

    def forward(self, q, k, v, sinks=()):
        """The output, and for each row the number from which the backward pass has its weights again, float32 BNT."""
        out, own, *_ = self._derivative((*self.prepare(q, k, v), *sinks), self.others)
        log_total = own[0] if _is_by_row(own, q) else jnp.zeros(q.shape[:3], jnp.float32)
        return self.finish(out), log_total[:, :, : q.shape[2]]

    def backward(self, grad, saved, sinks=()):
        """Gradients of q, k, v and each sink, of `saved = (q, k, v, out, log_total)`."""
        *qkv, out, log_total = saved
        prepared, unprepare = jax.vjp(self.prepare, *qkv)
        given, about = (*prepared, *sinks), []

        def shapes(*arrays):
            out, own, *rest = self._derivative(*arrays)
            about.extend(rest)
            return out, own

        whole, own = jax.eval_shape(shapes, given, self.others)
        unfinish = jax.linear_transpose(self.finish, whole)
        if _is_by_row(own, qkv[0]):
            padding = [(0, 0), (0, 0), (0, own[0].shape[2] - log_total.shape[2])]
            rows = jnp.pad(log_total, padding, constant_values=jnp.inf)  # no weights
            (tree, places), known = about, [*jax.tree.leaves((given, self.others, unfinish(out))), rows]
            pull = jax.tree.unflatten(tree, [known[at] if isinstance(at, int) else at for at in places])
        else:  # it keeps something else for itself
            pull = jax.vjp(functools.partial(self.run, self.others), *given)[1]
        found = pull(*unfinish(grad))
        return *unprepare(found[:3]), *found[3:]

    def _derivative(self, given, others):
        """The output; what the derivative keeps of its own; its structure; and of each leaf which value it is.

        Values are numbered as `(given, others, output)` are, and by -1 if they are its own; empty ones are themselves.
        """
        out, pull = jax.vjp(functools.partial(self.run, others), *given)
        leaves, tree = jax.tree.flatten(pull)
        known = {id(value): number for number, value in enumerate(jax.tree.leaves((given, others, out)))}
        own = [leaf for leaf in leaves if id(leaf) not in known and leaf.size]
        places = [known.get(id(x), -1 if x.size else np.zeros(x.shape, x.dtype)) for x in leaves]
        return out, own, tree, places


def _is_by_row(own, q):
    """Tell whether a derivative keeps one thing of its own, a number for each row of queries."""
    return len(own) == 1 and own[0].dtype == jnp.float32 and own[0].ndim == 3 and own[0].shape[:2] == q.shape[:2]


def splash(q, k, v, segments, *, scale, band, cap=0, interpret=False):
    """Splash attention for `(q_BNTD, k_BKSD, v_BKSD, [of queries_BT, of keys_BS] or [])`."""
    length, num_keys, sees_any = q.shape[2], k.shape[2], None
    if segments:
        sees_any = _sees_any(segments, band)
    elif num_keys % LANES and (band[1] is None or length + band[1] > num_keys):  # else nobody sees what is padded
        segments = tuple(jnp.ones((len(x), x.shape[2]), jnp.int32) for x in (q, k))
    segments = tuple(_padded(x, 1, value) for x, value in zip(segments, (0, _NOBODYS), strict=False))
    size = tuple(-(-n // LANES) * LANES for n in (length, num_keys))
    kernel = _splash_kernel(size, q.shape[1], band, cap, interpret=interpret)

    def scaled(q, k, v):
        return q * scale, k, v

    def finish(out):
        out = out[:, :, :length]
        return out if sees_any is None else jnp.where(sees_any[:, None, :, None], out, 0)  # the kernel takes some mean

    return Kernel(_run_splash, (kernel, segments), lambda *qkv: tuple(_padded(x, 2) for x in scaled(*qkv)), finish)


def _splash_kernel(size, num_heads, band, cap, *, num_shards=1, balanced=False, interpret=False):
    """The kernel for so many queries and keys, of which each of so many devices has a part of the queries.

    Blocks that a device's queries do not see take no time. Balanced, the parts are those of `attention_balance`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    order = balanced_order(size[0], num_shards) if balanced else None
    seen = masks.FullMask(size) if band == (None, None) else _band_mask(band, size, order)
    together = size[0] // (num_shards * (2 if balanced else 1))  # queries in order
    of_queries, of_keys = (math.gcd(length, LARGEST) for length in (together, size[1]))
    return kernels.make_splash_mha(
        masks.MultiHeadMask([seen] * num_heads),
        block_sizes=kernels.BlockSizes(
            block_q=of_queries,
            block_kv=of_keys,
            block_q_dkv=of_queries,
            block_kv_dkv=of_keys,
            block_q_dq=of_queries,
            block_kv_dq=of_keys,
        ),
        head_shards=1,
        q_seq_shards=num_shards,
        attn_logits_soft_cap=cap or None,
        interpret=interpret,
    )


def _band_mask(band, size, order=None):
    """JAX's mask of a band, which looks at no element of blocks that are seen as a whole, or not at all.

    An order is the place of each query; that of its own by default.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    made = masks.CausalMask(size) if band == (None, 0) else masks.LocalMask(size, band, 0)
    made.__class__ = _by_blocks(type(made), band)
    made.q_sequence = made.q_sequence if order is None else order
    return made


@functools.cache
def _by_blocks(cls, band):
    before, after = (math.inf if limit is None else limit for limit in band)

    class ByBlocks(cls):
        def __getitem__(self, idx):
            if any(part.start is None or part.stop is None for part in idx):
                return super().__getitem__(idx)
            rows, columns = idx
            first, last = (int(self.q_sequence[at]) for at in (rows.start, rows.stop - 1))  # of a block, in order
            latest, earliest = columns.stop - 1 - first, columns.start - last
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            if latest <= after and -earliest <= before:
                return _filled(shape, True)
            if earliest > after or -latest > before:
                return _filled(shape, False)
            return super().__getitem__(idx)

    return ByBlocks


@functools.lru_cache(maxsize=8)
def _filled(shape, value):
    return np.full(shape, value)


def _run_splash(others, q, k, v, *sinks):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    kernel, segments = others
    of_rows = kernels.SegmentIds(*segments) if segments else None
    run: Callable[..., jax.Array] = jax.vmap(kernel, (0, 0, 0, 0, *(None for _ in sinks)))
    return run(q, k, v, of_rows, *sinks)


def splash_of_part(q, k, v, segments, kernel, places, own, *, scale, band):
    """Splash attention of the queries of some places, by what `_splash_kernel` made for all of them, to all keys."""
    sees_any = _sees_any(segments, band, places())[:, None, :, None] if segments else None

    def finish(out):
        return out if sees_any is None else jnp.where(sees_any, out, 0)

    return Kernel(_run_splash, (kernel, segments), lambda q, k, v: (q * scale, k, v), finish)


def _sees_any(segments, band, places=None):
    """Which queries see a key at all."""
    queries, keys = segments
    places = jnp.arange(queries.shape[1]) if places is None else places
    (before, after), later = band, places[:, None] - jnp.arange(keys.shape[1])
    near = queries[:, :, None] == keys[:, None, :]
    near = near if after is None else near & (later >= -after)
    return jnp.any(near if before is None else near & (later <= before), -1)


def _padded(x, dim, value=0):
    widths = [(0, -x.shape[dim] % LANES if at == dim else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def cudnn(q, k, v, segments, *, scale, band, cap=0):
    """Attention by cuDNN, for the same arguments; without segments, sinks and a cap."""
    assert not segments
    assert not cap
    before, after = band
    run = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=after == 0,
        local_window_size=None if before is None else (before, 0),
        implementation="cudnn",
    )
    by_time = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    return Kernel(lambda _, *qkv: run(*qkv), (), lambda *qkv: tuple(map(by_time, qkv)), by_time)


def kernel_on_mesh(rows, mode, context, qkv, segments, *, num_heads, scale, band, cap=0, sinks=(), interpret=False):
    """The kernel for one device, with what it takes besides; None where there is none.

    The sequence is split over the axis of the context, if there is one.

    Returns:
        `(q, k, v, segments, extra, what gives the places of the queries, band) -> Kernel`, `extra` and its specs; the
        band is that of a pair of chunks, which the keys of a ring need.
    """
    if rows.platform not in KERNELS and not interpret:
        return None
    (q, k, _), num = qkv, rows.size_of(context)
    platform = "tpu" if interpret else rows.platform
    if why_no_kernel(platform, qkv, segments, band, is_plain=not cap and not sinks):
        return None
    if why_no_kernel_in_context(platform, mode, num, (q.shape[2], k.shape[2]), band):
        return None
    options = {"scale": scale, "cap": cap, **({"interpret": True} if interpret else {})}
    if mode == "ring":
        return lambda q, k, v, segments, extra, places, own: splash(q, k, v, segments, band=own, **options), (), ()
    if mode == "heads" or (platform != "tpu" and band == (None, None)):
        make = functools.partial(KERNELS[platform], band=band, **options)
        return lambda q, k, v, segments, extra, places, own: make(q, k, v, segments), (), ()
    lengths = q.shape[2], k.shape[2]
    balanced = not why_unbalanced(mode, lengths, band, num, has_kernel=True)
    kernel = _splash_kernel(lengths, num_heads, band, cap, num_shards=num, balanced=balanced, interpret=interpret)
    specs = kernel.manual_sharding_spec(NamedSharding(rows.mesh, PartitionSpec(None, *context)))
    return functools.partial(splash_of_part, scale=scale, band=band), kernel, specs


def why_no_kernel_in_context(platform, mode, num, lengths, band):
    """Say why there is no kernel where the sequence is split over so many devices; empty if there is one."""
    if mode == "ring":
        return _why_no_kernel_in_ring(platform, num, lengths, band)
    if mode == "heads" or (platform != "tpu" and band == (None, None)):
        return ""
    if platform != "tpu":
        return "cuDNN's takes no part of the queries of a band. Use context_mode='heads', where heads divide"
    if lengths[0] % (num * LANES) or lengths[1] % LANES:
        return f"it takes parts of a multiple of {LANES} queries, and {lengths[0]} are split over {num} devices"
    return ""


def _why_no_kernel_in_ring(platform, num, lengths, band):
    if platform != "tpu":
        return "there is none for context_mode='ring' but on TPU"
    if band not in ((None, None), (None, 0)):
        return "with context_mode='ring', it takes no windows"
    chunks = [length // (num if band[1] is None else 2 * num) for length in lengths]
    if any(chunk % LANES for chunk in chunks) or (band[1] == 0 and lengths[0] != lengths[1]):
        return f"with context_mode='ring', it takes parts of a multiple of {LANES} queries, of {2 * LANES} if causal"
    return ""


KERNELS = {"tpu": splash, "cuda": cudnn, "gpu": cudnn}
"""By the platform of the devices."""


def why_no_kernel(platform, qkv, segments, band, *, is_plain=True):
    """Say why the kernel of a platform does not take such arrays; empty if it does.

    Scores are plain without a soft cap and sinks.
    """
    q, k, v = qkv
    if q.shape[2] < LONG:
        return f"it is shorter than {LONG} queries, for which one block is faster"
    takes = (jnp.bfloat16,) if platform == "tpu" else (jnp.bfloat16, jnp.float16)
    if q.dtype not in takes:
        return (
            f"it computes in {jnp.dtype(q.dtype)}, and the kernel multiplies in half precision. Make the step with "
            "compute_dtype=torch.bfloat16"
        )
    if k.shape[2] < q.shape[2] and band != (None, None):
        return f"it has fewer keys ({k.shape[2]}) than queries ({q.shape[2]}), and sees them by place"
    if platform == "tpu":
        return ""
    return _why_not_cudnn(q, v, segments, band) if is_plain else "cuDNN's takes no soft cap of the scores and no sinks"


def _why_not_cudnn(q, v, segments, band):
    if segments:
        return "cuDNN's takes no masks of what the batch says (padding, documents)"
    if band[1] not in (0, None) or (band[1] is None and band[0] is not None):
        return "cuDNN's takes a window of keys only where no later ones are seen"
    width = q.shape[-1]
    suits = width == v.shape[-1] and width % 8 == 0 and width <= 128
    return "" if suits else f"cuDNN's takes heads of a multiple of 8, up to 128, and not of {width} and {v.shape[-1]}"


def undivided(rows, shape):
    """Say which dims of queries (B, N, T, D) do not divide over a mesh, so that devices compute the same."""
    parts = ((shape[0], "rows", rows.axes), (shape[1], "heads", rows.other_axes))
    return ", ".join(
        f"{size} {what} over {', '.join(f'{axis}={rows.mesh.shape[axis]}' for axis in axes)}"
        for size, what, axes in parts
        if size % rows.size_of(axes)
    )
