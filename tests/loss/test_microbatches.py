"""Microbatches within one program: eager torch's gradients, buffers and numbers; no communication for the split."""

import collections
import copy
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import collectives_of
from tests.oracles.eager import LEARNING_RATE, MOMENTUM, assert_close, optimizer
from tests.oracles.steps import anew
from tests.tables.cases import CASE, WHOLE, Dropping, make_mesh, squared_error


def make(model: nn.Module, loss_fn: Any, n: int, sizes: Any = (4, 2), optimizer: Any = None, **options: Any) -> Any:
    options = {"plan": WHOLE, "look_again": False, **options}
    optimizer = optimizer or optax.sgd(LEARNING_RATE)
    return ts.make_train_step(model, loss_fn, optimizer, mesh=make_mesh(sizes), accumulate_steps=n, **options)


def enlarged(batches: list[Any]) -> Any:
    """Several batches of a case as one."""
    return jax.tree.map(lambda *leaves: torch.cat(leaves), *batches)


def microbatch(batch: Any, k: int, n: int, shards: int) -> Any:
    """The rows of microbatch `k`: of each shard the `k`-th of `n` equal runs."""

    def rows(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([shard.chunk(n)[k] for shard in leaf.chunk(shards)]) if leaf.ndim else leaf

    return jax.tree.map(rows, batch)


def eager_step(model: nn.Module, loss_fn: Any, sgd: torch.optim.Optimizer, batch: Any, n: int, shards: int) -> Any:
    """What eager torch does with `n` microbatches: the mean loss, the losses and the gradients."""
    sgd.zero_grad()
    losses = []
    for k in range(n):
        loss = loss_fn(model, microbatch(batch, k, n, shards))
        (loss / n).backward()
        losses.append(loss.item())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sgd.step()
    return float(np.mean(losses)), grads


@pytest.mark.parametrize(
    ("name", "sizes", "n"),
    [("tied", (4, 2), 2), ("resnet_train", (2, 4), 4)],
)
def test_a_step_is_that_of_eager_torch(name: str, sizes: tuple[int, int], n: int) -> None:
    """Loss, gradients, parameters and buffers, batch norm's running ones too, over three steps."""
    case = CASE[name]
    model, num = case.model(), 3
    step = make(case.model(), case.loss_fn, n, sizes, optimizer(), plan=case.plan)
    state = step.init(seed=0)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = case.batches(num * n)
    for i in range(num):
        batch = enlarged(batches[i * n : (i + 1) * n])
        state, metrics = step(state, batch)
        loss, grads = eager_step(model, case.loss_fn, sgd, batch, n, sizes[0])
        np.testing.assert_allclose(metrics["loss"], loss, rtol=case.rtol)
        norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=10 * case.rtol)
        floor = 2e-6 * max(g.abs().max().item() for g in grads.values())  # as in tests/oracles/eager.py
        for entry, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            assert_close(state.tensors[entry], value.detach().numpy(), 10 * case.rtol, floor, entry)
        for entry, grad in grads.items():
            assert_close(state.opt_state[0][entry], grad.numpy(), 10 * case.rtol, floor, f"gradient of {entry}")
    assert step.num_compiles == 1


class Signed(torch.autograd.Function):
    """A derivative that is not linear in what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 0.01 * grad.sign()


@pytest.mark.parametrize("signed", [True, False])
def test_hooks_and_backward_passes_see_the_gradient_of_a_part(signed: bool) -> None:
    """As in `(loss / n).backward()`: gradients that they clip are not those of the whole loss, divided."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    wanted, batch, n = copy.deepcopy(model), torch.randn(16, 4), 4
    for each in (model, wanted):
        each[2].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)  # pyright: ignore[reportIndexIssue]
        return model[2](model[1](Signed.apply(x) if signed else x)).square().mean()  # pyright: ignore

    make(model, loss_fn, 2)(make(model, loss_fn, 2).init(), batch[:8])  # microbatches of the same shape, of another n
    step = make(model, loss_fn, n)
    state, _ = step(anew(step, wanted).init(), batch)
    eager_step(wanted, loss_fn, torch.optim.SGD(wanted.parameters(), LEARNING_RATE), batch, n, 4)
    for name, parameter in wanted.named_parameters():  # float32, one step
        np.testing.assert_allclose(state.params[name], parameter.detach(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_rows_of_a_microbatch_are_the_documented_ones() -> None:
    """Also where the leading dim is split over two axes, or not at all."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).mean(), {"rows": x[:, 0]}

    x = torch.arange(32.0)[:, None]
    for spec, shards in ((None, 4), (P(("batch", "model")), 8), (P(), 1), (P(None, "model"), 1)):
        wide = x.expand(32, 2).contiguous()
        step = make(nn.Linear(2, 1), loss_fn, 2, batch_spec=spec)
        _, metrics = step(step.init(), wide)
        wanted = [microbatch(wide, k, 2, shards)[:, 0] for k in range(2)]
        np.testing.assert_array_equal(metrics["rows"], np.stack(wanted), err_msg=str(spec))


def test_metrics() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, scale = batch
        out = model(x)
        correct = out[:, 0] > 0
        return scale * out.square().mean(), {
            "mean": out.mean(),
            "half": out.mean().to(torch.bfloat16),
            "correct": correct.sum(),
            "any": correct.any(),
            "nested": {"per_row": out[:, 0]},
            "size": x.shape[0],
        }

    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2), (torch.randn(16, 4), 0.5)
    with torch.no_grad():
        eager = [loss_fn(model, microbatch((batch[0], torch.tensor(0.5)), k, 2, 4)) for k in range(2)]
    step = make(model, loss_fn, 2)
    _, metrics = step(step.init(), batch)
    wanted = [m for _, m in eager]
    assert metrics["loss"].shape == metrics["mean"].shape == metrics["half"].shape == ()
    np.testing.assert_allclose(metrics["loss"], np.mean([loss.item() for loss, _ in eager]), rtol=1e-6)
    np.testing.assert_allclose(metrics["mean"], np.mean([m["mean"].item() for m in wanted]), rtol=1e-5)
    assert metrics["half"].dtype == jax.numpy.bfloat16
    assert [int(c) for c in metrics["correct"]] == [m["correct"].item() for m in wanted]
    assert [bool(c) for c in metrics["any"]] == [m["any"].item() for m in wanted]
    assert [int(s) for s in metrics["size"]] == [8, 8]
    rows = np.stack([m["nested"]["per_row"] for m in wanted])
    np.testing.assert_allclose(metrics["nested"]["per_row"], rows, rtol=1e-5, atol=1e-6)


def test_a_mean_over_all_tokens_by_their_number_in_the_batch() -> None:
    """The documented way to weigh tokens alike, and that a plain mean does not."""
    n, model = 2, nn.Linear(4, 3)

    def weighed(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") * n / batch["num_tokens"]

    def plain(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    y[::2] = -100  # the first of the two rows on each shard: the whole of microbatch 0 but for one
    y[0] = 1
    batch = {"x": x, "y": y, "num_tokens": int((y != -100).sum())}
    shards = 8
    wanted = F.cross_entropy(model(x), y).item()
    step = make(model, weighed, n, (shards, 1))
    np.testing.assert_allclose(step(step.init(), batch)[1]["loss"], wanted, rtol=1e-5)  # sums in another order
    step = make(model, plain, n, (shards, 1))
    assert abs(float(step(step.init(), batch)[1]["loss"]) - wanted) > 1e-2


def test_random_numbers_differ_between_microbatches_and_are_the_same_on_every_mesh() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        out = model(x)
        return out.square().mean(), {"kept": out != 0}

    masks = []
    for sizes in [(4, 2), (1, 8)]:
        torch.manual_seed(0)
        step = make(Dropping(), loss_fn, 2, sizes)
        masks.append(np.array(step(step.init(seed=0), torch.ones(16, 16))[1]["kept"]))
    assert masks[0].shape == (2, 8, 16)
    assert 0.2 < masks[0].mean() < 0.8  # 256 fair coins
    assert not np.array_equal(masks[0][0], masks[0][1])
    assert np.array_equal(masks[0], masks[1])


class Writing(nn.Module):
    """Forward writes a parameter and a buffer in place, and the result depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
            self.scale.mul_(0.5).add_(x.mean())
            self.layer.bias.mul_(0.5)
        return self.layer(x) * self.scale + self.count


def test_what_forward_writes_goes_from_one_microbatch_to_the_next() -> None:
    torch.manual_seed(0)
    model, batch = Writing(), (torch.randn(32, 4), torch.randn(32, 4))
    step = make(copy.deepcopy(model), squared_error, 4)
    state, metrics = step(step.init(), batch)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    loss, _ = eager_step(model, squared_error, sgd, batch, 4, 4)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)  # sums of float32 in another order
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        np.testing.assert_allclose(state.tensors[name], value.detach(), rtol=1e-5, atol=1e-6, err_msg=name)
    assert float(state.buffers["count"]) == 4


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """1 + 63 times 2^-9 is 1 in bfloat16, taken one at a time."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model.weight * x.mean()).sum()

    n, x = 64, torch.full((64, 1), 2.0**-9, dtype=torch.bfloat16)
    x[0] = 1
    step = make(nn.Linear(1, 1, bias=False).bfloat16(), loss_fn, n, (1, 1), optax.sgd(1.0))
    state = step.init()
    before = float(state.params["weight"][0, 0])
    state, metrics = step(state, x)
    assert state.params["weight"].dtype == jax.numpy.bfloat16
    wanted = (1 + 63 * 2**-9) / n
    np.testing.assert_allclose(metrics["grad_norm"], wanted, rtol=2**-8)  # half a unit in the last place of bfloat16
    assert before - float(state.params["weight"][0, 0]) == pytest.approx(wanted, abs=2**-8)


def test_the_split_adds_no_communication() -> None:
    """The same collectives as in a step on one microbatch; XLA leaves the gradients' in the loop on the CPU."""
    case = CASE["mlp"]
    parts = case.batches(4)
    found: list[collections.Counter[Any]] = []
    for n, batch in ((1, parts[0]), (4, enlarged(parts))):
        step = make(case.model(), case.loss_fn, n, plan=case.plan)
        program = collectives_of(step.lower(step.init(), batch).compile())
        # XLA sends several arrays together, in any order
        found.append(collections.Counter((one.kind, array) for one in program for array in one.arrays))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.ones(16, 4), torch.ones(16, 4)),
            r"(?s)accumulate_steps=3 microbatches on mesh \(batch=4, model=2\)\.\n\n  batch\[0\] \(16, 4\): dim 0 = 16 "
            r"is not a positive multiple of 12 = accumulate_steps=3 \* 4 shards \(batch_spec P\('batch'\)\).*"
            r"batch\[1\].*drop_last=True",
        ),
        (
            (torch.ones(24, 4), torch.ones(12, 4)),
            r"(?s)batch\[0\] \(24, 4\): 24 rows\n  batch\[1\] \(12, 4\): 12 rows.*agree",
        ),
        ((1.0, 2.0), r"(?s)only scalars.*leave accumulate_steps out"),
        ((torch.ones(0, 4), torch.ones(0, 4)), r"dim 0 = 0 is not a positive multiple of 12"),
    ],
    ids=["remainder", "rows", "scalars", "empty"],
)
def test_a_batch_that_cannot_be_split(batch: Any, message: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("traced")

    step = make(nn.Linear(4, 4), loss_fn, 3)
    with pytest.raises(ValueError, match=message):
        step(step.init(), batch)
