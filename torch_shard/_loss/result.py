"""What a loss function may return: a loss, a loss with metrics, or a mapping or record of both; metric objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from torch_shard._capture import LateNumber
from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call

RESERVED = ("loss", "grad_norm", "guard")


def split_loss(out: PyTree) -> tuple[torch.Tensor, dict[str, PyTree]]:
    """Split what a loss function returned into a scalar and metrics, or say what it should return.

    Args:
        out: A tensor of one element; a pair of it and a dict of metrics; or a mapping, a named tuple or a dataclass
            that has it as `loss`, whose other entries are metrics where they are one number each.
    """
    pair = cast(tuple[PyTree, ...], out) if isinstance(out, tuple) else ()
    is_pair = len(pair) == 2 and isinstance(pair[1], dict)
    entries = None if is_pair else _entries(out)
    loss: PyTree = out
    metrics: dict[str, PyTree] = {}
    if is_pair:
        loss, metrics = cast(tuple[PyTree, dict[str, PyTree]], pair)
    elif entries is not None:
        loss = entries.get("loss")
        metrics = _scalars(entries)

    # Of loss.item() a LateNumber stands here: asking for its value raises an error that says what to return.
    if type(loss) is LateNumber:
        loss = loss.value

    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()):
        raise TypeError(
            f"{caller()}: loss_fn must return a scalar (a floating-point tensor of one element), a pair of it and a "
            f"dict of metrics, or a dict or record that has it as `loss`; it returned {_described(out, entries)}. "
            f"{_advice(pair, entries)}"
        )

    for name in metrics:
        if not isinstance(cast(object, name), str):
            raise TypeError(f"{caller()}: metrics are named by strings, but loss_fn names one {name!r}.")
    taken = [name for name in RESERVED if name in metrics]
    if taken:
        raise ValueError(f"{caller()}: the step itself reports {', '.join(taken)}; name that metric otherwise.")
    return loss.reshape(()), metrics


def _entries(out: Any) -> dict[str, PyTree] | None:
    """The entries of a mapping, or of a record that has a loss (a named tuple, a dataclass); None of anything else."""
    if isinstance(out, Mapping):  # and so Hugging Face's outputs
        return dict(cast(Mapping[str, PyTree], out))

    if dataclasses.is_dataclass(out):
        fields = [field.name for field in dataclasses.fields(out)]
    else:
        fields = getattr(out, "_fields", ())  # of a named tuple
    return {name: getattr(out, name) for name in fields} if "loss" in fields else None


def _scalars(entries: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Those besides the loss that are one number each, as scalars; predictions and the like are no metrics."""
    scalars: dict[str, PyTree] = {}
    for name, value in entries.items():
        if name == "loss" or not isinstance(value, torch.Tensor | int | float):
            continue
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1:
            scalars[name] = tensor.reshape(())
    return scalars


def _described(out: Any, entries: dict[str, PyTree] | None) -> str:
    """What a loss function returned, for an error."""
    if isinstance(out, torch.Tensor):
        return f"{tuple(out.shape)} {out.dtype}"
    if entries is not None:
        where = f"loss is {_described(entries['loss'], None)}" if "loss" in entries else "it has no loss"
        return f"{type(out).__name__} of {', '.join(map(str, entries)) or 'nothing'}, where {where}"

    pair = cast(tuple[Any, ...], out) if isinstance(out, tuple) else ()
    if len(pair) == 2:
        return f"{_described(pair[0], None)}, and {_described(pair[1], None)} where metrics are"
    return type(cast(object, out)).__name__


def _advice(pair: tuple[PyTree, ...], entries: Mapping[str, PyTree] | None) -> str:
    if entries is not None and entries.get("loss") is None:
        return "Models of transformers have a loss where the batch has `labels`."
    if len(pair) == 2 and isinstance(pair[0], torch.Tensor) and pair[0].numel() == 1:
        return 'Give metrics names: return loss, {"accuracy": accuracy}.'
    return "Reduce the loss with .mean() or .sum()."


def as_metric(value: PyTree) -> torch.Tensor:
    """A leaf of the metrics as a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach()

    # NumPy computes in float64 by default: such a number is taken as torch takes a float of Python.
    if isinstance(value, np.ndarray | np.generic) and cast(np.generic, value).dtype == np.float64:
        value = np.asarray(value, np.float32)
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{caller()}: metrics must be tensors or numbers, but loss_fn returns {value!r:.99} among them. A compiled "
            "program returns arrays alone: keep the rest outside."
        ) from error


def check_loss_fn(loss_fn: object) -> None:
    """Refuse what cannot be called with a model and a batch."""
    check_call("loss_fn", loss_fn, "model", "batch")
    if getattr(loss_fn, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"{caller()}: loss_fn is called with (model, batch), and {name} wants predictions and targets. Put them "
            "together: lambda model, batch: loss(model(batch[0]), batch[1])."
        )


EFFECTS = "tensors of effects"
"""The name of the metric that has the tensors for what is done after a step."""


def for_effects(tensors: Mapping[int, torch.Tensor]) -> dict[str, PyTree]:
    """Tensors of effects as a metric, each with a leading dim of one: microbatches are not to be averaged."""
    return {EFFECTS: {str(position): tensor[None] for position, tensor in tensors.items()}} if tensors else {}
