"""What Python changes between two calls of a loss or an adapter: followed, or an error that names the line."""

import collections
import copy
import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles import steps

X = torch.ones(8, 4)


sgd_step = functools.partial(steps.sgd_step, look_again=True)


class Drops(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.draw() < 0.999999 else x


class Helper:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def draw(self) -> float:
        return float(self.rng.random())


def counting() -> Callable[[], Any]:
    box = {"n": 0}

    def factor() -> torch.Tensor:
        box["n"] += 1
        return torch.tensor(min(1.0, box["n"] / 10))

    return factor


def popping() -> Callable[[], Any]:
    return collections.deque(torch.tensor(float(n)) for n in range(9)).popleft


def test_a_loss_that_depends_on_a_count_of_its_own_is_refused() -> None:
    factor = counting()
    step = sgd_step(nn.Linear(4, 4), lambda m, x: (m(x) * factor()).square().mean())
    with pytest.raises(NotImplementedError, match=r"test_look_again\.py.*\nHere Python asks for a number"):
        step(step.init(), X)


CHANGING: dict[str, Callable[[], Callable[[], Any]]] = {
    "iterator": lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).__next__,
    "count": lambda: itertools.count().__next__,
    "queue": popping,
    "clock": lambda: time.perf_counter,
    "array": lambda: (torch.from_numpy(np.full(1, n, np.float32)) for n in itertools.count()).__next__,
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_loss_that_changes_is_refused_at_its_second_call(name: str) -> None:
    factor, model = CHANGING[name](), nn.Linear(4, 4)
    step = sgd_step(model, lambda m, x: (m(x) * factor()).square().mean())
    state, _ = step(step.init(), X)
    with pytest.raises(NotImplementedError, match=r"test_look_again\.py.*\nHere aten.* and at the next call .*another"):
        step(state, X)


def test_it_is_not_looked_at_where_that_is_left_out() -> None:
    factor = CHANGING["count"]()
    step = sgd_step(nn.Linear(4, 4), lambda m, x: (m(x) * factor()).square().mean(), look_again=False)
    state = step.init()
    for _ in range(3):
        state, _ = step(state, X)


@pytest.mark.parametrize("draw", [np.random.default_rng(0).random, random.Random(0).random, Helper().draw])
def test_a_generator_that_a_model_holds_is_refused_however_rarely_it_matters(draw: Callable[[], float]) -> None:
    step = sgd_step(Drops(draw), lambda m, x: m(x).square().mean())
    with pytest.raises(NotImplementedError, match=r"test_look_again\.py.*\nHere the captured function draws"):
        step(step.init(), X)


@pytest.mark.parametrize("read", [torch.mean, lambda t: t.mean().item()])
@pytest.mark.parametrize("write", [lambda t: t.data.mul_(0.5), lambda t: np.multiply(t.numpy(), 0.5, t.numpy())])
def test_tensors_that_are_closed_over_are_read_anew(
    write: Callable[[torch.Tensor], object], read: Callable[[torch.Tensor], Any]
) -> None:
    teacher = torch.linspace(0, 1, 4096).reshape(1024, 4)
    step = sgd_step(nn.Linear(4, 4), lambda m, x: (m(x) * 0 + read(teacher)).mean())
    state, found = step.init(), []
    for _ in range(3):
        state, metrics = step(state, X)
        found.append(float(metrics["loss"]))
        write(teacher)
    np.testing.assert_allclose(found, [0.5, 0.25, 0.125], rtol=1e-5)  # float32 sums


ADAPTERS = [ts.jax_jit, ts.jax_grad, ts.jax_value_and_grad, lambda f: ts.jax_grad(ts.jax_jit(f))]
ADAPTERS += [lambda f: ts.jax_jit(ts.jax_vmap(f))]


@pytest.mark.parametrize("adapt", ADAPTERS)
def test_adapters_follow_what_they_read_and_look_again(adapt: Callable[[Any], Any]) -> None:
    weight = {"value": 1.0}
    fn = adapt(lambda x: (x * weight["value"]).sum())
    first = fn(torch.ones(3))
    weight["value"] = 3.0
    pairs = zip(torch.utils._pytree.tree_leaves(first), torch.utils._pytree.tree_leaves(fn(torch.ones(3))), strict=True)
    assert all(torch.equal(3 * a.cpu(), b.cpu()) for a, b in pairs)
    factor = itertools.count(1.0)
    fn = adapt(lambda x: (x * next(factor)).sum())
    fn(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"is another function when it is called again"):
        fn(torch.ones(3))


def normed() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


WRITES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "an operator": lambda m: m[1].running_var.mul_(2),
    "data": lambda m: m[0].weight.data.clamp_(-0.01, 0.01),  # the critic of a WGAN
    "its own values": lambda m: m.load_state_dict(m.state_dict()),
    "others": lambda m: m.load_state_dict(normed().state_dict()),
    "one row": lambda m: m[2].weight[1].zero_(),
}


def test_what_is_written_to_entries_is_in_the_next_step() -> None:
    model, eager = normed(), normed()
    loss_fn = lambda m, x: m(x).square().mean() + m[1].running_var.sum()  # noqa: E731
    step, sgd = sgd_step(model, loss_fn), torch.optim.SGD(eager.parameters(), lr=0.1)
    state, x = step.init(), torch.randn(8, 4)
    for name, write in WRITES.items():
        for each in (model, eager):
            with torch.no_grad():
                write(each)
        state, metrics = step(state, x)
        sgd.zero_grad()
        loss = loss_fn(eager, x)
        loss.backward()
        sgd.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5, err_msg=name)
        for entry, value in eager.state_dict().items():
            torch.testing.assert_close(model.state_dict()[entry].cpu(), value, rtol=1e-5, atol=1e-6, msg=name)
    assert step.num_compiles == 1


def test_a_parameter_that_is_replaced_is_refused() -> None:
    model = normed()
    step = sgd_step(model, lambda m, x: m(x).square().mean())
    state, _ = step(step.init(), X)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"0\.weight of the model was replaced since"):
        step(state, X)
    assert not np.asarray(step.init().params["0.weight"]).any()


def test_data_of_what_is_closed_over_is_not_set_in_a_loss() -> None:
    last = torch.zeros(8, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = (model(x) - last).square().mean()
        last.data = model(x).detach()
        return found

    step = sgd_step(nn.Linear(4, 4), loss)
    with pytest.raises(NotImplementedError, match="writes in place to tensors that it closes over"):
        step(step.init(), X)


def test_entries_that_come_where_there_were_none_are_refused() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", None)
    step = sgd_step(model, lambda m, x: (m(x) * (m._buffers["scale"] or 1)).square().mean())
    state, _ = step(step.init(), X)
    model._buffers["scale"] = torch.zeros(())
    with pytest.raises(ValueError, match=r"scale of the model was added, removed.* Make a new step"):
        step(state, X)


class MakesModules(nn.Module):
    """As models of transformers make their criterion in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(nn.Tanh(), copy.deepcopy(nn.Flatten()))(self.layer(x))


def test_modules_that_are_made_in_each_call_change_nothing() -> None:
    kept: list[nn.Module] = []  # so that no module has the address of one before it

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.append(nn.MSELoss())
        return kept[-1](model(x), x)

    model = MakesModules()
    step = sgd_step(model, loss_fn)
    state, adapted = step.init(seed=0), ts.jax_jit(lambda x: nn.CrossEntropyLoss()(x, torch.zeros(8).long()))
    for _ in range(3):
        state, _ = step(state, X)
        adapted(X)
    assert step.num_compiles == 1
