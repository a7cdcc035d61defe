"""Losses over a split vocabulary, where neither table nor logits are ever gathered, and targets that are no class."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import collectives_of
from tests.oracles.derivatives import assert_equals_torch
from tests.oracles.graphs import nodes_of, targets_of
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._cost.total import costs_of
from torch_shard._lowering.ops import tied_embedding

VOCABULARY, WIDTH, BATCH, LENGTH = 256, 16, 8, 6


class Model(nn.Module):
    def __init__(self, tied: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=3)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(tokens)))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_split_vocabulary_stays_split(tied: bool) -> None:
    torch.manual_seed(0)
    model, batch = Model(tied), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    rules = {"tokens.weight": P("model")} | ({} if tied else {"head.weight": P("model")})
    step = step_of(model, loss_fn, optax.sgd(0.5), plan=ts.ShardingPlan(rules, default=P()))
    found = collectives_of(step.lower(step.structs, batch).compile())
    assert {one.kind for one in found} == {"all-reduce"}
    sizes = [size for one in found for size in one.sizes]
    assert max(sizes) <= VOCABULARY * WIDTH // 2  # a shard's gradient, over `batch`
    assert sizes.count(max(sizes)) == (1 if tied else 2)  # of a matrix that is tied, both parts at once
    step.prove(step.init(), batch).raise_if_different()


def tied_on_tpus(width: int, plan_of: Callable[..., ts.ShardingPlan], **options: Any) -> str:
    """What TPU's compiler makes of a step over four devices."""
    with torch.device("meta"):
        model, batch = Model(tied=True, width=width), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
    step = step_of(model, loss_fn, mesh=mesh, plan=plan_of(model, mesh), compute_dtype=torch.bfloat16, **options)
    compiled = step.preview(batch).compiled
    assert compiled is not None
    return compiled.as_text() or ""


def test_a_tied_gradient_goes_over_the_wire_once_and_narrow() -> None:
    text = tied_on_tpus(WIDTH, lambda model, mesh: ts.plans.replicated(), mixed_precision="params")
    received = sum(cost.received_bytes for cost in costs_of(text))
    assert received < 1.1 * 2 * 3 / 4 * VOCABULARY * WIDTH * 2  # an all-reduce over four, in bfloat16


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small matrix takes as many parts as a large one."""
    monkeypatch.setattr(tied_embedding, "_LARGEST_PART", 1)


@pytest.mark.usefixtures("in_parts")
def test_a_tied_gradient_is_never_whole_in_float32() -> None:
    """Under FSDP: each device keeps its features of the sum, and makes those of its own rows some at a time."""
    text = tied_on_tpus(384, ts.plans.fsdp)
    assert f"bf16[{VOCABULARY},384]" in text
    assert f"f32[{VOCABULARY},96]" in text
    assert f"f32[{VOCABULARY},384]" not in text


@pytest.mark.parametrize("largest_part", [1, 80 << 20])
def test_a_tied_gradient_in_bfloat16_is_torchs(largest_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_embedding, "_LARGEST_PART", largest_part)
    torch.manual_seed(0)
    model, batch = Model(tied=True, width=256), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    step = step_of(
        model, loss_fn, optax.sgd(0.5), mesh=make_mesh((8, 1)), compute_dtype=torch.bfloat16, mixed_precision="params"
    )
    step.prove(step.init(), batch).raise_if_different()


def gradient_of(loss_fn: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    loss = loss_fn(leaf, y)
    return [loss, *torch.autograd.grad(loss, leaf)]


@pytest.mark.parametrize("shape", [(6, 8), (2, 8, 3, 2), (8,)], ids=str)
def test_cross_entropy_comes_straight_from_the_logits(shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 8, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    targets = targets_of(lambda x, y: gradient_of(F.cross_entropy, x, y), [torch.empty(shape), target])
    assert torch.ops.torch_shard.cross_entropy.default in targets
    assert torch.ops.torch_shard.cross_entropy_backward.default in targets
    assert not targets & {torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default}


def test_logits_far_from_zero_lose_nothing() -> None:
    logits, target = torch.tensor([[1e4, 1e4 + 1, 1e4 - 1]]), torch.tensor([2])
    assert_equals_torch(lambda x: F.cross_entropy(x, target), [logits], rtol=1e-6, atol=1e-7)  # a rounding or two


def test_a_label_out_of_range_is_loud() -> None:
    """torch raises; a compiled program cannot, so the loss is not a number."""
    step = step_of(nn.Linear(8, 4), lambda m, b: F.cross_entropy(m(b[0]), b[1]), mesh=make_mesh((8, 1)))
    labels = torch.zeros(8, dtype=torch.int64)
    state, metrics = step(step.init(), (torch.ones(8, 8), labels))
    assert np.isfinite(metrics["loss"])
    labels[3] = 4
    _, metrics = step(state, (torch.ones(8, 8), labels))
    assert np.isnan(metrics["loss"])


def narrow(logits: torch.Tensor) -> torch.Tensor:
    return logits.bfloat16()


# Of logits of (B, T, C) and targets of (B, T); and whether the loss takes these very logits.
FORMS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "cut, flattened, widened": (
        lambda x, y: F.cross_entropy(narrow(x)[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten()),
        True,
    ),
    "widened, padded targets": (
        lambda x, y: F.cross_entropy(narrow(x).float().view(-1, 9), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1)),
        True,
    ),
    "class weights": (
        lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), torch.arange(9.0) + 1),
        True,
    ),
    "smooth": (
        lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), label_smoothing=0.1),
        True,  # and their log-softmax for the rest
    ),
    "for each row": (
        lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none").square().sum(),
        False,
    ),
    "not the first rows": (lambda x, y: F.cross_entropy(x[:, 1:].flatten(0, 1), y[:, 1:].flatten()), False),
    "classes in between": (lambda x, y: F.cross_entropy(narrow(x).transpose(1, 2)[:, :, :-1].float(), y[:, 1:]), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_takes_logits_as_the_model_made_them(name: str) -> None:
    """Without a copy of them that is widened, cut and flattened; values and gradients of eager torch."""
    loss_fn, takes_them = FORMS[name]
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 9), torch.randint(0, 9, (3, 5))
    targets[0, 2] = -100

    nodes = nodes_of(lambda x, y: gradient_of(loss_fn, x, y), [logits, targets])
    taken = [node.args[0] for node in nodes if node.target is torch.ops.torch_shard.cross_entropy.default]
    assert any(tuple(node.meta["val"].shape) == (3, 5, 9) for node in taken) == takes_them
    assert_equals_torch(loss_fn, [logits, targets], num=1, rtol=1e-5, atol=1e-6)
