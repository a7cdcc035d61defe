"""Training scripts of torch, each with the optimizer and the schedule of its own recipe, beside eager torch.

The recipes are those of pytorch/examples, nanoGPT, minGPT, litgpt, MAE and ConvNeXt, at tiny size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import GPT

STEPS = 6


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def tokens(seed):
    return torch.randint(0, 16, (8, 9), generator=torch.Generator().manual_seed(seed))


class Mnist(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return self.fc((x + self.conv(x)).mean((2, 3)))


def of_classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def by_decay(model, decay):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


class Cosine:
    """nanoGPT's and litgpt's schedule: assigned to the groups in the loop, with a warmup."""

    def __init__(self, optimizer, peak=3e-3, warmup=2, total=STEPS):
        self.optimizer, self.number = optimizer, 0
        self.rate = lambda n: (
            peak * (n + 1) / warmup if n < warmup else peak * 0.5 * (1 + math.cos(math.pi * n / total))
        )
        self.assign()

    def assign(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.number)

    def step(self):
        self.number += 1
        self.assign()


@dataclasses.dataclass
class Script:
    """A script: what it trains, on what, and how."""

    model: Callable[[], nn.Module]
    loss_fn: Callable[..., torch.Tensor]
    batch: Callable[[int], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[Any], Any] = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    clip: float | None = None


optim, lr_scheduler = torch.optim, torch.optim.lr_scheduler
SCRIPTS = {
    "mnist": Script(
        Mnist, lambda m, b: F.nll_loss(m(b[0]), b[1]), images, lambda m: optim.Adadelta(m.parameters(), lr=1.0),
        lambda o: lr_scheduler.StepLR(o, step_size=1, gamma=0.7),
    ),
    "nanoGPT": Script(
        GPT, next_token, tokens, lambda m: optim.AdamW(by_decay(m, 0.1), lr=6e-4, betas=(0.9, 0.95)), Cosine, clip=1.0,
    ),
    "ConvNeXt": Script(
        ResNet, of_classes, images, lambda m: optim.AdamW(by_decay(m, 0.05), lr=4e-3),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
        ),
    ),
}  # fmt: skip


def made(script):
    torch.manual_seed(0)
    model = script.model()
    optimizer = script.optimizer(model)
    return model, optimizer, script.schedule(optimizer)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_in_torch(name):
    script = SCRIPTS[name]
    model, optimizer, schedule = made(script)
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = script.loss_fn(model, script.batch(number))
        loss.backward()
        if script.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())

    model, optimizer, schedule = made(script)
    mesh = ts.make_mesh(batch=4, model=2)
    step = step_of(model, script.loss_fn, optimizer, mesh=mesh, clip_grad_norm=script.clip)
    state, found = step.init(seed=0), []
    for number in range(STEPS):
        state, metrics = step(state, script.batch(number))
        schedule.step()
        found.append(float(metrics["loss"]))
    # float32: an optimizer that divides by the root of squares makes a whole step of a gradient that is only rounding
    assert found == pytest.approx(expected, rel=2e-4)
    assert step.num_compiles == 1
