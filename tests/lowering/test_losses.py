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
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._capture.trace import Spec, capture
from torch_shard._cost.total import costs_of
from torch_shard._lowering.ops import keeps_whole

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
    state = step.init()
    found = collectives_of(step.lower(state, batch).compile())
    assert {one.kind for one in found} == {"all-reduce"}
    sizes = [size for one in found for size in one.sizes]
    assert max(sizes) <= VOCABULARY * WIDTH // 2  # a shard's gradient, over `batch`
    assert sizes.count(max(sizes)) == (1 if tied else 2)  # of a matrix that is tied, both parts at once
    state, metrics = step(state, batch)
    loss = loss_fn(model, batch)
    loss.backward()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=2e-5)
    for name, parameter in model.named_parameters():
        wanted = (parameter - 0.5 * parameter.grad).detach().numpy()
        # float32 sums over a batch, in another order
        np.testing.assert_allclose(np.asarray(state.params[name]), wanted, rtol=2e-5, atol=2e-6)


def test_a_tied_gradient_goes_over_the_wire_once_and_narrow() -> None:
    with torch.device("meta"):
        model, batch = Model(tied=True), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    step = step_of(
        model,
        loss_fn,
        optax.sgd(0.5),
        mesh=ts.make_mesh(topology="v5e:2x2", batch=4),
        compute_dtype=torch.bfloat16,
        mixed_precision="params",
    )
    compiled = step.preview(batch).compiled
    assert compiled is not None
    received = sum(cost.received_bytes for cost in costs_of(compiled.as_text() or ""))
    assert received < 1.1 * 2 * 3 / 4 * VOCABULARY * WIDTH * 2  # an all-reduce over four, in bfloat16


def test_a_tied_gradient_is_never_whole_in_float32() -> None:
    """Under FSDP: each device keeps its features of the sum, and makes those of its own rows some at a time."""
    width = 384
    with torch.device("meta"):
        model, batch = Model(tied=True, width=width), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
    step = step_of(
        model, loss_fn, optax.sgd(0.5), mesh=mesh, plan=ts.plans.fsdp(model, mesh), compute_dtype=torch.bfloat16
    )
    compiled = step.preview(batch).compiled
    assert compiled is not None
    text = compiled.as_text() or ""
    assert f"bf16[{VOCABULARY},{width}]" in text
    assert f"f32[{VOCABULARY},{width // 4}]" in text
    assert f"f32[{VOCABULARY},{width}]" not in text


@pytest.mark.parametrize("width", [WIDTH, 256])
def test_a_tied_gradient_in_bfloat16_is_torchs(width: int) -> None:
    torch.manual_seed(0)
    model, batch = Model(tied=True, width=width), torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    step = step_of(
        model, loss_fn, optax.sgd(0.5), mesh=make_mesh((8, 1)), compute_dtype=torch.bfloat16, mixed_precision="params"
    )
    step.prove(step.init(), batch).raise_if_different()


@pytest.mark.parametrize("shape", [(6, 8), (2, 8, 3, 2), (8,)], ids=str)
def test_cross_entropy_comes_straight_from_the_logits(shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 8, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())

    def gradient(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, target)
        return [loss, *torch.autograd.grad(loss, x)], None

    graph = capture(gradient, [Spec(shape, torch.float32)], keep=keeps_whole).module.graph
    targets = {node.target for node in graph.nodes}
    assert torch.ops.torch_shard.cross_entropy.default in targets
    assert torch.ops.torch_shard.cross_entropy_backward.default in targets
    assert not targets & {torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default}


def test_logits_far_from_zero_lose_nothing() -> None:
    logits, target = torch.tensor([[1e4, 1e4 + 1, 1e4 - 1]]), torch.tensor([2])
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, target)
    found, grad = ts.jax_jit(ts.jax_value_and_grad(lambda x: F.cross_entropy(x, target)))(logits)
    torch.testing.assert_close(found.cpu(), loss.detach(), rtol=1e-6, atol=0)  # a rounding or two
    torch.testing.assert_close(grad.cpu(), torch.autograd.grad(loss, leaf)[0], rtol=1e-6, atol=1e-7)


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
    "cut to the first rows": (
        lambda x, y: F.cross_entropy(x[:-1, :3].flatten(0, 1), y[:-1, :3].flatten(), reduction="sum"),
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
    "flattened, then cut": (lambda x, y: F.cross_entropy(x.flatten(0, 1)[:-5], y.flatten()[:-5]), False),
    "classes in between": (lambda x, y: F.cross_entropy(narrow(x).transpose(1, 2)[:, :, :-1].float(), y[:, 1:]), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_takes_logits_as_the_model_made_them(name: str) -> None:
    """Without a copy of them that is widened, cut and flattened; values and gradients of eager torch."""
    loss_fn, takes_them = FORMS[name]
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 9), torch.randint(0, 9, (3, 5))
    targets[0, 2] = -100

    def both(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            loss = loss_fn(leaf, y)
            return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    specs = [Spec((3, 5, 9), torch.float32), Spec((3, 5), torch.int64)]
    nodes = capture(lambda *x: (both(*x), None), specs, keep=keeps_whole).module.graph.nodes
    taken = [node.args[0] for node in nodes if node.target is torch.ops.torch_shard.cross_entropy.default]
    assert any(tuple(node.meta["val"].shape) == (3, 5, 9) for node in taken) == takes_them
    for found, wanted in zip(ts.jax_jit(both)(logits, targets), both(logits, targets), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6)
