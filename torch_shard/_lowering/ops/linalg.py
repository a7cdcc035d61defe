"""Factorisations and solvers. Where PyTorch raises (a matrix that is not positive definite), the results are NaN."""

import jax
import jax.numpy as jnp
import torch
from jax.lax import linalg
from jax.scipy import linalg as solvers

from torch_shard._common.dtypes import jax_dtype
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten


def _adjoint(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def cholesky(x, upper=False):
    lower = linalg.cholesky(_adjoint(x) if upper else x, symmetrize_input=False)
    return _adjoint(lower) if upper else lower


if hasattr(aten, "cholesky"):  # until torch 2.13
    lowers(aten.cholesky.default)(cholesky)


@lowers(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(x, *, upper=False, check_errors=False):
    factor = cholesky(x, upper)
    return factor, jnp.any(jnp.isnan(factor), (-2, -1)).astype(jnp.int32)


@lowers(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(b, factor, upper=False):
    return solvers.cho_solve((factor, not upper), _with_batch_of(factor, b))


def _with_batch_of(x, b):
    """Right-hand sides for each of the matrices that there are."""
    return jnp.broadcast_to(b, (*jnp.broadcast_shapes(x.shape[:-2], b.shape[:-2]), *b.shape[-2:]))


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(factor, upper=False):
    return cholesky_solve(jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape), factor, upper)


@lowers(aten.geqrf.default)
def geqrf(x):
    reflectors, tau = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), tau


@lowers(aten.ormqr.default)
def ormqr(reflectors, tau, other, left=True, transpose=False):
    rows, columns = reflectors.shape[-2:]
    pads = [(0, 0)] * (reflectors.ndim - 1) + [(0, max(rows - columns, 0))]
    q = linalg.householder_product(jnp.pad(reflectors, pads)[..., :rows], tau)
    q = _adjoint(q) if transpose else q
    return q @ other if left else other @ q


def _factors(packed, pivots):
    """P, L and U from what `lu_factor` gives; torch counts pivots from 1."""
    rows, columns = packed.shape[-2:]
    least = min(rows, columns)
    lower = jnp.tril(packed[..., :least], -1) + jnp.eye(rows, least, dtype=packed.dtype)
    upper = jnp.triu(packed[..., :least, :])
    order = linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)
    return jnp.swapaxes(jax.nn.one_hot(order, rows, dtype=packed.dtype), -1, -2), lower, upper


@lowers(aten.lu_unpack.default)
def lu_unpack(packed, pivots, unpack_data=True, unpack_pivots=True):
    p, lower, upper = _factors(packed, pivots)
    empty = jnp.zeros((0,), packed.dtype)
    return p if unpack_pivots else empty, *((lower, upper) if unpack_data else (empty, empty))


@lowers(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(x, *, pivot=True, check_errors=False):
    if not pivot:
        raise NotImplementedError("An LU factorisation with pivot=False has no lowering to JAX; leave pivot=True.")
    packed, pivots, _ = linalg.lu(x)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    singular = diagonal == 0
    info = jnp.where(jnp.any(singular, -1), jnp.argmax(singular, -1) + 1, 0) if diagonal.shape[-1] else 0
    return packed, pivots + 1, jnp.broadcast_to(info, x.shape[:-2]).astype(jnp.int32)


@lowers(aten.linalg_lu.default)
def linalg_lu(x, *, pivot=True):
    packed, pivots, _ = linalg_lu_factor_ex(x, pivot=pivot)
    return _factors(packed, pivots)


@lowers(aten.linalg_lu_solve.default)
def linalg_lu_solve(packed, pivots, b, *, left=True, adjoint=False):
    if not left:
        return _adjoint(linalg_lu_solve(packed, pivots, _adjoint(b), left=True, adjoint=not adjoint))
    return solvers.lu_solve((packed, pivots - 1), _with_batch_of(packed, b), trans=2 if adjoint else 0)


@lowers(aten._linalg_solve_ex.default)
def linalg_solve_ex(x, b, *, left=True, check_errors=False):
    """Returns `(solution, LU, pivots, info)`."""
    packed, pivots, info = linalg_lu_factor_ex(x)
    is_vector = b.ndim == 1 or (x.ndim - 1 == b.ndim and b.shape == x.shape[:-1])
    solution = linalg_lu_solve(packed, pivots, b[..., None] if is_vector else b, left=left or is_vector)
    return solution[..., 0] if is_vector else solution, packed, pivots, info


@lowers(aten.linalg_inv_ex.default)
def linalg_inv_ex(x, *, check_errors=False):
    solution, _, _, info = linalg_solve_ex(x, jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape))
    return solution, info


def _factored(x):
    """The factors that the gradient of a determinant solves with: of the transpose, unless the matrix is complex.

    PyTorch takes so those of a contiguous matrix, and JAX arrays have no strides.
    """
    packed, pivots, _ = linalg_lu_factor_ex(x if jnp.iscomplexobj(x) else jnp.swapaxes(x, -1, -2))
    return packed, pivots


@lowers(aten._linalg_det.default)
def linalg_det(x):
    """Returns `(det, LU, pivots)`."""
    packed, pivots = _factored(x)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, -1) * _parity(pivots).astype(x.dtype), packed, pivots


def _parity(pivots):
    swapped = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return 1 - 2 * (swapped % 2)


@lowers(aten._linalg_slogdet.default)
def linalg_slogdet(x):
    """Returns `(sign, log |det|, LU, pivots)`."""
    packed, pivots = _factored(x)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    signs = jnp.prod(jnp.where(size == 0, 0, diagonal / jnp.where(size == 0, 1, size)), -1)
    return signs * _parity(pivots).astype(x.dtype), jnp.sum(jnp.log(size), -1), packed, pivots


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(x, *, atol=None, rtol=None, hermitian=False):
    if 0 in x.shape:
        return jnp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
    if hermitian:
        values, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
        size, left, right = jnp.abs(values), vectors * jnp.sign(values)[..., None, :], vectors
    else:
        left, size, right = jnp.linalg.svd(x, full_matrices=False)
        right = _adjoint(right)
    default = max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    rtol = (default if atol is None else jnp.where(atol > 0, 0, default)) if rtol is None else rtol
    bound = jnp.maximum(0 if atol is None else atol, rtol * jnp.max(size, -1))[..., None]
    kept = size > bound
    inverse = jnp.where(kept, 1 / jnp.where(kept, size, 1), 0)
    return (right * inverse[..., None, :].astype(x.dtype)) @ _adjoint(left)


lowers(aten._linalg_eigvals.default)(jnp.linalg.eigvals)


@lowers(aten._linalg_eigh.default)
def linalg_eigh(x, UPLO="L", compute_v=True):
    values, vectors = linalg.eigh(x if UPLO == "L" else _adjoint(x), lower=True, symmetrize_input=False)[::-1]
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


@lowers(aten._linalg_svd.default)
def linalg_svd(x, full_matrices=False, compute_uv=True, *, driver=None):
    if not compute_uv:
        empty = jnp.zeros((0,), x.dtype)
        return empty, jnp.linalg.svd(x, compute_uv=False), empty
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


@lowers(aten.linalg_vector_norm.default)
def linalg_vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    axes = None if dim is None else tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    axes = tuple(range(x.ndim)) if not axes or not x.ndim else axes
    return jnp.linalg.vector_norm(x, axis=axes, keepdims=keepdim, ord=ord)
