"""A run in eager torch, and the same run by torch_shard: models, optimizers, schedulers, and one step of each."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

ROWS, WIDTH = 8, 4


class Net(nn.Module):
    """Two layers, with what a life may have in them.

    Args:
        kind: "plain", "batch norm", "tied", "frozen", "dropout" (in eval mode) or "late": a layer that
            the loss does not reach at first.
        seed: Of its values.
    """

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind, self.reaches = kind, False
        self.first = nn.Linear(WIDTH, WIDTH, bias=kind != "batch norm")  # which would have a gradient of rounding alone
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.Identity()
        self.drop = nn.Dropout(0.5).eval() if kind == "dropout" else nn.Identity()
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "frozen":
            self.first.requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH) if kind == "late" else None
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.drop(self.norm(self.first(x)).tanh()))
        return x + self.late(x) if self.late is not None and self.reaches else x


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mean over rows, by a criterion that is made anew in each call, as in models of transformers."""
    out = model(batch)
    return nn.MSELoss()(out, torch.ones_like(out))


def batch(number: int) -> torch.Tensor:
    """The batch of this number in a life."""
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


KINDS = ("plain", "batch norm", "tied", "frozen", "dropout", "late")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.1),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "milestones": lambda o: lrs.MultiStepLR(o, [2, 5, 9], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 30),
    "function": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one after another": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1, 4), lrs.ExponentialLR(o, 0.9)], [4]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, 1, 4), lrs.ExponentialLR(o, 0.9)]),
}


@dataclasses.dataclass(frozen=True)
class About:
    """What stays the same in a life."""

    model: str
    optimizer: str
    groups: int
    scheduler: str
    clip_norm: float | None
    clip_value: float | None
    ema: float | None
    accumulate: int


@dataclasses.dataclass
class World:
    """A model with its optimizer and scheduler, as a script of torch has them."""

    about: About
    model: Net
    optimizer: Any
    scheduler: Any

    @classmethod
    def of(cls, about: About, model: Net) -> "World":
        """Optimizer and scheduler for a model."""
        params = [p for p in model.parameters() if p.requires_grad]
        half = len(params) // about.groups
        groups = [{"params": params[:half], "lr": 0.02}, {"params": params[half:]}] if about.groups > 1 else params
        optimizer = OPTIMIZERS[about.optimizer](groups)
        return cls(about, model, optimizer, SCHEDULERS[about.scheduler](optimizer))

    def train(self, x: torch.Tensor) -> None:
        """One step in eager torch."""
        self.optimizer.zero_grad()
        loss_fn(self.model, x).backward()
        if self.about.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.about.clip_norm)
        if self.about.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.about.clip_value)
        self.optimizer.step()
        self.step_scheduler()

    def step_scheduler(self) -> None:
        """What follows a step in a script."""
        if self.scheduler is not None:
            self.scheduler.step()

    def take_numbers(self, other: "World") -> None:
        """Go on with the schedule of another world, as a script does by state_dict."""
        for group, own in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))

    def moments(self, found: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """What the optimizer keeps, by parameter and name; of a state_dict, or of the optimizer itself."""
        kept: dict[str, Any] = found or self.optimizer.state_dict()
        names = {id(p): name for name, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        return {
            f"{order[number]} {key}": torch.as_tensor(value, dtype=torch.float64).cpu()
            for number, own in kept["state"].items()
            for key, value in own.items()
            if value is not None and key != "mu_product"  # NAdam's in float32
        }

    def rates(self) -> dict[str, torch.Tensor]:
        """The numbers of the groups that a life changes."""
        groups = enumerate(self.optimizer.param_groups)
        return {f"lr {number}": torch.tensor(group["lr"], dtype=torch.float64) for number, group in groups}
