"""Reading and writing at indices: put, take, index_reduce, masked scatter, diagonals, medians, searches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.dtypes import jax_dtype
from torch_shard._lowering.ops.registry import foreign_lowering, in_float32, lowers

aten = torch.ops.aten


def _size(shape):
    return int(np.prod(shape))


def _long():
    return jax_dtype(torch.int64)


def outside_if_negative(index, size):
    """Indices of which those below 0 lie behind the last: PyTorch refuses both, and JAX counts the first from the end.

    What lies outside is read as NaN, and not written.
    """
    return jnp.where(index < 0, size, index)


@lowers(aten.gather.default)
def gather(x, dim, index, *, sparse_grad=False):
    if x.ndim == 0 or index.size == 0:
        return jnp.broadcast_to(x, index.shape) if x.ndim == 0 else jnp.zeros(index.shape, x.dtype)
    places = list(jnp.indices(index.shape, sparse=True)) or [index]
    places[dim % x.ndim] = index
    return x.at[tuple(places)].get(mode="fill", wrap_negative_indices=False)


@lowers(aten.index_select.default)
def index_select(x, dim, index):
    return jnp.take(x, outside_if_negative(index, x.shape[dim]), axis=dim) if x.ndim else x


@lowers(aten.take.default)
def take(x, index):
    return jnp.take(x.reshape(_size(x.shape)), index)


@lowers(aten.put.default)
def put(x, index, source, accumulate=False):
    flat = x.reshape(_size(x.shape))
    places, values = index.reshape(_size(index.shape)), source.reshape(_size(source.shape))
    return _write(flat, (places,), values, accumulate).reshape(x.shape)


@lowers(aten.index.Tensor)
def index(x, indices):
    if (by_mask := _by_mask(aten.index.Tensor, indices)) is not None:
        return by_mask(x, indices)
    return x.at[_places(indices)].get(mode="fill")


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x, indices, values, accumulate=False):
    if (by_mask := _by_mask(aten.index_put.default, indices)) is not None:
        return by_mask(x, indices, values, accumulate)
    return _write(x, _places(indices), values, accumulate)


def _by_mask(op, indices):
    """What selects by a mask; None for places that are numbered."""
    return foreign_lowering(op) if any(i is not None and i.dtype == bool for i in indices) else None


def _places(indices):
    return tuple(slice(None) if i is None else i for i in indices)


def _write(x, index, values, accumulate):
    if not accumulate:
        return x.at[index].set(values.astype(x.dtype))
    if x.dtype == bool:  # torch adds booleans by "or"
        return x.at[index].max(values)
    return _add_in_float32(x, index, values)


@in_float32
def _add_in_float32(x, index, values):
    return x.at[index].add(values.astype(x.dtype))


@lowers(aten.scatter_add.default)
@in_float32
def scatter_add(x, dim, index, source):
    return _write_along(x, dim, index, source, _add)


def _add(ref, values):
    return ref.max(values) if values.dtype == bool else ref.add(values)


def _write_along(x, dim, index, source, write):
    """`write` at `x.at[places]` for the places that a scatter along `dim` means."""
    if index.size == 0:  # of any rank
        return x
    if x.ndim == 0:
        return _write_along(x[None], 0, index.reshape(1), source.reshape(1), write)[0]
    index = index.reshape(1) if index.ndim == 0 else index
    source = source.reshape(1) if source.ndim == 0 else source
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim % x.ndim] = outside_if_negative(index, x.shape[dim])
    values = source[tuple(slice(0, n) for n in index.shape)].astype(x.dtype)
    return write(x.at[tuple(places)], values)


@lowers(aten.scatter.value, aten.scatter.value_reduce)
def scatter_value(x, dim, index, value, *, reduce=None):
    return scatter(x, dim, index, jnp.full(index.shape, value, x.dtype), reduce=reduce)


@lowers(aten.scatter.src, aten.scatter.reduce)
def scatter(x, dim, index, source, *, reduce=None):
    if reduce == "add":
        return scatter_add(x, dim, index, source)
    write = _REDUCE["prod"][0] if reduce == "multiply" else lambda ref, values: ref.set(values)
    return _write_along(x, dim, index, source, write)


_REDUCE = {
    "sum": (_add, 0),
    "mean": (_add, 0),
    "prod": (lambda ref, values: ref.min(values) if values.dtype == bool else ref.multiply(values), 1),
    "amax": (lambda ref, values: ref.max(values), "lowest"),
    "amin": (lambda ref, values: ref.min(values), "highest"),
}


def _neutral(value, dtype):
    if value not in ("lowest", "highest"):
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(value == "highest")
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if value == "highest" else -jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.max if value == "highest" else limits.min, dtype)


def _reduce_into(x, write_at, source, reduce, include_self):
    """`source` into `x` by `write_at(array, source, write)`; a mean counts what it wrote."""
    write, neutral = _REDUCE[reduce]
    ones = jnp.ones(source.shape, x.dtype)
    if not include_self:
        touched = write_at(jnp.zeros(x.shape, bool), jnp.ones(source.shape, bool), lambda ref, v: ref.set(v))
        x = jnp.where(touched, _neutral(neutral, x.dtype), x)
    out = write_at(x, source, write)
    if reduce != "mean":
        return out
    start = jnp.ones(x.shape, x.dtype) if include_self else jnp.zeros(x.shape, x.dtype)
    count = jnp.maximum(write_at(start, ones, _add), 1)
    return out // count if jnp.issubdtype(x.dtype, jnp.integer) else out / count


@lowers(aten.scatter_reduce.two)
@in_float32
def scatter_reduce(x, dim, index, source, reduce, include_self=True):
    def write_at(array, values, write):
        return _write_along(array, dim, index, values, write)

    return _reduce_into(x, write_at, source, reduce, include_self)


@lowers(aten.index_reduce.default)
@in_float32
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    def write_at(array, values, write):
        front = jnp.moveaxis(array, dim, 0) if array.ndim else array[None]
        values = jnp.moveaxis(values, dim, 0) if values.ndim else values[None]
        out = write(front.at[index.reshape(_size(index.shape))], values.astype(array.dtype))
        return jnp.moveaxis(out, 0, dim) if array.ndim else out[0]

    return _reduce_into(x, write_at, source, reduce, include_self)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad, mask, sizes):
    """The gradients under the mask, in order, then zeros."""
    size = _size(sizes)
    mask = jnp.broadcast_to(mask, grad.shape).reshape(_size(grad.shape))
    places = jnp.where(mask, jnp.cumsum(mask) - 1, size)
    return jnp.zeros((size,), grad.dtype).at[places].add(grad.reshape(_size(grad.shape)), mode="drop").reshape(sizes)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(x, source, offset=0, dim1=0, dim2=1):
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows = np.arange(source.shape[-1]) + max(-offset, 0)
    written = last.at[..., rows, rows + offset].set(source.astype(x.dtype))
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


def _median(skip_nan, x, dim=None, keepdim=False):
    """The lower of the two middle elements and its index; NaN, if there is any and it is not skipped."""
    if dim is None:
        return _median(skip_nan, x.reshape(_size(x.shape)), 0)[0]
    if x.ndim == 0:
        return x, jnp.zeros((), _long())
    if x.shape[dim] == 0:
        return jnp.full((), jnp.nan, x.dtype), jnp.zeros((), _long())
    order, size = jnp.argsort(x, axis=dim, stable=True), x.shape[dim]  # NaN comes last
    count = jnp.sum(x == x, axis=dim, keepdims=True)
    middle = jnp.maximum(count - 1, 0) // 2 if skip_nan else jnp.where(count < size, count, (size - 1) // 2)
    index = jnp.take_along_axis(order, middle, dim).astype(_long())
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


lowers(aten.median.dim, aten.median.default)(functools.partial(_median, False))
lowers(aten.nanmedian.dim, aten.nanmedian.default)(functools.partial(_median, True))


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """Along the last dim, row by row where the sequence has rows."""
    side = side or ("right" if right else "left")
    values = values if isinstance(values, jax.Array) else jnp.asarray(values, sequence.dtype)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    search = functools.partial(jnp.searchsorted, side=side)
    search = search if sequence.ndim == 1 else jnp.vectorize(search, signature="(n),(m)->(m)")
    return search(sequence, values)


@lowers(aten.nonzero_static.default)
def nonzero_static(x, *, size, fill_value=-1):
    if x.ndim == 0 or x.size == 0:
        return jnp.full((size, x.ndim), fill_value, _long())
    places = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(places, -1).astype(_long())


@lowers(aten.slice_scatter.default)
def slice_scatter(x, source, dim=0, start=None, end=None, step=1):
    if isinstance(start, jax.Array):  # an input of the program
        return jax.lax.dynamic_update_slice_in_dim(x, source.astype(x.dtype), start, dim)
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(source.astype(x.dtype))


@lowers(aten.resize.default)
def resize(x, size, **_):
    """The elements that there are, in order; what torch leaves undefined is zero."""
    flat, wanted = x.reshape(_size(x.shape)), _size(size)
    return jnp.pad(flat[:wanted], (0, max(wanted - flat.shape[0], 0))).reshape(tuple(size))


@lowers(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, *, output_size=None):
    if output_size is None:
        raise NotImplementedError(
            "repeat_interleave needs output_size=: without it, the shape of its result depends on the repeats."
        )
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(x, source, size, stride, storage_offset=None):
    flat = x.reshape(_size(x.shape))
    along = np.indices(tuple(size), np.int32, sparse=True)
    places = sum((index * step for index, step in zip(along, stride, strict=True)), storage_offset or 0)
    return flat.at[places].set(source.astype(x.dtype)).reshape(x.shape)


@lowers(aten.histogram.bin_ct, aten.histogram.bins_tensor)
def histogram(x, bins=100, *, range=None, weight=None, density=False):
    return jnp.histogram(x, bins, range=None if range is None else tuple(range), weights=weight, density=density)
