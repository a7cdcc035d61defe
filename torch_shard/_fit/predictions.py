"""Metrics of all predictions of an evaluation, as F1 or AUROC are, which are no means over batches."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import torch

from torch_shard._capture import is_metric
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call
from torch_shard._device import gather
from torch_shard._state import TrainState
from torch_shard._train import ApplyStep, ShardedBatch, TrainStep

Compute = Callable[[Any], Mapping[str, Any]]


class _Predict(ApplyStep):
    caller = "fit"


class Predictions:
    """What `predict` returns for the batches of an evaluation, and the metrics of all of it.

    Args:
        step: Whose model, mesh and plan.
        predict: `predict(model, batch)`, plain torch.
        compute: A function of all predictions, or an object of torchmetrics.

    Attributes:
        step: It gives them.
    """

    def __init__(self, step: TrainStep, predict: object, compute: object) -> None:
        if predict is None or compute is None:
            raise TypeError(
                "fit: compute_metrics= and predict= go together: predict(model, batch) returns the tensors that "
                "compute_metrics takes, as in predict=lambda model, batch: (model(batch[0]), batch[1])."
            )
        if not is_metric(compute):
            check_call("compute_metrics", compute, "predictions")
        check_call("predict", predict, "model", "batch")
        self.step = _Predict(step.model, cast(Any, predict), step.options.for_evaluation())
        self._compute, self._batches = cast(Any, compute), list[PyTree]()

    def begin(self) -> None:
        """Forget the evaluation before."""
        self._batches = []
        if is_metric(self._compute):
            self._compute.reset()

    def add(self, state: TrainState, batch: ShardedBatch) -> None:
        """Take up those of a batch, as CPU tensors with all its rows."""
        found = gather(self.step(state, batch))
        if not is_metric(self._compute):
            self._batches.append(found)
        elif isinstance(found, Mapping):
            self._compute.update(**found)
        else:
            self._compute.update(*(found if isinstance(found, tuple | list) else (found,)))

    def metrics(self) -> dict[str, float]:
        """The metrics of all of them."""
        found = self._compute.compute() if is_metric(self._compute) else self._compute(self._all())
        if isinstance(found, torch.Tensor) and is_metric(self._compute):
            found = {type(self._compute).__name__: found}
        if not isinstance(found, Mapping):
            raise TypeError(f"fit: compute_metrics must return a dict of numbers, got {type(found).__name__}.")
        return {str(name): _number(name, value) for name, value in cast(Mapping[Any, Any], found).items()}

    def _all(self) -> PyTree:
        def joined(*parts: Any) -> torch.Tensor:
            tensors = [torch.atleast_1d(torch.as_tensor(part)) for part in parts]
            for number, tensor in enumerate(tensors):
                if tensor.shape[1:] != tensors[0].shape[1:]:
                    raise ValueError(
                        f"fit: predict gives {tuple(tensors[0].shape)} for the first batch of the evaluation and "
                        f"{tuple(tensor.shape)} for batch {number}, which only rows may tell apart. Pad the batches to "
                        "one length, or give an object of torchmetrics, which takes them one by one."
                    )
            return torch.cat(tensors)

        return jax.tree.map(joined, *self._batches)


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f" {value!r}"
        raise TypeError(
            f"fit: compute_metrics must return a number for {name!r}, got {type(value).__name__}{shape}."
        ) from None
