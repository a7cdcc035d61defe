"""What functions of PyTorch mean in a capture.

`torch.cond` is one conditional of the compiled program, of which only one branch runs; the state of the random
generator is a place in the program's own stream.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torch_shard._axes import vary_like
from torch_shard._calls import call_pure
from torch_shard._function import TorchFunction
from torch_shard._surroundings import SUBSTITUTES
from torch_shard._values import get_rng_state, refuse_seed, set_rng_state


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


SUBSTITUTES.extend(
    [
        (torch, "cond", cond),
        (torch, "get_rng_state", get_rng_state),
        (torch, "set_rng_state", set_rng_state),
        (torch, "manual_seed", refuse_seed),
        (torch, "seed", refuse_seed),
    ]
)
