"""One operator sample of PyTorch's `op_db`: run eagerly, run captured, lowered and jitted, and compared."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import definitions
from torch.utils import _pytree as pytree

import torch_shard as ts


def _draw_anew(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


# Some operators of `op_db` set a seed of torch's in each call, which would hide that they are random.
for _module in (common_methods_invocations, definitions.linalg):
    if hasattr(_module, "wrapper_set_seed"):
        _module.wrapper_set_seed = _draw_anew

MAX_ELEMENTS = 200_000
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


class Sample:
    """A sample as a function of its tensors.

    Args:
        call: What to run: the operator, or a variant of it.
        sample: Of `op_db`.
    """

    def __init__(self, call: Callable[..., Any], sample: Any) -> None:
        self.call, self.process = call, sample.output_process_fn_grad
        leaves, self.tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.static = [None if t else leaf for leaf, t in zip(leaves, self.is_tensor, strict=True)]
        # Without x64, JAX's 32-bit integers are torch's 64-bit ones in a capture.
        self.is_int32 = [t.dtype is torch.int32 for t in leaves if isinstance(t, torch.Tensor)]
        self.tensors = [_plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.wants = [_differentiable(t) and t.requires_grad for t in leaves if isinstance(t, torch.Tensor)]

    def outputs(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The outputs, and the new values of the tensors that the operator writes."""
        return self._run(tensors)[1]

    def gradients(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of a weighted sum of the outputs, by every tensor that wants one."""
        return self.outputs_and_gradients(*tensors)[-sum(self.wants) :]

    def outputs_and_gradients(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Both, by one program."""
        leaves = [t.detach().requires_grad_() if w else t for t, w in zip(tensors, self.wants, strict=True)]
        out, plain = self._run(leaves)
        outputs = [o for o in pytree.tree_leaves(self.process(out)) if isinstance(o, torch.Tensor) and o.requires_grad]
        wanted = [leaf for leaf, w in zip(leaves, self.wants, strict=True) if w]
        if not outputs:
            return [o.detach() for o in plain] + [torch.zeros_like(w) for w in wanted]
        total = sum((_weighted(o) for o in outputs), start=torch.zeros(()))
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        return [o.detach() for o in plain] + list(grads)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        copies = [t.clone() for t in tensors]
        copies = [t.int() if narrow else t for t, narrow in zip(copies, self.is_int32, strict=True)]
        given, before = iter(copies), [t._version for t in copies]
        leaves = [next(given) if t else s for t, s in zip(self.is_tensor, self.static, strict=True)]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        out = self.call(first, *args, **kwargs)
        written = [t for t, version in zip(copies, before, strict=True) if t._version > version]
        return out, [o for o in [*pytree.tree_leaves(out), *written] if isinstance(o, torch.Tensor)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """JAX arrays have no strides and no conjugate bit."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"layout {tensor.layout}")
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _weighted(out: torch.Tensor) -> torch.Tensor:
    if out.is_complex():
        return _weighted(out.real) + _weighted(1.5 * out.imag)
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum()


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the results of an operator are compared: values at all, by magnitude, indices by what they point to."""

    values: bool
    absolute: bool
    ties: bool
    rtol: float


def rules_of(op: Any) -> Rules:
    """The rules for an operator."""
    return Rules(op.name not in NO_VALUES, op.name in ABSOLUTE, op.name in TIES, LOW_PRECISION.get(op.name, RTOL))


def check(run: Callable[..., list[torch.Tensor]], inputs: list[torch.Tensor], rules: Rules) -> Outcome:
    """Compare `run` eagerly with `run` captured, lowered and jitted."""
    if any(t.numel() > MAX_ELEMENTS for t in inputs):
        return Outcome("skipped", "a large sample")
    try:
        torch.manual_seed(0)
        wanted = run(*_copies(inputs))
        random = False
        for seed in range(1, 5 if rules.values else 1):
            torch.manual_seed(seed)
            random = random or any(map(_differ, wanted, run(*_copies(inputs))))
    except Exception as error:
        return Outcome("skipped", f"eager torch raises {type(error).__name__}: {_first_line(error)}")
    try:
        found = [_cpu(o) for o in jax.tree.leaves(ts.jax_jit(run)(*_copies(inputs)))]
    except NotImplementedError as error:
        return Outcome("refused", _refusal(error))
    except Exception as error:
        if isinstance(error, (TypeError, OverflowError)) and "64 bits" in str(error):
            return Outcome("skipped", "64 bits, which JAX has switched off")
        return Outcome("error", f"{type(error).__name__}: {_first_line(error)}")
    problem = _compare_types(found, wanted)
    if problem or not rules.values:
        return Outcome("wrong", problem) if problem else Outcome("right")
    if random:
        problem = _compare_support(found, [run(*_copies(inputs)) for _ in range(10)])
        return Outcome("wrong", problem) if problem else Outcome("random")
    return _compare_values(run, inputs, found, wanted, rules)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().resolve_neg()


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(_real(one).double(), _real(other).double(), rtol=1e-3, equal_nan=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def _refusal(error: BaseException) -> str:
    """What a refusal names: the operators without a lowering, or its first line."""
    named = [line.strip().split(":")[0] for line in str(error).splitlines() if re.match(r"  \w+\.\w+", line)]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if named:
        return "no lowering: " + ", ".join(sorted(set(named)))
    return next((line for line in lines if line.startswith("Here ")), lines[0] if lines else "no message")[:160]


_NARROW = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
    torch.uint64: torch.uint32,
}


def _compare_types(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} outputs, not {len(wanted)}"
    for f, w in zip(found, wanted, strict=True):
        if f.shape != w.shape:
            return f"shape {tuple(f.shape)}, not {tuple(w.shape)}"
        if _NARROW.get(f.dtype, f.dtype) != _NARROW.get(w.dtype, w.dtype):
            return f"{f.dtype}, not {w.dtype}"
    return ""


def _compare_support(found: list[torch.Tensor], draws: list[list[torch.Tensor]]) -> str:
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


def _compare_values(run: Callable, inputs: list, found: list, wanted: list, rules: Rules) -> Outcome:
    exact: list[torch.Tensor] | None = None
    for position, (f, w) in enumerate(zip(found, wanted, strict=True)):
        if _beyond_32_bits(w):
            return Outcome("skipped", "values beyond 32 bits")
        f, w = (f.abs(), w.abs()) if rules.absolute and _differentiable(w) else (f, w)
        if _close(f, w, rules.rtol, ATOL) or (rules.ties and _points_at(inputs[0], found[position - 1], f, w)):
            continue
        if exact is None:
            exact = _in_float64(run, inputs, wanted)
        if exact is None or not _as_good(f, w, exact[position].abs() if rules.absolute else exact[position]):
            return Outcome("wrong", f"output {position}: {_difference(f, w)}")
    return Outcome("right")


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
    if not _differentiable(wanted):
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
    if not _differentiable(wanted):
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


def spread(items: list[Any], count: int) -> list[Any]:
    """At most `count` of `items`, from all over the list."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The in-place variant and the one with `out=`."""
    if op.inplace_variant is not None:
        yield "in place", op.inplace_variant
    if op.supports_out:

        def with_out(*args: Any, **kwargs: Any) -> Any:
            plain = op(*args, **kwargs)
            out = pytree.tree_map(torch.empty_like, plain)
            op(*args, **kwargs, out=out)
            return out

        yield "out=", with_out


def outcomes_of(op: Any, num_samples: int) -> Iterator[tuple[str, str, Outcome]]:
    """`(dtype and number of the sample, 'forward' or 'gradient', outcome)` for samples of an operator."""
    torch.manual_seed(0)
    for dtype in _dtypes(op):
        is_main = dtype in (torch.float32, torch.complex64) and op.supports_autograd
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=is_main), 2000))
        except Exception as error:
            yield str(dtype), "forward", Outcome("skipped", f"no samples: {_first_line(error)}")
            continue
        for number, sample in enumerate(spread(samples, num_samples if dtype is _dtypes(op)[0] else 2)):
            where = f"{str(dtype).removeprefix('torch.')} {number}"
            yield from ((where, *kind) for kind in _check_sample(op, sample, is_main, first=number == 0))


def _check_sample(op: Any, sample: Any, gradient: bool, first: bool) -> Iterator[tuple[str, Outcome]]:
    rules = rules_of(op)
    try:
        prepared = Sample(op, sample)
    except NotImplementedError as error:
        yield "forward", Outcome("skipped", str(error))
        return
    if gradient and any(prepared.wants):
        both = check(prepared.outputs_and_gradients, prepared.tensors, rules)
        if both.status in ("right", "random"):
            yield from (("forward", both), ("gradient", both))
        else:
            yield "forward", check(prepared.outputs, prepared.tensors, rules)
            yield "gradient", check(prepared.gradients, prepared.tensors, rules)
    else:
        yield "forward", check(prepared.outputs, prepared.tensors, rules)
    if first and not sample.broadcasts_input:
        for name, call in variants(op):
            outcome = check(Sample(call, sample).outputs, prepared.tensors, rules)
            yield "forward", dataclasses.replace(outcome, reason=f"{name}: {outcome.reason}")


def _dtypes(op: Any) -> list[torch.dtype]:
    """float32 first, or what the operator has instead; then integers and booleans, forward only."""
    supported = op.supported_dtypes("cpu") or {torch.float32}
    ordered = [torch.float32, torch.int64, torch.bool, torch.complex64]
    found = [dtype for dtype in ordered if dtype in supported]
    return [d for d in found if d is not torch.complex64] or found
