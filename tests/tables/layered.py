"""Models with repeated layers, and which loops they are: `(iterations, layers in each)`, forward then backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

from tests.tables.cases import BATCH, Case, regression
from tests.tables.layers import (
    DEPTH,
    WIDTH,
    Checkpointed,
    Collecting,
    Counting,
    NormBlock,
    Passing,
    Skipping,
    Stack,
    Transformer,
    Twice,
    WithRule,
)
from tests.tables.layers_with_effects import (
    Adding,
    Branching,
    Casting,
    HandingOver,
    Hooking,
    InPlace,
    Keeping,
    LeavingRules,
    Listing,
    Observed,
    ReadingLate,
    Recorded,
    Remembering,
    Sampling,
    Viewing,
    WithConstants,
    WritingAfter,
    _weight_normed,
    scaled_late,
)

FORTH_AND_BACK = ((DEPTH, 1), (DEPTH, 1))


def _varied(change: Callable[[Stack], Any], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack(**options)
        change(model)
        return model

    return build


def _alternating(model: Stack) -> None:
    for i, block in enumerate(model.blocks):
        block.scale = (1.0, 0.5)[i % 2]


def _frozen(model: Stack) -> None:
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)


def penalty(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return F.mse_loss(y, batch[1]) + grad.square().mean()


def with_sizes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) + sum(block.size for block in model.blocks)


@dataclasses.dataclass(frozen=True)
class Layered:
    """A case, the loops that it becomes, and what `step.report()` says of layers that are none."""

    case: Case
    loops: tuple[tuple[int, int], ...] = FORTH_AND_BACK
    says: str = ""


def _case(
    name: str, build: Callable[[], nn.Module], *loops: tuple[int, int], says: str = "", **options: Any
) -> Layered:
    shape = options.pop("shape", (WIDTH,))
    out = options.pop("out", WIDTH)
    rules = options.pop("rules", {})
    batch = options.pop("batch", regression(*shape, out=out))
    case = Case(name, build, batch, rules, **options)
    return Layered(case, loops or (() if says else FORTH_AND_BACK), says)


def _sequences() -> Any:
    return torch.randn(BATCH, 5, WIDTH), torch.randn(BATCH, 5, WIDTH)


MEGATRON = {"blocks.*.up.weight": P("model"), "blocks.*.up.bias": P("model"), "blocks.*.down.weight": P(None, "model")}

ONE_APART = {f"blocks.{i}.up.weight": P("model") for i in (0, 1, 2, 4, 5, 6)}

LAYERED = [
    _case("chain", Stack, rules=MEGATRON),
    _case("batch norm", lambda: Stack(NormBlock)),
    _case("buffers", lambda: Stack(Counting)),
    _case("two groups", Transformer, *[(DEPTH, 1)] * 4, batch=_sequences),
    _case("collected", Collecting, (DEPTH, 1), (DEPTH - 1, 1)),
    _case("twice", Twice, *[(DEPTH, 1)] * 4),
    _case("alternating", _varied(_alternating, depth=6), (3, 2), (3, 2)),
    _case("a rule of autograd", lambda: Stack(WithRule)),
    _case("passed on", Passing),
    _case("reentrant checkpoint", Checkpointed, (DEPTH, 1), (DEPTH, 2)),  # each computed again first
    _case("skips", Skipping, (DEPTH + 1, 1), (DEPTH - 1, 1), (DEPTH, 1), (DEPTH, 1)),
    _case("frozen", _varied(_frozen, depth=6), says="blocks.2"),
    _case("split otherwise", lambda: Stack(depth=7), says="blocks.3", rules=ONE_APART),
    _case("in place", lambda: Stack(InPlace), says="blocks.0: "),
    _case("a view", lambda: Stack(Viewing), says="a view"),
    _case("an attribute", lambda: Stack(Remembering), loss_fn=with_sizes),
    _case("a list", Sampling),
    _case("handed over", HandingOver, (DEPTH - 1, 1), (DEPTH - 1, 1)),
    _case("a second result of the last", lambda: Branching(second=[5]), (5, 1), (5, 1)),
    _case("left behind by two", lambda: Branching(third=[1, 4]), (2, 3), (2, 3)),
    _case("only a second result", lambda: Branching(second=[1, 4], detached=[2, 5]), says="layers next to it"),
    _case("given a list", Listing, says="layers next to it are other programs"),
    _case("a rule that reads late", lambda: Stack(ReadingLate), says="_Late.backward reads", loss_fn=scaled_late),
    _case("kept tables", lambda: Stack(Keeping)),
    _case("forward hooks", Observed),
    _case("parametrized", lambda: Stack(_weight_normed)),
    _case("constants", lambda: Stack(WithConstants)),
    _case("written afterwards", WritingAfter),
    _case("rules left behind", LeavingRules, says="are other programs"),
    _case("records and rules", Recorded),
    _case("hooks on the graph", lambda: Stack(Hooking), says="grad_fn"),
    _case("shapes between", Adding, says="do not take its result"),
    _case("autocast", Casting),
    _case("second derivative", Stack, says="derivative of its gradient", loss_fn=penalty),
]
