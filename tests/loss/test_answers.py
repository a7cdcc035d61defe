"""Numbers that Python asks of a buffer or of the batch, given to one program with each call."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard._capture import Mismatch
from torch_shard._loss.loss_program import program_for

ROWS, WIDTH = 8, 4


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, ROWS, 6, generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


class Asking(nn.Module):
    def __init__(self, size: int = 40, **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, WIDTH)
        self.register_buffer("queue", torch.randn(WIDTH, size, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("at", torch.zeros(1).long())
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def size(self) -> int:
        return self.queue.shape[1]


class MoCo(Asking):
    """Momentum contrast, as published: keys of a slower encoder are written to a queue at a position."""

    def __init__(self, size: int = 40) -> None:
        super().__init__(size)
        self.slow = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.normalize(self.layer(x), dim=1)
        with torch.no_grad():
            for param, slow in zip(self.layer.parameters(), self.slow.parameters(), strict=True):
                slow.data = slow.data * 0.9 + param.data * (1.0 - 0.9)
            k = nn.functional.normalize(self.slow(x), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.2
        if self.training:
            self.enqueue(k)
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        at = int(self.at)
        assert self.size % len(keys) == 0
        self.queue[:, at : at + len(keys)] = keys.T
        self.at[0] = (at + len(keys)) % self.size


class Ring(Asking):
    """A queue whose size is no multiple of the batch, so that it wraps in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.layer(x)
        loss = (keys @ self.queue.clone()).square().mean()
        at, new = int(self.at), keys.detach().T
        if at + len(x) > self.size:
            rest = self.size - at
            self.queue[:, at:] = new[:, :rest]
            self.queue[:, : len(x) - rest] = new[:, rest:]
        else:
            self.queue[:, at : at + len(x)] = new
        self.at.fill_((at + len(x)) % self.size)
        return loss


class Indexed(Asking):
    """The same by indices, by a mask, by a roll, a single column, and a range in place of a slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, at = self.layer(x), self.at.item()
        fresh = torch.arange(self.size) < at
        loss = (keys @ self.queue.clone() * fresh).tanh().square().mean() + keys[:, at % WIDTH].mean()
        loss = (
            loss
            + (keys.mean() * torch.full((2,), at) / 100).sum()
            + (keys.sum(0) * torch.tensor([at] * WIDTH) / 100).mean()
        )
        places = torch.arange(at, at + len(x)) % self.size
        self.queue[:, places] = keys.detach().T
        self.queue[0, at] = 0.5
        self.queue.copy_(self.queue.roll(at, 1))
        self.at[0] = (at + len(x)) % self.size
        return loss


class Scaled(Asking):
    """A weight and a momentum that depend on the number of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at += 1
        n = int(self.at)
        y = self.layer(x)
        self.queue.mul_(1 - 1 / (n + 1)).add_(y.detach().mean(), alpha=1 / (n + 1))
        return y.square().mean() * n + (y.mean() / n - n) * 0.5**n + self.queue.mean()


class Deep(Asking):
    """Repeated layers, which run as a loop, before the position is asked for; and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = int(self.at)
        for block in self.blocks:
            x = x + block(x) * (1 + at / 100)
        keys = self.layer(x)
        loss = (keys @ self.queue.clone()).square().mean()
        self.queue[:, at : at + len(x)] = keys.detach().T
        self.at[0] = (at + len(x)) % self.size
        return loss


def trained(model: nn.Module, given: list[list[Any]], loss_fn: Callable[..., Any] = loss_of) -> nn.Module:
    """What eager torch makes of a model, by a step for each list of microbatches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for parts in given:
        optimizer.zero_grad()
        for part in parts:
            (loss_fn(model, part) / len(parts)).backward()
        optimizer.step()
    return model


def alone(count: int) -> list[list[torch.Tensor]]:
    """Batches that are one microbatch each."""
    return [[batch] for batch in batches(count)]


def step_of(model: nn.Module, loss_fn: Any = loss_of, mesh: Any = None, plan: Any = None, **options: Any) -> Any:
    mesh = mesh or ts.make_mesh(batch=2, model=2, devices=jax.devices()[:4])
    plan = ts.ShardingPlan(plan or {}, default=P())
    return ts.make_train_step(model, loss_fn, optax.sgd(0.1, momentum=0.9), mesh=mesh, plan=plan, **options)


def assert_alike(found: nn.Module, wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        # sums over rows are split over devices: float32 rounds otherwise
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "count", "most"),
    [pytest.param(Ring, 14, 4, marks=pytest.mark.slow), (Indexed, 7, 2), (Scaled, 7, 2), (Deep, 7, 2)],
)
def test_equals_eager_torch_with_few_programs(kind: type[Asking], count: int, most: int) -> None:
    model = kind(44) if kind is Ring else kind()
    wanted = trained(model, alone(count))
    step = step_of(model)
    state = step.init(seed=0)
    for batch in batches(count):
        state, _ = step(state, batch)
    assert_alike(step.export(state), wanted)
    assert step.num_compiles <= most
    if kind is Deep:  # the input of the first layer needs no gradient
        (program,) = step.programs
        assert [loop.num_iterations for loop in program.loops] == [3, 3]
        assert step.num_compiles == 2


def test_random_numbers_are_those_of_a_program_for_one_value() -> None:
    def loss_fn(model: Asking, batch: torch.Tensor) -> torch.Tensor:
        n = int(model.at)
        model.at.fill_(n + 1)
        return nn.functional.dropout(model.layer(batch), 0.5).square().mean() * n

    model, losses = Asking(), []
    step = step_of(model, loss_fn)
    state = step.init(seed=0)
    for batch in batches(3):
        fresh = step_of(model, loss_fn)
        _, special = fresh(jax.tree.map(jax.numpy.copy, state), batch)
        state, metrics = step(state, batch)
        losses.append((float(metrics["loss"]), pytest.approx(float(special["loss"]), rel=1e-6)))
    assert all(found == wanted for found, wanted in losses)
    assert step.num_compiles == 2


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    step = step_of(MoCo())
    state = step.init(seed=0)
    for batch in batches(3):
        state, _ = step(state, batch)
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
    step = step_of(MoCo(), plan={"queue": P(None, ("batch", "model"))})
    state = ts.Checkpointer(tmp_path).restore(step)
    for batch in batches(8)[3:]:
        state, _ = step(state, batch)
    assert_alike(step.export(state), trained(MoCo(), alone(8)))
    assert step.num_compiles == 2


def test_a_number_of_the_batch_differs_by_microbatch() -> None:
    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        return model.layer(x).square().sum() / int((labels > 0).sum())  # pyright: ignore

    step = step_of(Asking(), loss_fn, accumulate_steps=2)
    state, given = step.init(seed=0), []
    for number, x in enumerate(batches(6)):
        labels = torch.arange(ROWS) % (number + 2) - (number + torch.arange(ROWS)) // 6
        labels[0] = labels[2] = 1
        halves = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]])  # of each of two shards
        given.append([(x[rows], labels[rows]) for rows in halves])
        state, _ = step(state, (x, labels))
    assert_alike(step.export(state), trained(Asking(), given, loss_fn))
    assert step.num_compiles <= 2


def test_a_position_goes_on_from_microbatch_to_microbatch() -> None:
    step = step_of(Ring(40), mesh=ts.make_mesh(batch=1, model=2, devices=jax.devices()[:2]), accumulate_steps=2)
    state = step.init(seed=0)
    for x in batches(7):
        state, _ = step(state, x)
    assert_alike(step.export(state), trained(Ring(40), [x.split(ROWS // 2) for x in batches(7)]))
    assert step.num_compiles == 1


def test_microbatches_that_differ_in_more_than_numbers_are_refused() -> None:
    step = step_of(Ring(6), mesh=ts.make_mesh(batch=1, devices=jax.devices()[:1]), accumulate_steps=2)
    wanted = (
        r"make_train_step: .*at, new = int\(self\.at\), keys\.detach\(\)\.T\nHere Python asks for a value of the "
        r"buffer at: it was 0 and is 4 in microbatch 1 of the same batch, and one program runs all of them\. "
        r"Use accumulate_steps=1"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        step(step.init(seed=0), batches(1)[0])


def loss_where(evaluate: Any, state: Any, n: int) -> float:
    """The loss where the buffer `at` is this number."""
    there = dataclasses.replace(state, buffers={**state.buffers, "at": jax.numpy.full((1,), n)})
    return float(evaluate(there, batches(1)[0])["loss"])


def test_what_is_read_for_one_value_alone_is_seen_to_change() -> None:
    class Settings:
        late = 2.0

    settings = Settings()

    def loss_fn(model: Asking, batch: torch.Tensor) -> torch.Tensor:
        n = int(model.at)
        factor = settings.late if n > 2 else 2.0
        return model.layer(batch).square().mean() * factor + n

    model = Asking()
    step = step_of(model, loss_fn).evaluation()
    state = step_of(model, loss_fn).init(seed=0)

    def loss_at(n: int) -> float:
        return loss_where(step, state, n)

    square = loss_at(0)
    assert [loss_at(n) - n for n in (1, 2, 3, 4)] == pytest.approx([square] * 4, rel=1e-5)
    settings.late = 5.0
    assert [loss_at(n) - n for n in (1, 3, 4, 2)] == pytest.approx(
        [square, 2.5 * square, 2.5 * square, square], rel=1e-5
    )


def test_captures_of_several_steps_serve_each_other() -> None:
    def loss_fn(model: Asking, batch: torch.Tensor) -> torch.Tensor:
        return model.layer(batch).square().mean() * max(int(model.at), 2)

    model = Asking()
    first, second = step_of(model, loss_fn).evaluation(), step_of(model, loss_fn).evaluation()
    state = step_of(model, loss_fn).init(seed=0)

    square = loss_where(first, state, 1) / 2
    assert [loss_where(first, state, n) for n in (2, 1)] == [2 * square] * 2
    found = [loss_where(second, state, n) for n in (5, 2, 1, 5, 7, 2)]
    assert found == pytest.approx([n * square for n in (5, 2, 2, 5, 7, 2)], rel=1e-6)
    assert (first.num_compiles, second.num_compiles) == (1, 2)


def test_many_values_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def loss_fn(model: Asking, batch: torch.Tensor) -> torch.Tensor:
        n = int(model.at)
        model.at.fill_(n + 1)
        return model.layer(batch).square().mean() * n

    step = step_of(Asking(), loss_fn)
    state = step.init(seed=0)
    for _ in range(18):
        state, _ = step(state, batches(1)[0])
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "int(model.at)" in told
    assert "it was 0 and is 15. This is value 16: the loss is captured again for each" in told
    assert step.num_compiles == 2


def test_what_is_written_to_while_it_is_captured_is_refused() -> None:
    class Outdated:
        """A program whose values are other ones whenever it is asked."""

        def fit(self, values: object) -> Mismatch:
            return Mismatch("line 1", "a value of x", "1", "2")

        def carrying(self, other: object) -> "Outdated":
            return Outdated()

    program: Any = Outdated()
    with pytest.raises(
        NotImplementedError, match=r"it was 1 and is 2, while it was captured\. Ask for what nobody writes"
    ):
        program_for([program], cast(Any, None), lambda number: program)
