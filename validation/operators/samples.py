"""One operator sample of PyTorch's `op_db`: run eagerly, run captured, lowered and jitted, and compared."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import definitions
from torch.utils import _pytree as pytree

import torch_shard as ts
from validation.operators.compare import (
    Outcome,
    Rules,
    compare_support,
    compare_types,
    compare_values,
    differ,
    differentiable,
    rules_of,
)


def _draw_anew(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


# Some operators of `op_db` set a seed of torch's in each call, which would hide that they are random.
for _module in (common_methods_invocations, definitions.linalg):
    if hasattr(_module, "wrapper_set_seed"):
        _module.wrapper_set_seed = _draw_anew

MAX_ELEMENTS = 200_000


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
        self.wants = [differentiable(t) and t.requires_grad for t in leaves if isinstance(t, torch.Tensor)]

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


def _weighted(out: torch.Tensor) -> torch.Tensor:
    if out.is_complex():
        return _weighted(out.real) + _weighted(1.5 * out.imag)
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum()


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
            random = random or any(map(differ, wanted, run(*_copies(inputs))))
    except Exception as error:
        return Outcome("skipped", f"eager torch raises {type(error).__name__}: {_first_line(error)}")
    try:
        found = [_cpu(o) for o in jax.tree.leaves(ts.jax_jit(run)(*_copies(inputs)))]
    except NotImplementedError as error:
        return Outcome("refused", _refusal(error))
    except Exception as error:
        if isinstance(error, TypeError) and "has no JAX counterpart" in str(error):
            return Outcome("refused", str(error).partition(";")[0])
        if isinstance(error, (TypeError, OverflowError)) and "64 bits" in str(error):
            return Outcome("skipped", "64 bits, which JAX has switched off")
        return Outcome("error", f"{type(error).__name__}: {_first_line(error)}")
    problem = compare_types(found, wanted)
    if problem or not rules.values:
        return Outcome("wrong", problem) if problem else Outcome("right")
    if random:
        problem = compare_support(found, [run(*_copies(inputs)) for _ in range(10)])
        return Outcome("wrong", problem) if problem else Outcome("random")
    return compare_values(run, inputs, found, wanted, rules)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().resolve_neg()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def _refusal(error: BaseException) -> str:
    """What a refusal names: the operators without a lowering, or its first line."""
    named = [line.strip().split(":")[0] for line in str(error).splitlines() if re.match(r"  \w+\.\w+", line)]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if named:
        return "no lowering: " + ", ".join(sorted(set(named)))
    return next((line for line in lines if line.startswith("Here ")), lines[0] if lines else "no message")[:160]


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
    if gradient and any(prepared.wants) and rules.absolute:
        yield "forward", check(prepared.outputs, prepared.tensors, rules)
        yield (
            "gradient",
            check(prepared.gradients, prepared.tensors, dataclasses.replace(rules, absolute=False, thin=False)),
        )
    elif gradient and any(prepared.wants):
        both = check(prepared.outputs_and_gradients, prepared.tensors, rules)
        if both.status in ("right", "random"):
            yield from (("forward", both), ("gradient", both))
        else:
            yield "forward", check(prepared.outputs, prepared.tensors, rules)
            yield "gradient", check(prepared.gradients, prepared.tensors, rules)
    else:
        yield "forward", check(prepared.outputs, prepared.tensors, rules)
    if first and rules.values and not sample.broadcasts_input:
        for name, call in variants(op):
            outcome = check(Sample(call, sample).outputs, prepared.tensors, rules)
            yield "forward", dataclasses.replace(outcome, reason=f"{name}: {outcome.reason}")


def _dtypes(op: Any) -> list[torch.dtype]:
    """float32 first, or what the operator has instead; then integers and booleans, forward only."""
    supported = op.supported_dtypes("cpu") or {torch.float32}
    ordered = [torch.float32, torch.int64, torch.bool, torch.complex64]
    found = [dtype for dtype in ordered if dtype in supported]
    return [d for d in found if d is not torch.complex64] or found
