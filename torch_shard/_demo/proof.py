"""The proof: the same training, step by step, by torch_shard on the mesh and by eager torch on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
import torch

import torch_shard as ts
from torch_shard._demo.model import GPT, loss_fn

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
    """How far two trainings are apart, relatively: max |a - b| / max |b|, b being torch's, over one tensor.

    Attributes:
        losses: Torch's loss at each step.
        loss_difference: Largest over the steps.
        param_difference: Largest over the parameters after the last step.
        worst_param: Its name.
    """

    losses: tuple[float, ...]
    loss_difference: float
    param_difference: float
    worst_param: str

    @property
    def holds(self) -> bool:
        """Whether both differences are within tolerance; NaN is not."""
        return self.loss_difference <= LOSS_TOLERANCE and self.param_difference <= PARAM_TOLERANCE


def prove(model: GPT, batches: Sequence[Any], *, mesh: Any, plan: ts.ShardingPlan) -> Proof:
    """Train copies of a model on the same batches, on the mesh and by eager torch, and compare.

    Both use AdamW, as the demo does, with the same numbers (torch's and optax's defaults differ). The model must
    not draw random numbers, which would not be the same on both sides.

    Args:
        model: Its parameters are changed: torch trains it in place.
        batches: One per step.
        mesh: For torch_shard.
        plan: Likewise.
    """
    # The state holds its own values, so the model can be trained by torch afterwards.
    losses, params = _train_on_mesh(model, batches, mesh, plan)
    torch_losses = _train_in_torch(model, batches)
    return compare(losses, torch_losses, params, dict(model.named_parameters()))


def compare(
    losses: Sequence[float],
    torch_losses: Sequence[float],
    params: Mapping[str, torch.Tensor],
    torch_params: Mapping[str, torch.Tensor],
) -> Proof:
    """Compare two trainings.

    Args:
        losses: By torch_shard, one per step.
        torch_losses: By torch.
        params: By torch_shard, after the last step, by name.
        torch_params: By torch; the names must be the same.
    """
    if params.keys() != torch_params.keys():
        raise ValueError(f"compare: the names differ: {sorted(params.keys() ^ torch_params.keys())}.")
    by_step = [relative_difference(torch.tensor(a), torch.tensor(b)) for a, b in zip(losses, torch_losses, strict=True)]
    by_name = {name: relative_difference(params[name], torch_params[name].detach()) for name in params}
    worst = max(by_name, key=lambda name: _nan_to_inf(by_name[name]))
    return Proof(tuple(torch_losses), max(map(_nan_to_inf, by_step)), _nan_to_inf(by_name[worst]), worst)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b| / max |b|; 0 where both are all zeros."""
    difference = (a.double() - b.double()).abs().max()
    return 0.0 if difference == 0 else float(difference / b.double().abs().max())


def _nan_to_inf(value: float) -> float:
    # max() would pass over a NaN, with which everything compares false.
    return value if value == value else float("inf")


def _train_on_mesh(
    model: GPT, batches: Sequence[Any], mesh: Any, plan: ts.ShardingPlan
) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = optax.adamw(LR, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
    step = ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan)
    state, losses = step.init(), []
    # Accelerators multiply float32 in fewer bits by default, torch on the CPU does not.
    with jax.default_matmul_precision("highest"):
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, ts.gather(state.params)


def _train_in_torch(model: GPT, batches: Sequence[Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
