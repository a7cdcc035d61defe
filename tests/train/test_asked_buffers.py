"""Python that asks a buffer for its value: the program is for that value, and another one for another."""

import dataclasses

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import mean_square, step_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value)


class Starts(Base):
    """A scale that is set from the first batch."""

    def __init__(self) -> None:
        super().__init__(started=torch.tensor(False), scale=torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if not self.started:
            self.scale.copy_(1 / y.detach().std(0))
            self.started.fill_(True)
        return y * self.scale


class Sums(Base):
    """Rows are summed into as many as a buffer of their places has."""

    def __init__(self) -> None:
        super().__init__(place=torch.tensor([0, 1, 1, 2, 0, 2, 3, 3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(self.place.max()) + 1
        return torch.zeros(size, 4).index_add(0, self.place, self.layer(x))


class Picks(Base):
    """Columns by a mask in a buffer, reshaped."""

    def __init__(self) -> None:
        super().__init__(kept=torch.tensor([True, False, True, True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, : self.kept.sum().item()] * x[:, self.kept].view(8, -1)


class Counts(Base):
    def __init__(self) -> None:
        super().__init__(count=torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) ** (2 + self.count.item())


class Norms(Base):
    """Norms that count their batches, each with a `forward` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(kind(4, momentum=None) for kind in (nn.SyncBatchNorm, OwnNorm)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms(self.layer(x))


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input).relu()


@pytest.mark.parametrize(("kind", "num_programs"), [(Starts, 2), (Sums, 1), (Picks, 1), (Norms, 1)])
def test_equals_eager_torch(kind: type[nn.Module], num_programs: int) -> None:
    """Of a flag that changes there are two programs."""
    assert agrees_with_torch(kind(), mean_square, [X, X + 1, X - 1]).num_compiles == num_programs


def test_a_value_that_stays_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(Sums())
    state, _ = step(step.init(seed=0), X)
    monkeypatch.setattr("torch_shard._loss.answers.to_host", None)  # reading waits for the step before
    for _ in range(3):
        state, _ = step(state, X)
    assert step.num_compiles == 1


def test_another_state_with_another_value_has_its_own_program() -> None:
    step = step_of(Sums())
    state = step.init(seed=0)
    other = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    state = dataclasses.replace(state, buffers={"place": ts.jax_view(other.to("jax")).astype("int32")})
    _, metrics = step(state, X)
    model = Sums()
    model.place.copy_(other)
    torch.testing.assert_close(torch.tensor(float(metrics["loss"])), mean_square(model, X).detach())


def test_a_value_that_changes_with_each_step_is_refused() -> None:
    step = step_of(Counts())
    state = step.init(seed=0)
    for _ in range(8):
        state, _ = step(state, X)
    wanted = (
        r"make_train_step: .*in forward: .*self\.count\.item\(\).*\n"
        r"Here Python asks for a value of the buffer count: it was 8 and is 9 "
        r"\(so far 1, 2, 3, .*, 9\), which would be program 9\. Work on it as a tensor"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        step(state, X)


def test_microbatches_that_need_several_programs_are_refused() -> None:
    step = step_of(Starts(), accumulate_steps=2)
    wanted = (
        r"make_train_step: .*if not self\.started:\nHere Python asks for a value of the buffer started: it was False "
        r"and is True in microbatch 1 of the same batch.* Use accumulate_steps=1"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        step(step.init(seed=0), X)


class OfModel(Base):
    """A number that the next call asks for, and that depends on what the model computes."""

    def __init__(self) -> None:
        super().__init__(used=torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * int(self.used)
        self.used.copy_((y > 0).sum())
        return y


def test_microbatches_that_may_need_several_programs_are_refused() -> None:
    step = step_of(OfModel(), accumulate_steps=2)
    wanted = (
        r"make_train_step: Python in the model asks for the value of used, which forward writes, .*accumulate_steps=1"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        step(step.init(seed=0), X)


def test_microbatches_ask_too() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.repeat(2, 1)).square().mean()  # the model wants eight rows

    step = step_of(Picks(), loss_fn, mesh=(2, 1), accumulate_steps=2)
    step.prove(step.init(seed=0), X).raise_if_different()


class ByAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.grid = torch.tensor([1, 2, 3])  # a plain attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.layer(x[:, :n].repeat(1, 6)[:, :6]) for n in self.grid.tolist())  # pyright: ignore


def test_an_attribute_that_is_asked_for_may_be_written() -> None:
    model = ByAttribute()
    step = step_of(model)
    state, metrics = step(step.init(seed=0), X)
    assert float(metrics["loss"]) == pytest.approx(mean_square(ByAttribute(), X).item(), rel=1e-5)
    model.grid[0] = 4
    torch_model = step.export(state)
    wanted = mean_square(torch_model, X).item()
    state, metrics = step(state, X)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert step.num_compiles == 2


class Warms(Base):
    """Another scale from the second batch on, by a count that Python asks for."""

    def __init__(self) -> None:
        super().__init__(n=torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if (self.n > 0).item():
            y = y * 10
        if self.training:
            self.n += 1
        return y


def test_an_evaluation_asks_the_state_and_not_the_model() -> None:
    model = Warms()
    step = step_of(model)
    state = step.init(seed=0)
    evaluate = step.evaluation()
    for _ in range(3):
        wanted = mean_square(step.export(state).eval(), X).item()
        assert float(evaluate(state, X)["loss"]) == pytest.approx(wanted, rel=1e-5)
        state, _ = step(state, X)
