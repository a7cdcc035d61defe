"""`torch.cond` in a capture: one conditional of the compiled program, of which only one branch runs."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import jax
import torch

from torch_shard._capture import is_repeating
from torch_shard._common.axes import vary_like
from torch_shard._common.caller import caller, public
from torch_shard._common.convert import take_out
from torch_shard._common.overrides import instead_of_attribute
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._interop.torch_function import TorchFunction
from torch_shard._interop.views import call_jax, call_pure


@instead_of_attribute(torch, "cond")
def cond(
    pred: object, true_fn: Callable[..., PyTree], false_fn: Callable[..., PyTree], operands: Sequence[PyTree] = ()
) -> PyTree:
    """`torch.cond` as `jax.lax.cond`; its derivative is that of the branch that ran.

    Args:
        pred: A tensor of one element, or a bool.
        true_fn: Takes the operands; what it closes over counts as such.
        false_fn: Takes the operands too; its outputs have the shapes and dtypes of those of `true_fn`.
        operands: Tensors, or pytrees of them.
    """
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    branches = TorchFunction(true_fn), TorchFunction(false_fn)

    def choose(key: Key, pred: jax.Array, operands: PyTree) -> PyTree:
        runs = [lambda operands, branch=branch: branch(key, *operands) for branch in branches]
        kinds = [jax.eval_shape(run, operands) for run in runs]
        on_true, on_false = (lambda operands, run=run: vary_like(run(operands), pred, kinds) for run in runs)
        return jax.lax.cond(pred.reshape(()).astype(bool), on_true, on_false, operands)

    return call_pure(choose, (pred, tuple(operands)), {}, random=True)


@public
def debug_print(fmt: str, *args: object, **kwargs: object) -> None:
    """Print values from within a compiled function, as it runs.

    Captures and compilers keep it, though nothing depends on it. Inside a function that is mapped over devices, each
    device prints for itself, in no particular order. Derivatives do not print again, but for those that run a compiled
    function again: with remat, under `jax_checkpoint`, or back through a call of what `jax_jit`, `tpmap` and their kin
    return. `jax.effects_barrier()` waits for what is still to be printed.

    Args:
        fmt: A format string, as of `str.format`.
        *args: Tensors, and anything else to be formatted, such as shapes.
        **kwargs: The same, for fields of the format string that have names.

    Example:
        >>> import jax, torch, torch_shard as ts
        >>> def double(x):
        ...     ts.debug_print("{shape}, the first is {}", x[0], shape=tuple(x.shape))
        ...     return 2 * x
        >>> y = ts.jax_jit(double)(torch.arange(1.0, 4.0)); jax.effects_barrier()
        (3,), the first is 1.0
    """
    check_kind("fmt", fmt, str)
    tensors, rest = take_out((args, kwargs), torch.Tensor)
    _check_format(fmt, rest.filled(itertools.repeat(_Anything())))

    def show(*values: object) -> None:
        args, kwargs = rest.filled(values)
        sys.stdout.write(fmt.format(*args, **kwargs) + "\n")

    if not is_repeating():
        call_jax(functools.partial(jax.debug.callback, show), *(tensor.detach() for tensor in tensors))


class _Anything:
    """Stands for a tensor whose values are not there yet: it can be formatted in any way."""

    def __format__(self, spec: str) -> str:
        return ""

    def __getitem__(self, index: object) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        return self


def _check_format(fmt: str, given: tuple[tuple[object, ...], dict[str, object]]) -> None:
    """Refuse a format string that does not fit its arguments, which would show only when the program runs."""
    args, kwargs = given
    try:
        fmt.format(*args, **kwargs)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{caller()}: {fmt!r} cannot be formatted with {len(args)} arguments and the names {sorted(kwargs)}: "
            f"{type(error).__name__} {error}."
        ) from error
