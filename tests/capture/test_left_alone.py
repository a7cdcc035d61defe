"""After any capture, right, refused or raising in the middle, the user's model is to the bit what it was."""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.overrides import TorchFunctionMode

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.steps import anew, step_of
from tests.tables import layered, layers_with_effects, models, odd, semantics
from tests.tables.cases import Case, chosen, make_mesh
from tests.tables.semantics import WIDTH, built
from torch_shard._loss.answers import HostValues
from torch_shard._loss.batch import flatten_batch
from torch_shard._loss.capture import loss_program
from torch_shard._loss.joint import LossSource


def attributes(model: nn.Module) -> list[object]:
    """All that a model holds, by identity; contents of containers and records too, in order."""
    return [(path, *_within(vars(m), 4), vars(m).keys()) for path, m in model.named_modules(remove_duplicate=False)] + [
        (name, p._grad, p.requires_grad, p.is_leaf, p._backward_hooks, sorted(vars(p)))
        for name, p in model.named_parameters()
    ]


def live(model: nn.Module) -> nn.Module:
    """The model with the tensors of a run, which later runs go on with."""
    step_of(model).init()
    return model


def _within(value: object, depth: int) -> Iterator[object]:
    if depth and isinstance(value, dict | list | set | SimpleNamespace):
        items = vars(value) if isinstance(value, SimpleNamespace) else value
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        for key, item in list(pairs):
            yield key if isinstance(key, str | int) else id(key)
            yield from _within(item, depth - 1)
    elif isinstance(value, bool | int | float | str | None):
        yield value
    else:
        yield id(value)


ALIKE = {"*.a.weight": P("model")}
"""Rules by which layers may be one loop."""


class RegistersAtFirst(nn.Module):
    """A causal mask made at the first call, a table that is filled lazily, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.table, self.state = None, SimpleNamespace(calls=0, seen=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)), persistent=False)
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
            self.register_buffer("slopes", 2.0 ** -torch.arange(WIDTH))
        self.state.calls += 1
        self.state.seen.append(x.shape)
        return self.a(x) @ self.mask + self.table * self.slopes


class RegistersNumbers(nn.Module):
    """Indices written out in Python or by numpy at the first call, as litgpt's LoRA of a fused projection has them."""

    places = itertools.count()
    chosen: torch.Tensor
    signs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.place = nn.Linear(WIDTH, WIDTH), next(self.places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "chosen"):
            self.register_buffer("chosen", torch.tensor([0, 2, 1 + 2 * (self.place % 2)]), persistent=False)
            self.register_buffer("signs", self.signs_of())
        y = self.a(x)
        return x + torch.zeros_like(y).index_copy(1, self.chosen, y[:, :3] * self.signs)

    def signs_of(self) -> torch.Tensor:
        return torch.tensor([1.0, -1.0, 1.0])


class RegistersNumpy(RegistersNumbers):
    def signs_of(self) -> torch.Tensor:
        return torch.from_numpy(np.array([1, -1, 1], dtype=np.float32))


class Alibi(nn.Module):
    """Positional biases made of a buffer at the first call, as x-transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(WIDTH), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None or self.bias.shape[-1] < x.shape[-1]:
            self.register_buffer("bias", torch.arange(WIDTH) * self.slopes, persistent=False)
        return self.a(x) + self.bias[-x.shape[-1] :]


class UnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right, self.weights = self.left, [self.left.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(torch.tanh(self.left(x))) + x @ self.weights[0]


LOST = pytest.mark.xfail(
    raises=RuntimeError, strict=True, reason="a table that forward registers stays a fake: refused"
)


@pytest.mark.parametrize("layer", [RegistersAtFirst, pytest.param(RegistersNumbers, marks=LOST), RegistersNumpy])
def test_what_forward_makes_of_constants_is_a_constant_and_is_exported(layer: type[nn.Module]) -> None:
    case = dataclasses.replace(built(lambda: nn.Sequential(*(layer() for _ in range(4)))), rules=ALIKE)
    model, eager = case.model(), case.model()
    trajectory = eager_trajectory(case, 2)
    for wanted in trajectory:
        wanted["held"] = {name: value for name, value in wanted["held"].items() if name in model.state_dict()}
    before = attributes(live(model))
    step = assert_follows(case, model, trajectory, (4, 2))
    for each in model:
        if isinstance(each, RegistersAtFirst):  # what it counts it counts as in eager torch
            assert (each.state.calls, len(each.state.seen)) == (2, 2)
            each.state.calls, each.state.seen[:] = 0, []
    assert attributes(model) == before
    exported, x = step.export(anew(step, eager).init()), torch.ones(2, WIDTH)
    wanted = eager(x)
    assert exported.state_dict().keys() == eager.state_dict().keys()
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(exported.get_buffer(name), buffer)
    torch.testing.assert_close(exported(x), wanted)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_forward_makes_of_buffers_is_made_once(depth: int) -> None:
    case = built(lambda: nn.Sequential(*(Alibi() for _ in range(depth))))
    model, eager = case.model(), case.model()
    trajectory = eager_trajectory(case, 2)
    for wanted in trajectory:
        wanted["held"] = {name: value for name, value in wanted["held"].items() if name in dict(holds(model))}
    before = attributes(live(model))
    step = assert_follows(case, model, trajectory, (1, 1))
    assert attributes(model) == before
    exported, x = step.export(anew(step, eager).init()), torch.ones(2, WIDTH)
    torch.testing.assert_close(exported(x), eager(x))


def holds(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_a_module_under_two_names_is_whole_afterwards() -> None:
    case = built(UnderTwoNames)
    model, eager = case.model(), case.model()
    before = attributes(live(model))
    step = assert_follows(case, model, eager_trajectory(case, 2), (4, 2))
    assert attributes(model) == before
    batch = case.batches(1)[0]
    loss = step.evaluation()(anew(step, eager).init(), batch)["loss"]
    torch.testing.assert_close(torch.tensor(float(loss)), case.loss_fn(eager, batch).detach())
    found = ts.compare_with_torch(model, case.loss_fn, batch, mesh=make_mesh((1, 1)), plan=case.plan)
    found.raise_if_different()


class Injected(Exception):
    """What a failure in the midst of the user's code is."""


class FailsAt(TorchFunctionMode):
    """Raises at the torch call of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls, self.number = itertools.count(), number

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if next(self.calls) == self.number:
            raise Injected
        return func(*args, **(kwargs or {}))


def _cases() -> Iterator[Case]:
    for value in [v for table in (models, semantics, odd, layers_with_effects, layered) for v in vars(table).values()]:
        yield from (case for case in (value if isinstance(value, list) else ()) if isinstance(case, Case))
    yield from (built(build) for build in (RegistersAtFirst, UnderTwoNames))


ALL = {f"{number} {case.name}": case for number, case in enumerate(_cases())}
SHOWN = list(ALL)[::6]  # in the default run
FAILS = set(list(ALL)[::4]) | set(list(ALL)[1::4])  # in the middle of the loss


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("name", chosen(ALL, SHOWN))
def test_any_capture_leaves_the_model_as_it_was(name: str) -> None:
    case = ALL[name]
    model, (batch,) = case.model(), case.batches(1)
    counting = FailsAt(-1)

    def loss_fn(model: nn.Module, batch: object) -> object:
        with counting:
            return case.loss_fn(model, batch)

    if name in FAILS:
        loss_fn(case.model(), batch)
        counting.number = random.Random(name).randrange(next(counting.calls))
        counting.calls = itertools.count()
    before, versions = attributes(model), [p._version for p in model.parameters()]
    with contextlib.suppress(Injected, NotImplementedError):
        capture_loss(model, loss_fn, batch)
    assert attributes(model) == before
    assert [p._version for p in model.parameters()] == versions


def capture_loss(model: nn.Module, loss_fn: Any, batch: object) -> None:
    leaves, signature = flatten_batch(batch)
    plan = ts.ShardingPlan({}, default=P()).resolve(model, make_mesh((1, 1)))
    source = LossSource(model=model, loss_fn=loss_fn, train=True, plan=plan)
    loss_program(source, signature, HostValues(leaves, signature, model.get_buffer))
