"""`torch.cond` in a capture: one conditional of the compiled program, of which only one branch runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torch_shard._calls import call_pure
from torch_shard._common.axes import vary_like
from torch_shard._common.overrides import instead_of_attribute
from torch_shard._function import TorchFunction


@instead_of_attribute(torch, "cond")
def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    """`torch.cond` as `jax.lax.cond`; its derivative is that of the branch that ran.

    Args:
        pred: A tensor of one element, or a bool.
        true_fn: Takes the operands; what it closes over counts as such.
        false_fn: Likewise, with outputs of the same shapes and dtypes.
        operands: Tensors, or pytrees of them.
    """
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    branches = TorchFunction(true_fn), TorchFunction(false_fn)

    def choose(key: Any, pred: jax.Array, operands: Any) -> Any:
        runs = [lambda operands, branch=branch: branch(key, *operands) for branch in branches]
        kinds = [jax.eval_shape(run, operands) for run in runs]
        on_true, on_false = (lambda operands, run=run: vary_like(run(operands), pred, kinds) for run in runs)
        return jax.lax.cond(pred.reshape(()).astype(bool), on_true, on_false, operands)

    return call_pure(choose, (pred, tuple(operands)), {}, random=True)
