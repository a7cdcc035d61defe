"""The proof: the same training, step by step, by torch_shard on the mesh and by eager torch on the CPU."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import optax
import torch
from jax.sharding import Mesh

import torch_shard as ts
from torch_shard._common.types import PyTree
from torch_shard._demo.model import GPT, loss_fn
from torch_shard._inspect import Training, compare_batches
from torch_shard._train import Comparison

NUM_STEPS = 10
LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.99), 0.1
# Adam divides a gradient by its own size. With the usual 1e-8, entries whose gradient is hardly more than rounding take
# full steps in directions that rounding decides, on either side; this is well above rounding, and the same on both.
EPS = 1e-5

# float32 rounds to 6e-8, and the two sides sum in different orders. Over seeds and meshes the loss was at most 2.4e-7
# apart and a parameter 5.3e-5 (what is left of Adam's division); the mistakes that were tried (no weight decay,
# second beta 0.999, learning rate off by 1 %) give at least 4.8e-5 and 1.5e-3.
LOSS_TOLERANCE = 1e-5
PARAM_TOLERANCE = 5e-4


@dataclass(frozen=True)
class Proof:
    """Relative distance of two trainings: max |a - b| / max |b|, b being torch's, over one tensor.

    Attributes:
        losses: Torch's loss at each step.
        loss_difference: Largest over the steps, on one device or the mesh.
        param_difference: Largest over the parameters and the steps.
        worst_param: Its name.
    """

    losses: tuple[float, ...]
    loss_difference: float
    param_difference: float
    worst_param: str

    @property
    def holds(self) -> bool:
        """Tell whether both differences are within tolerance; NaN is not."""
        return self.loss_difference <= LOSS_TOLERANCE and self.param_difference <= PARAM_TOLERANCE


def prove(model: GPT, batches: Sequence[PyTree], *, mesh: Mesh, plan: ts.ShardingPlan) -> Proof:
    """Train copies of a model on the same batches, on the mesh and by eager torch, and compare.

    Both use AdamW, as the demo does, with the same numbers (torch's and optax's defaults differ). The model must
    not draw random numbers, which would not be the same on both sides.

    Args:
        model: Is left as it is.
        batches: One per step.
        mesh: Devices of the compiled step.
        plan: How the compiled step splits the model.
    """
    optimizer = optax.adamw(LR, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
    in_torch = functools.partial(torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    training = Training(model, loss_fn, batches, (optimizer, in_torch), compute_dtype=None)
    return judge(compare_batches(training, mesh, plan))


def judge(comparison: Comparison) -> Proof:
    """Judge losses and parameters by a comparison."""
    loss = max(row.worst for row in comparison.rows if row.kind == "loss")
    worst = next(row for row in comparison.rows if row.kind == "parameter")  # the largest difference comes first
    return Proof(comparison.losses, loss, worst.worst, worst.name)
