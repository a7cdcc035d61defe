"""A run that is updated by one microbatch or several, of like or unlike shapes, as loops of others hand them over."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._device import BatchLayout
from torch_shard._loss import array_paths, flatten_batch
from torch_shard._sharding import ShardingPlan
from torch_shard._state import TrainState, present_state
from torch_shard._train import TrainStep, make_train_step

logger = logging.getLogger(__name__)


LossOf = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, PyTree]]

_NOTES = "notes"
"""The name of the metric with what microbatches give besides the loss."""


def _loss_of_list(loss_of: LossOf, model: Any, microbatches: list[PyTree]) -> tuple[torch.Tensor, dict[str, PyTree]]:
    total, notes = _parts(loss_of(model, microbatches[0]))
    notes_of_all = [notes]
    for microbatch in microbatches[1:]:
        loss, notes = _parts(loss_of(model, microbatch))
        total = total + loss
        notes_of_all.append(notes)
    return total, {_NOTES: notes_of_all}


def _loss_of_one(
    loss_of: LossOf, num_microbatches: int, model: Any, microbatch: PyTree
) -> tuple[torch.Tensor, dict[str, PyTree]]:
    loss, notes = _parts(loss_of(model, microbatch))
    # With a dim of their own, the notes of microbatches are joined by a step, and not averaged.
    one_by_one = jax.tree.map(lambda tensor: tensor[None], notes)
    # A step takes the mean of the losses.
    return loss * num_microbatches, {_NOTES: one_by_one}


def _parts(loss_and_notes: torch.Tensor | tuple[torch.Tensor, PyTree]) -> tuple[torch.Tensor, PyTree]:
    return loss_and_notes if isinstance(loss_and_notes, tuple) else (loss_and_notes, {})


class Updates:
    """A run of a model, and the steps that update it: each takes the microbatches of one update.

    Microbatches of one shape are taken in a loop, so that the memory is that of one. Those of unlike shapes are taken
    one after the other in one program, which keeps the activations of all. Rows that do not divide over the mesh, as
    those of the last batch of an epoch, are computed whole on each device: the same numbers, for one program more.

    Args:
        model: Any module.
        loss_of: `loss_of(model, microbatch)`: what a microbatch adds to the loss, plain torch; or a pair of that and of
            tensors in containers, which an update gives back for each microbatch.
        optimizer: As `make_train_step` takes it.
        mesh: Devices with Auto axes.
        plan: How each parameter and buffer is split.
        options: Further options of `make_train_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: Mesh,
        plan: ShardingPlan,
        options: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.state = None
        self._loss_of = loss_of
        self._mesh = mesh
        self._plan = plan
        self._options = dict(options)
        self.layout = BatchLayout(mesh, self._options.get("batch_spec"), plan.context, rows=plan.rows)
        self._steps: dict[tuple[int, bool], TrainStep] = {}
        self._has_warned = False

    state: TrainState | None
    """The last state; None before `begin`."""

    def step(self, num_microbatches: int, *, is_split: bool = True) -> TrainStep:
        """The step that takes this many microbatches.

        Args:
            num_microbatches: Of one shape, joined to one batch; 1 for a list of microbatches of any shapes.
            is_split: Whether rows are split over the mesh.
        """
        key = num_microbatches, is_split
        if key in self._steps:
            return self._steps[key]

        # The trainer is seen to be what the loss belongs to: as an argument, and not in what a function closes over.
        if num_microbatches == 1:
            loss_fn = functools.partial(_loss_of_list, self._loss_of)
        else:
            loss_fn = functools.partial(_loss_of_one, self._loss_of, num_microbatches)

        options: dict[str, Any] = {**self._options}
        if not is_split:
            options["batch_spec"] = PartitionSpec()
        self._steps[key] = make_train_step(
            self.model,
            loss_fn,
            self.optimizer,
            mesh=self._mesh,
            plan=self._plan,
            accumulate_steps=num_microbatches,
            **options,
        )
        return self._steps[key]

    def begin(self, num_microbatches: int, *, seed: int) -> None:
        """Let the model be on the mesh from now on, with its present values.

        Args:
            num_microbatches: Of the updates to come.
            seed: For the random numbers of the run.
        """
        self.state = self.step(num_microbatches).init(seed=seed)

    def go_on_from(self, num_steps: int) -> None:
        """Draw random numbers as after this many steps."""
        assert self.state is not None
        # With what was loaded into the model, which another state would not take up.
        state = present_state(self.state)
        self.state = dataclasses.replace(state, step=state.step - state.step + num_steps)

    def __call__(self, microbatches: Sequence[PyTree]) -> dict[str, PyTree]:
        """Update by the sum of what the microbatches add to the loss.

        Returns:
            `loss`, the sum; `grad_norm`, before clipping; `notes`, a list of what `loss_of` gives besides the loss for
            each microbatch.
        """
        assert self.state is not None
        batch: PyTree = list(microbatches)
        faults = self._faults(batch)

        # One batch, if the microbatches are alike and the rows of all divide.
        joined = self._joined(microbatches) if len(microbatches) > 1 else None
        is_joined = joined is not None and not self._faults(joined)
        if is_joined:
            batch, faults = joined, []

        is_split = not faults
        if not is_split and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: a batch that does not divide over the mesh is computed whole on each device, which takes longer. "
                "That is well for the last batch of an epoch; else choose a size that divides:\n%s",
                caller(),
                "\n".join(faults[:4]),
            )

        step = self.step(len(microbatches) if is_joined else 1, is_split=is_split)
        self.state, metrics = step(self.state, batch)
        if is_joined:
            stacked_notes = metrics[_NOTES]
            metrics[_NOTES] = []
            for number in range(len(microbatches)):
                notes = jax.tree.map(lambda stacked, number=number: stacked[number, 0], stacked_notes)
                metrics[_NOTES].append(notes)
        return metrics

    def _faults(self, batch: PyTree) -> list[str]:
        leaves, _ = flatten_batch(batch)
        return self.layout.faults(leaves, array_paths(batch))

    def _joined(self, microbatches: Sequence[PyTree]) -> PyTree | None:
        """One batch that a step cuts into these microbatches; None where they are not alike.

        A step cuts the rows of each device: of a batch of `n` microbatches over `d` shards, the `k`-th takes the `k`-th
        `n`-th of each shard.
        """
        if isinstance(self._options.get("batch_spec"), Mapping):
            return None
        leaves, signatures = zip(*map(flatten_batch, microbatches), strict=True)
        num_rows = {spec.shape[0] for spec in signatures[0].specs if spec.shape}
        if len(set(signatures)) > 1 or len(num_rows) != 1 or not self._has_equal_scalars(leaves):
            return None
        num_shards = self.num_shards
        if num_rows.pop() % num_shards:
            return None

        def join(*parts: Any) -> Any:
            if not isinstance(parts[0], torch.Tensor) or not parts[0].ndim:
                return parts[0]
            rest = parts[0].shape[1:]
            by_shard = torch.stack(parts).unflatten(1, (num_shards, -1))
            return by_shard.transpose(0, 1).reshape(-1, *rest)

        return jax.tree.map(join, *microbatches)

    @property
    def num_shards(self) -> int:
        """Over how many shards the rows of a batch are split."""
        num = 1
        for axis in self.layout.row_axes:
            num *= self._mesh.shape[axis]
        return num

    @staticmethod
    def _has_equal_scalars(leaves: Sequence[Sequence[PyTree]]) -> bool:
        """Tell whether all that has no rows is the same in each microbatch; what is no tensor is not joined."""
        for each in zip(*leaves, strict=True):
            if isinstance(each[0], torch.Tensor) and each[0].ndim:
                continue
            if any(bool(torch.as_tensor(leaf).ne(torch.as_tensor(each[0])).any()) for leaf in each):
                return False
            if not isinstance(each[0], torch.Tensor | int | float):
                return False
        return True
