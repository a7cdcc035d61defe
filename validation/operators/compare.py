"""Comparison of an operator's results with eager torch's: what is unique of them, as near as float32 can be."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# Outputs of which several are right, so that only what a function of them says is compared (op_db's own choice of it,
# `output_process_fn_grad`, where there is one).
ABSOLUTE = frozenset({"svd_lowrank", "pca_lowrank", "linalg.eigh", "linalg.svd", "svd", "linalg.qr", "qr", "geqrf"})
NO_VALUES = ("empty", "new_empty", "empty_like", "empty_permuted", "empty_strided", "new_empty_strided", "resize_")
# Their indices are any that point to the value.
TIES = frozenset({"topk", "kthvalue", "mode", "median", "nanmedian", "sort", "max", "min", "cummax", "cummin", "msort"})
LOW_PRECISION = {"bfloat16": 2e-2, "half": 2e-3}  # they round to 8 and 11 bits
RTOL, ATOL = 1e-4, 2e-5  # float32, sums of up to some hundred terms; worse is judged against float64


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one sample went: a status ('right', 'refused', 'wrong', 'error', 'random', ...) and why."""

    status: str
    reason: str = ""


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the results of an operator are compared: values at all, by magnitude, indices by what they point to."""

    values: bool
    absolute: bool
    thin: bool
    ties: bool
    rtol: float


def rules_of(op: Any) -> Rules:
    """The rules for an operator."""
    return Rules(
        op.name not in NO_VALUES,
        op.name in ABSOLUTE,
        op.name == "linalg.svd",
        op.name in TIES,
        LOW_PRECISION.get(op.name, RTOL),
    )


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(_real(one).double(), _real(other).double(), rtol=1e-3, equal_nan=True)


_NARROW = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
    torch.uint64: torch.uint32,
}


def compare_types(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} outputs, not {len(wanted)}"
    for f, w in zip(found, wanted, strict=True):
        if f.shape != w.shape:
            return f"shape {tuple(f.shape)}, not {tuple(w.shape)}"
        if _NARROW.get(f.dtype, f.dtype) != _NARROW.get(w.dtype, w.dtype):
            return f"{f.dtype}, not {w.dtype}"
    return ""


def compare_support(found: list[torch.Tensor], draws: list[list[torch.Tensor]]) -> str:
    """Random results: the same signs, whole numbers where torch's are, finite where torch's are."""
    for position, f in enumerate(found):
        many = torch.stack([_real(d[position]) for d in draws]).double()
        one = _real(f).double()
        if many.isfinite().all() and not one.isfinite().all():
            return "not finite"
        if (many >= 0).all() and not (one >= 0).all():
            return "negative draws"
        if (many == many.round()).all() and not (one == one.round()).all():
            return "fractional draws"
    return ""


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def compare_values(run: Callable, inputs: list, found: list, wanted: list, rules: Rules) -> Outcome:
    exact: list[torch.Tensor] | None = None
    if rules.thin:
        found, wanted = _thin(found), _thin(wanted)
    for position, (f, w) in enumerate(zip(found, wanted, strict=True)):
        if _beyond_32_bits(w):
            return Outcome("skipped", "values beyond 32 bits")
        f, w = (f.abs(), w.abs()) if rules.absolute and differentiable(w) else (f, w)
        if _close(f, w, rules.rtol, ATOL) or (rules.ties and _points_at(inputs[0], found[position - 1], f, w)):
            continue
        if exact is None:
            exact = _in_float64(run, inputs, wanted)
        if exact is None or not _as_good(f, w, exact[position].abs() if rules.absolute else exact[position]):
            return Outcome("wrong", f"output {position}: {_difference(f, w)}")
    return Outcome("right")


def _thin(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Singular vectors without those of the null space, which any rotation of them can replace."""
    left, values, right = results
    count = values.shape[-1]
    return [left[..., :count], values, right[..., :count, :]]


def _points_at(source: torch.Tensor, values: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether indices that are not torch's point to the same values, along some dim."""
    if wanted.dtype is not torch.int64 or values.shape != found.shape:
        return False
    for dim in range(source.ndim):
        shape = [n for d, n in enumerate(source.shape) if d != dim]
        for index in {found, found.unsqueeze(dim)} if found.ndim >= source.ndim - 1 else set():
            if index.ndim == source.ndim and [n for d, n in enumerate(index.shape) if d != dim] == shape:
                taken = source.gather(dim, index.long()).reshape(values.shape)
                if torch.equal(taken.to(values.dtype), values):
                    return True
    return source.ndim == 0


def _beyond_32_bits(wanted: torch.Tensor) -> bool:
    is_wide = wanted.dtype in (torch.int64, torch.uint64) and wanted.numel()
    return bool(is_wide and (wanted.max() > 2**31 - 1 or wanted.min() < -(2**31)))


def _close(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> bool:
    if not differentiable(wanted):
        return torch.equal(found.to(wanted.dtype), wanted)
    f, w = _real(found).double(), _real(wanted).double()
    finite = w.isfinite()
    if not torch.equal(torch.where(finite, 0, w).nan_to_num(nan=7), torch.where(f.isfinite(), 0, f).nan_to_num(nan=7)):
        return False
    scale = max(1.0, w[finite].abs().max().item()) if finite.any() else 1.0
    return bool(((f - w).abs()[finite] <= rtol * w.abs()[finite] + atol * scale).all())


def _in_float64(run: Callable, inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor] | None:
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    try:
        exact = run(*(t.clone().to(wide.get(t.dtype, t.dtype)) for t in inputs))
    except Exception:
        return None
    return exact if [e.shape for e in exact] == [w.shape for w in wanted] else None


def _as_good(found: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether an ill-conditioned result is as near to the exact one as eager torch's, up to a factor of ten."""
    if not differentiable(wanted):
        return False
    f, w, e = (_real(t).double() for t in (found, wanted, exact))
    if not (f.isfinite() == w.isfinite()).all() or not (w.isfinite() == e.isfinite()).all():
        return False
    finite = e.isfinite()
    error, accepted = ((t - e).abs()[finite] for t in (f, w))
    return bool((error <= 10 * accepted.max() + RTOL * e.abs()[finite]).all()) and accepted.max() < 0.1 * (
        1 + e[finite].abs().max()
    )


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    f, w = np.asarray(_real(found)).ravel(), np.asarray(_real(wanted)).ravel()
    with np.errstate(all="ignore"):
        off = ~np.isclose(f.astype(np.float64), w.astype(np.float64), rtol=RTOL, atol=ATOL, equal_nan=True)
    i = int(np.argmax(off))
    return f"{off.sum()} of {off.size} differ, {f[i]:.6g} not {w[i]:.6g}"
