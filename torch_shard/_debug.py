"""Printing from within compiled functions."""

import functools
import sys
from typing import Any

import jax
import torch

from torch_shard._calls import call_jax
from torch_shard._capture.function_mode import is_repeating


def debug_print(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print values from within a compiled function, as it runs.

    Captures and compilers keep it, though nothing depends on it. Inside a function that is mapped over devices, each
    device prints for itself, in no particular order. Derivatives do not print again, but for those that run a compiled
    function again: with remat, under `jax_checkpoint`, or back through a call of what `jax_jit`, `tpmap` and their kin
    return. `jax.effects_barrier()` waits for what is still to be printed.

    Args:
        fmt: A format string, as of `str.format`.
        *args: Tensors, and anything else to be formatted, such as shapes.
        **kwargs: Likewise, by name.

    Example:
        >>> import jax, torch, torch_shard as ts
        >>> def double(x):
        ...     ts.debug_print("{shape}, the first is {}", x[0], shape=tuple(x.shape))
        ...     return 2 * x
        >>> y = ts.jax_jit(double)(torch.arange(1.0, 4.0)); jax.effects_barrier()
        (3,), the first is 1.0
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def show(*values: Any) -> None:
        given = iter(values)
        args, kwargs = jax.tree.unflatten(
            tree, [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        sys.stdout.write(fmt.format(*args, **kwargs) + "\n")

    if not is_repeating():
        call_jax(functools.partial(jax.debug.callback, show), *tensors)
