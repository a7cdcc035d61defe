"""Attention by the kernels of JAX: splash attention on TPU, cuDNN's on GPU, each on its own rows and heads.

A kernel works on one device, so that rows and heads are split over the mesh by hand: rows as the batch is, heads over
all other axes, if they divide. Kernels multiply in half precision, so that float32 stays with the blocks.

A band is how many keys before its own place and after it a query sees; None for all. A cap is a soft cap of the scores,
0 for none; sinks are none, or one array with a number for each head, which is among the scores of each of its queries.

Shapes: B batch, N heads of the queries, K heads of the keys, T queries, S keys, D width of a head.
Sources: jax.experimental.pallas.ops.tpu.splash_attention, jax.nn.dot_product_attention.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torch_shard._common.axes import manual_axes
from torch_shard._lowering.rows import current_rows

_NOBODYS = -3  # no query has this number

LANES, LARGEST = 128, 512
"""Splash attention takes blocks of a multiple of so many queries and keys, and of no more."""


def splash(q, k, v, segments, sinks=(), *, scale, band, cap=0, interpret=False):
    """Splash attention of `(q_BNTD, k_BKSD, v_BKSD, [of queries_BT, of keys_BS] or [])`."""
    shape, num_keys, sees_any = q.shape[:-1], k.shape[2], None
    if segments:
        sees_any = _sees_any(segments, band)
    elif num_keys % LANES and (band[1] is None or shape[2] + band[1] > num_keys):  # else nobody sees what is padded
        segments = tuple(jnp.ones((len(x), x.shape[2]), jnp.int32) for x in (q, k))
    segments = tuple(_padded(x, 1, value) for x, value in zip(segments, (0, _NOBODYS), strict=False))
    q, k, v = (_padded(x, 2) for x in (q * scale, k, v))
    kernel = _splash_kernel((q.shape[2], k.shape[2]), q.shape[1], band, cap, interpret=interpret)
    out = _run_splash(kernel, q, k, v, segments, sinks)[:, :, : shape[2]]
    return out if sees_any is None else jnp.where(sees_any[:, None, :, None], out, 0)  # the kernel takes some mean


def _splash_kernel(size, num_heads, band, cap, *, num_shards=1, interpret=False):
    """The kernel for so many queries and keys, of which each of so many devices has a part of the queries."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    seen = masks.FullMask(size) if band == (None, None) else _band_mask(band, size)
    of_queries, of_keys = (math.gcd(length, LARGEST) for length in (size[0] // num_shards, size[1]))
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


def _band_mask(band, size):
    """JAX's mask of a band, which looks at no element of blocks that are seen as a whole, or not at all."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    made = masks.CausalMask(size) if band == (None, 0) else masks.LocalMask(size, band, 0)
    made.__class__ = _by_blocks(type(made), band)
    return made


@functools.cache
def _by_blocks(cls, band):
    before, after = (math.inf if limit is None else limit for limit in band)

    class ByBlocks(cls):
        def __getitem__(self, idx):
            if any(part.start is None or part.stop is None for part in idx):
                return super().__getitem__(idx)
            rows, columns = idx
            latest, earliest = columns.stop - 1 - rows.start, columns.start - (rows.stop - 1)
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


def _run_splash(kernel, q, k, v, segments, sinks):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    of_rows = (kernels.SegmentIds(*segments) if segments else None, *(sink.astype(jnp.float32) for sink in sinks))
    run: Callable[..., jax.Array] = jax.vmap(kernel, (0, 0, 0, 0, *(None for _ in sinks)))  # pyright: ignore
    return run(q, k, v, *of_rows)


def splash_of_part(q, k, v, segments, sinks, kernel, start, *, scale, band):
    """Splash attention of a part of the queries, by what `_splash_kernel` made for all of them, to all keys."""
    out = _run_splash(kernel, q * scale, k, v, segments, sinks)
    return jnp.where(_sees_any(segments, band, start[0])[:, None, :, None], out, 0) if segments else out


def _sees_any(segments, band, start=0):
    """Which queries see a key at all."""
    queries, keys = segments
    (before, after), later = band, start + jnp.arange(queries.shape[1])[:, None] - jnp.arange(keys.shape[1])
    near = queries[:, :, None] == keys[:, None, :]
    near = near if after is None else near & (later >= -after)
    return jnp.any(near if before is None else near & (later <= before), -1)


def _padded(x, dim, value=0):
    widths = [(0, -x.shape[dim] % LANES if at == dim else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def cudnn(q, k, v, segments, sinks=(), *, scale, band, cap=0):
    """Attention by cuDNN, of the same arguments; without segments, sinks and a cap."""
    assert not segments
    assert not cap
    assert not sinks
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    before, after = band
    local = None if before is None else (before, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=after == 0, local_window_size=local, implementation="cudnn"
    )
    return jnp.swapaxes(out, 1, 2)


def kernel_for(q, k, v, segments, *, scale, band, cap=0, sinks=()):
    """The kernel for such arrays on the devices of the step, as an `OnMesh`; None where there is none."""
    rows = current_rows()
    if rows is None or manual_axes() or rows.platform not in KERNELS:
        return None
    if why_no_kernel(rows.platform, (q, k, v), segments, band, is_plain=not cap and not sinks):
        return None
    return OnMesh(rows, functools.partial(KERNELS[rows.platform], scale=scale, band=band, cap=cap))


def kernel_in_context(rows, mode, qkv, segments, *, num_heads, scale, band, cap=0, sinks=(), interpret=False):
    """The kernel where the sequence is split too, for one device, with what it takes besides; None where there is none.

    Args:
        rows: How the rows and the sequence lie.
        mode: Of the context.
        qkv: Queries, keys and values of all devices.
        segments: Numbers of queries and keys.
        num_heads: Heads of the queries on one device, when its sequence is split.
        scale: Of the scores.
        band: What is seen.
        cap: Soft cap of the scores.
        sinks: A number for each head.
        interpret: Run without a TPU.

    Returns:
        `(q, k, v, segments, sinks, extra, start) -> out`, `extra` and its specs.
    """
    if rows.platform not in KERNELS and not interpret:
        return None
    (q, k, _), num = qkv, rows.mesh.shape[rows.context.axis]
    platform = "tpu" if interpret else rows.platform
    if why_no_kernel(platform, qkv, segments, band, is_plain=not cap and not sinks):
        return None
    if why_no_kernel_in_context(platform, mode, num, (q.shape[2], k.shape[2]), band):
        return None
    if mode == "heads" or (platform != "tpu" and band == (None, None)):
        options = {"interpret": True} if interpret else {}
        kernel = functools.partial(KERNELS[platform], scale=scale, band=band, cap=cap, **options)
        return lambda q, k, v, segments, sinks, extra, start: kernel(q, k, v, segments, sinks), (), ()
    kernel = _splash_kernel((q.shape[2], k.shape[2]), num_heads, band, cap, num_shards=num, interpret=interpret)
    specs = kernel.manual_sharding_spec(NamedSharding(rows.mesh, PartitionSpec(None, rows.context.axis)))
    return functools.partial(splash_of_part, scale=scale, band=band), kernel, specs


def why_no_kernel_in_context(platform, mode, num, lengths, band):
    """Say why there is no kernel where the sequence is split over so many devices; empty if there is one."""
    if mode == "ring":
        return "there is none for context_mode='ring'"
    if mode == "heads" or (platform != "tpu" and band == (None, None)):
        return ""
    if platform != "tpu":
        return "cuDNN's takes no part of the queries of a band. Use context_mode='heads', where heads divide"
    if lengths[0] % (num * LANES) or lengths[1] % LANES:
        return f"it takes parts of a multiple of {LANES} queries, and {lengths[0]} are split over {num} devices"
    return ""


KERNELS = {"tpu": splash, "cuda": cudnn, "gpu": cudnn}
"""By the platform of the devices."""


def why_no_kernel(platform, qkv, segments, band, *, is_plain=True):
    """Say why the kernel of a platform does not take such arrays; empty if it does.

    Scores are plain without a soft cap and sinks.
    """
    q, k, v = qkv
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
    sizes = [(f"{size} {what}", {axis: rows.mesh.shape[axis] for axis in axes}) for size, what, axes in parts]
    found = [
        (what, over) for (size, *_), (what, over) in zip(parts, sizes, strict=True) if size % math.prod(over.values())
    ]
    return ", ".join(f"{what} over {', '.join(f'{a}={n}' for a, n in over.items())}" for what, over in found)


class OnMesh:
    """A kernel on the devices of a mesh: each computes its rows of the batch and its heads.

    Args:
        rows: How the rows lie.
        kernel: `(q_BNTD, k_BKSD, v_BKSD, segments, sinks) -> out_BNTD` on one device, differentiable.
    """

    def __init__(self, rows, kernel):
        self._rows, self._kernel = rows, kernel

    def _pulled(self, q, k, v, segments, sinks):
        return jax.vjp(lambda q, k, v, sinks: self._kernel(q, k, v, segments, sinks), q, k, v, sinks)

    def forward(self, q, k, v, segments, sinks=()):
        """The output, by the very kernel that `backward` runs again: where both stand together, XLA keeps one."""
        split = self._split(q)
        out = self._mapped(lambda *given: self._pulled(*given)[0], [split] * 3, (segments, sinks), split)
        return out(q, self._spread(k, q), self._spread(v, q), segments, tuple(sinks))

    def backward(self, grad, q, k, v, segments, sinks=()):
        """Gradients of q, k and v, and of the sinks if there are any."""
        split = self._split(q)

        def pull(grad, *given):
            *found, of_sinks = self._pulled(*given)[1](grad)
            return *found, tuple(jax.lax.psum(g, split[0]) if split[0] else g for g in of_sinks)

        out_specs = (*(split,) * 3, (PartitionSpec(split[1]),) * len(sinks))
        grads = self._mapped(pull, [split] * 4, (segments, sinks), out_specs)
        given = q, self._spread(k, q), self._spread(v, q), segments, tuple(sinks)
        of_q, *others, of_sinks = grads(grad, *given)
        others = (x.reshape(*k.shape[:2], -1, *x.shape[2:]).sum(2) for x in others)
        return of_q, *others, *(g.astype(sink.dtype) for g, sink in zip(of_sinks, sinks, strict=True))

    def _mapped(self, fn, splits, others, out_specs):
        (segments, sinks), of_rows, of_heads = others, PartitionSpec(splits[0][0]), PartitionSpec(splits[0][1])
        in_specs = (*splits, (of_rows,) * len(segments), (of_heads,) * len(sinks))
        fn = jax.default_matmul_precision("default")(fn)  # kernels of half precision have no other
        return jax.shard_map(fn, mesh=self._rows.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _heads(self, q):
        """The axes of the mesh over which heads are split, and their number of devices."""
        others = self._rows.other_axes
        size = math.prod(self._rows.mesh.shape[axis] for axis in others)
        return ((), 1) if q.shape[1] % size else (others, size)

    def _split(self, q):
        batch = () if len(q) % self._rows.num_shards else self._rows.axes
        return PartitionSpec(batch, self._heads(q)[0])

    def _spread(self, x, q):
        """The heads of keys, each so often that they divide over the axes."""
        _, size = self._heads(q)
        return jnp.repeat(x, size // math.gcd(x.shape[1], size), axis=1)
