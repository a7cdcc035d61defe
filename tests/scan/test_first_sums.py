"""Layers between which other things stand, against eager torch: all of them are one loop, there and back."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.tables.cases import chosen

LAYERS, WIDTH, WORDS = 4, 8, 16


class Block(nn.Module):
    """A layer that does not add to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is to be added."""
        return self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Layers, put together by a function of their number, what goes through them, and a value that all read."""

    def __init__(self, around: "Around") -> None:
        super().__init__()
        self.around = around
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        shared = torch.tanh(x)
        for number in range(LAYERS):
            x = self.around(self, number, x, shared)
        return self.head(x)


Around = Callable[[Tower, int, torch.Tensor, torch.Tensor], torch.Tensor]

KINDS: dict[str, Around] = {
    "before and after": lambda m, i, x, shared: 0.5 * (x + m.layers[i](torch.tanh(x))),
    "dropout": lambda m, i, x, shared: x + m.drop(m.layers[i](x)),
    "a value that all read": lambda m, i, x, shared: x + m.layers[i](x) * shared,
    "one norm": lambda m, i, x, shared: x + m.layers[i](m.norm(x)),
}

STAGES = ("before and after", "a value that all read")
LOOPS = ("before and after", "one norm", "dropout")


def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the tokens themselves."""
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def prove(kind: str, plan: ts.ShardingPlan, **axes: int) -> str:
    """Compare a step with eager torch; what it reports of itself."""
    torch.manual_seed(0)
    with jax.enable_x64(True):  # sums in another order then differ by 1e-15
        options: dict[str, Any] = {"mesh": ts.make_mesh(**axes), "plan": plan, "accumulate_steps": 2}
        step = ts.make_train_step(Tower(KINDS[kind]).double(), loss_fn, optax.adamw(1e-2), scan_layers=True, **options)
        ids = torch.randint(0, WORDS, (8, 4), generator=torch.Generator().manual_seed(0))
        step.prove(step.init(seed=0), ids).raise_if_different()
        return step.report()


@pytest.mark.parametrize("kind", chosen(LOOPS, ("before and after", "one norm")))
def test_all_layers_are_one_loop(kind: str) -> None:
    report = prove(kind, ts.plans.replicated(), batch=2)
    assert report.count(f"one loop, {LAYERS} iterations") == 2
    assert "layers.0" not in [line.split(":")[0] for line in report.splitlines() if "not in a loop" in line]


@pytest.mark.parametrize("kind", chosen(STAGES, ("a value that all read",)))
def test_they_are_stages(kind: str) -> None:
    assert "layers.0 to layers.3: 2 stages" in prove(kind, ts.plans.pipeline(ts.plans.replicated()), batch=2, stage=2)
