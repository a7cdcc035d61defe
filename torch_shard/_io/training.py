"""What training scripts of torch keep beside the weights: the states of the optimizer and of its scheduler."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._io.formats import HeldTensors, TensorFile, open_safetensors, open_torch, read_torch, refuse_foreign

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
    weights = HeldTensors(held[key], shown=f"{path}[{key!r}]")
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
        self._optimizer, self._scheduler = optimizer, scheduler
        self._names = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        wanted = {"optimizer": optimizer, "scheduler": scheduler}
        for part in (part for part, owner in wanted.items() if owner is not None and part not in file.parts):
            keys = OPTIMIZER if part == "optimizer" else SCHEDULER
            raise ValueError(
                f"{caller()}: {file.shown} has no state of the {part}: no {FILES[part]} in a directory, none of "
                f"{', '.join(map(repr, keys))} in a file. Leave out {part}= for the weights alone."
            )
        self._found = file.parts
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}

    def load(self) -> Callable[[], None]:
        """Let both load their states, on the CPU, whatever device the parameters are on."""
        optimizer, scheduler = self._optimizer, self._scheduler
        before = dict(vars(optimizer)), None if scheduler is None else dict(vars(scheduler))
        groups = [dict(group) for group in optimizer.param_groups]

        def undo() -> None:
            vars(optimizer).update(before[0])
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(own)
            if before[1] is not None:
                vars(scheduler).update(before[1])

        # States are cast to what parameters are: to tensors of the host, of which nothing is ever written.
        for group in optimizer.param_groups:
            group["params"] = [self._stand_ins.setdefault(p, _stand_in(p)) for p in group["params"]]
        try:
            optimizer.load_state_dict(self._by_number(dict(self._found["optimizer"])))
            self._check_shapes()
            if scheduler is not None:
                scheduler.load_state_dict(dict(self._found["scheduler"]))
        except Exception as error:
            undo()
            raise ValueError(
                f"{caller()}: the state of the optimizer or of its scheduler does not fit: {error} Make both as the "
                "script did that wrote the file: the same class, the same groups in the same order."
            ) from error
        return undo

    def _by_number(self, found: dict[str, Any]) -> dict[str, Any]:
        """A state that speaks of parameters by name, as `get_state_dict` of torch's checkpoints does, by number."""
        groups = found.get("param_groups", [])
        order = [name for own in self._names for name in own]
        theirs = [group["params"] for group in groups]
        if not any(isinstance(key, str) for own in theirs for key in own):
            theirs = [group.get("param_names", ()) for group in groups]
            if sorted(name for own in theirs for name in own) != sorted(order):
                return found  # by position, as torch does
        keys = {n: k for own, g in zip(theirs, groups, strict=True) for n, k in zip(own, g["params"], strict=True)}
        if list(map(sorted, theirs)) != list(map(sorted, self._names)):
            apart = sorted({*keys} ^ {*order})
            listed = f"{', '.join(apart[:8])} on one side alone" if apart else "the same names in other groups"
            raise ValueError(f"its state goes by the names of parameters, and has {listed}.")
        state = {n: found["state"][keys[name]] for n, name in enumerate(order) if keys[name] in found["state"]}
        numbers = iter(range(len(order)))
        pairs = zip(groups, self._names, strict=True)
        return {"state": state, "param_groups": [{**g, "params": [next(numbers) for _ in own]} for g, own in pairs]}

    def _check_shapes(self) -> None:
        for stand_in, state in self._optimizer.state.items():
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.ndim
                    and key in SAME_SHAPE
                    and value.shape != stand_in.shape
                ):
                    raise ValueError(
                        f"{key} has shape {tuple(value.shape)} for a parameter of shape {tuple(stand_in.shape)}."
                    )

    def adopt(self, now: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the optimizer have the parameters that the model has now."""
        final = {stand_in: now.get(param, param) for param, stand_in in self._stand_ins.items()}
        groups, state = self._optimizer.param_groups, self._optimizer.state
        for group in groups:
            group["params"] = [final[p] for p in group["params"]]
        for stand_in, param in final.items():
            if stand_in in state:
                state[param] = state.pop(stand_in)


SAME_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta", "exp_inf")
"""Slots that have the shape of their parameter."""


def _stand_in(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=param.requires_grad)
