"""What training scripts of torch keep beside the weights: the states of the optimizer and of its scheduler."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._io.formats import TensorFile, held_tensors, open_safetensors, open_torch, read_torch, refuse_foreign

WEIGHTS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_schedulers")
"""The names of the parts, as nanoGPT, pytorch/examples, torch's tutorials, Lightning and timm write them."""

FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt"}
"""The parts that Trainer of Hugging Face writes beside the weights."""


@dataclasses.dataclass
class TrainingFile:
    """A checkpoint of a training script of torch.

    Attributes:
        shown: The file or directory, for messages.
        weights: Of the model.
        parts: The states of the optimizer and of the scheduler, those that are there.
    """

    shown: str
    weights: TensorFile
    parts: dict[str, Mapping[str, Any]]


def open_training(path: Path) -> TrainingFile:
    """Open a file of `torch.save` that holds weights and optimizer, or a directory as Trainer writes it."""
    refuse_foreign(path)
    if path.is_dir():
        has_safetensors = (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists()
        found = {part: read_torch(path / file) for part, file in FILES.items() if (path / file).is_file()}
        return TrainingFile(str(path), (open_safetensors if has_safetensors else open_torch)(path), found)
    if not path.is_file():
        raise FileNotFoundError(f"{caller()}: {path} does not exist.")
    held = read_torch(path)
    key = next((key for key in WEIGHTS if isinstance(held, Mapping) and isinstance(held.get(key), Mapping)), None)
    if key is None:
        listed = ", ".join(map(repr, held)) if isinstance(held, Mapping) else type(held).__name__
        raise ValueError(
            f"{caller()}: {path} holds {listed[:500]}, but no weights under one of {', '.join(map(repr, WEIGHTS))}. "
            "Read it with torch.load(path, weights_only=True), give load_torch the weights in place of the path, and "
            "call optimizer.load_state_dict(...) with the rest."
        )
    parts = {"optimizer": _part(held, OPTIMIZER, path), "scheduler": _part(held, SCHEDULER, path)}
    weights = held_tensors(held[key], f"{path}[{key!r}]")
    return TrainingFile(str(path), weights, {name: part for name, part in parts.items() if part is not None})


def _part(held: Mapping[str, Any], names: tuple[str, ...], path: Path) -> Mapping[str, Any] | None:
    """The part that has one of these names; of a list, as Lightning writes it, the only one."""
    name = next((name for name in names if held.get(name)), None)
    found = held[name] if name else None
    if isinstance(found, list):
        if len(found) != 1:
            raise ValueError(
                f"{caller()}: {path}[{name!r}] holds {len(found)} states, and nothing says which is meant. Read the "
                "file with torch.load(path, weights_only=True), and call load_state_dict(...) of each yourself."
            )
        return found[0]
    return found


class Restoring:
    """An optimizer of torch, and its scheduler, that take up the states of a file."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, file: TrainingFile, names: Mapping[torch.Tensor, str]
    ) -> None:
        self._owners = {"optimizer": optimizer} | ({} if scheduler is None else {"scheduler": scheduler})
        self._names = [names.get(p, "") for group in optimizer.param_groups for p in group["params"]]
        for part in (part for part in self._owners if part not in file.parts):
            keys = OPTIMIZER if part == "optimizer" else SCHEDULER
            raise ValueError(
                f"{caller()}: {file.shown} has no state of the {part}: no {FILES[part]} in a directory, none of "
                f"{', '.join(map(repr, keys))} in a file. Leave out {part}= for the weights alone."
            )
        self._found = file.parts
        # They take the place of the owners when all has been found to fit.
        self._loaded: dict[str, Any] = {part: _twin(owner) for part, owner in self._owners.items()}
        # States are cast to what parameters are: to tensors of the host, of which nothing is ever written.
        self._stand_ins = {p: _stand_in(p) for group in optimizer.param_groups for p in group["params"]}

    def load(self) -> None:
        """Load the states, on the CPU, whatever device the parameters are on; both owners stay as they are."""
        loaded, groups = self._loaded["optimizer"], self._owners["optimizer"].param_groups
        loaded.param_groups = [{**group, "params": [self._stand_ins[p] for p in group["params"]]} for group in groups]
        try:
            _check_order(self._found["optimizer"].get("param_groups", []), self._names)
            for part, twin in self._loaded.items():
                twin.load_state_dict(dict(self._found[part]))
            _check_shapes(loaded.state)
        except Exception as error:
            raise ValueError(
                f"{caller()}: the state of the optimizer or of its scheduler does not fit: {error} Make both as the "
                "script did that wrote the file: the same class, the same groups in the same order."
            ) from error

    def adopt(self, now: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let both have what was loaded, and the optimizer the parameters that the model has now."""
        final = {stand_in: now.get(param, param) for param, stand_in in self._stand_ins.items()}
        loaded = self._loaded["optimizer"]
        for group in loaded.param_groups:
            group["params"] = [final[p] for p in group["params"]]
        loaded.state = collections.defaultdict(dict, {final.get(p, p): held for p, held in loaded.state.items()})
        for part, owner in self._owners.items():
            vars(owner).update(vars(self._loaded[part]))


def _twin(owner: Any) -> Any:
    """An object with the same attributes."""
    found = object.__new__(type(owner))
    vars(found).update(vars(owner))
    return found


def _check_order(groups: Sequence[Mapping[str, Any]], own: list[str]) -> None:
    """Refuse a state that goes by names in another order: torch takes it by position."""
    names = [group["params"] if _has_names(group) else group.get("param_names", ()) for group in groups]
    theirs = [name for group in names for name in group]
    if theirs != own and (any(map(_has_names, groups)) or sorted(theirs) == sorted(own)):
        listed = ", ".join(f"{one} and {other}" for one, other in zip(theirs, own, strict=False) if one != other)
        how = "in another order" if sorted(theirs) == sorted(own) else "by other names"
        raise ValueError(f"its state goes by the names of parameters, {how} (as {listed[:200]}).")


def _has_names(group: Mapping[str, Any]) -> bool:
    return any(isinstance(each, str) for each in group["params"])


def _check_shapes(states: Mapping[Any, Mapping[str, Any]]) -> None:
    for param, state in states.items():
        for key in SAME_SHAPE & state.keys():
            found = state[key]
            if isinstance(found, torch.Tensor) and found.ndim and found.shape != param.shape:
                raise ValueError(f"{key} has shape {tuple(found.shape)} for a parameter of shape {tuple(param.shape)}.")


SAME_SHAPE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta", "exp_inf"}
"""Slots that have the shape of their parameter."""


def _stand_in(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=param.requires_grad)
