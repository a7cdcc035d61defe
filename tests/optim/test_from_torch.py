"""Optimizers of torch in a step: each by torch's own numbers, in groups, on stacks, with its state both ways."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of
from tests.train.test_pipeline import Block
from torch_shard._optim import TorchOptimizer
from torch_shard._sharding import Layout, Stacks, stack_dicts

KINDS: dict[str, Any] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=1e-2),
    "Adam, amsgrad, L2": lambda groups: optim.Adam(groups, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam, maximize": lambda groups: optim.Adam(groups, lr=1e-2, betas=(0.0, 0.95), maximize=True),
    "SGD, nesterov": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, dampening": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.3),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr_decay=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda groups: optim.Adadelta(groups, rho=0.8),
    "Adamax": lambda groups: optim.Adamax(groups, weight_decay=0.01),
    "NAdam": lambda groups: optim.NAdam(groups, weight_decay=0.01, decoupled_weight_decay=True),
    "RAdam": lambda groups: optim.RAdam(groups, lr=1e-2),
    "RAdam, short": lambda groups: optim.RAdam(groups, lr=1e-2, betas=(0.5, 0.55), weight_decay=0.1),
    "RMSprop, centered": lambda groups: optim.RMSprop(groups, momentum=0.9, centered=True),
    "ASGD": lambda groups: optim.ASGD(groups, t0=10, lambd=1e-2),
    "Rprop": lambda groups: optim.Rprop(groups),
    "Adafactor": lambda groups: optim.Adafactor(groups, weight_decay=0.1),
    "Adafactor, eps": lambda groups: optim.Adafactor(groups, eps=(1e-8, 1e-2), d=1.5),
}
SHAPES = {"0.w": (4, 3), "1.w": (4, 3), "2.w": (4, 3), "0.b": (3,), "1.b": (3,), "2.b": (3,), "head": (2, 3, 4)}
X = torch.linspace(-1, 1, 32).reshape(8, 4)
STACKED = (("0.w", "1.w", "2.w"), ("0.b", "1.b", "2.b"), ("head",))


def arrays(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


def follow(
    params: dict[str, nn.Parameter], optimizer: optim.Optimizer, layout: Layout, num: int
) -> tuple[TorchOptimizer, Any, Stacks]:
    """Take so many steps by torch's own optimizer, and by ours on stacks: ours, its state and its parameters."""
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    ours = TorchOptimizer(optimizer, params, list(params))
    held = Stacks.from_dict({name: jnp.array(param.detach().numpy()) for name, param in params.items()}, layout)
    state: Any = stack_dicts(ours.init(dict(held)), layout, jnp.stack)
    update = jax.jit(lambda *given: ours.update(*given, layout=layout))
    for step in range(num):
        grads = arrays(step + 1, shapes)
        for group in optimizer.param_groups:  # as a scheduler would
            group["lr"] *= 0.9
        ours.read()
        stored = Stacks.from_dict({name: jnp.asarray(grad) for name, grad in grads.items()}, layout)
        held, state = update(stored, state, held, jnp.asarray(ours.inputs.numpy().copy()))  # a copy: JAX reads it later
        for name, param in params.items():
            param.grad = torch.from_numpy(grads[name]).to(param.dtype)
        optimizer.step()
    return ours, state, held


def in_groups(params: dict[str, nn.Parameter], *, plain: bool) -> list[dict[str, Any]]:
    """Rows of one stack in two groups, and vectors in a third."""
    more: list[dict[str, Any]] = [{}, {"lr": 7e-3}, {} if plain else {"weight_decay": 0.0}]
    names = (["0.w", "head"], ["1.w", "2.w"], ["0.b", "1.b", "2.b"])
    return [{"params": [params[n] for n in each], **own} for each, own in zip(names, more, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_torch(kind: str) -> None:
    """float64, so that what differs is the formula: 1e-12 of the largest entry; what torch keeps in float32, 1e-7."""
    with jax.enable_x64(True):
        params = {name: nn.Parameter(torch.from_numpy(value)) for name, value in arrays(0, SHAPES).items()}
        optimizer = KINDS[kind](in_groups(params, plain=kind in ("Rprop",)))
        ours, state, held = follow(params, optimizer, Layout.of(STACKED), 12)
        tolerance = 1e-7 if kind in ("NAdam", "ASGD") else 1e-12  # mu_product and eta are float32 tensors in torch
        for name, param in params.items():
            wanted = param.detach().numpy()
            np.testing.assert_allclose(held[name], wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
        found, wanted = ours.state_dict(state), optimizer.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert found["state"].keys() == wanted["state"].keys()
        for number, own in wanted["state"].items():
            kept = {name: value for name, value in own.items() if value is not None}
            assert found["state"][number].keys() == kept.keys()
            for name, value in kept.items():
                torch.testing.assert_close(
                    found["state"][number][name].double(), value.double(), rtol=tolerance, atol=tolerance
                )


def test_muon_is_that_of_torch() -> None:
    """To 5 % of the largest update: torch rounds each product to bfloat16, and XLA only some of them, which five
    iterations magnify. Without the decay of weights alone it would be 30 %.
    """
    shapes = {"0.w": (8, 4), "1.w": (8, 4), "wide": (4, 16)}
    params = {name: nn.Parameter(torch.from_numpy(value).float()) for name, value in arrays(0, shapes).items()}
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = optim.Muon(list(params.values()), lr=0.1, weight_decay=0.1)
    _, _, held = follow(params, optimizer, Layout.of((("0.w", "1.w"), ("wide",))), 3)
    for name, param in params.items():
        change = (param.detach() - before[name]).abs().max()
        assert np.abs(np.asarray(held[name]) - param.detach().numpy()).max() < 0.05 * float(change)


# In a step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(*(Block(8) for _ in range(3))), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(number)]


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


SPLIT = ts.ShardingPlan(
    {"**.up.weight": P("model"), "**.up.bias": P("model"), "**.down.weight": P(None, "model")}, default=P()
)
ZERO_1 = ts.ShardingPlan({"**.up.weight": P("batch")}, default=P())
OPTIONS = {
    "split, in a loop": {"plan": SPLIT},
    "ZeRO-1, two microbatches": {"mesh": (4, 1), "optimizer_plan": ZERO_1, "accumulate_steps": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_with_a_schedule_is_that_of_torch(options: dict[str, Any]) -> None:
    """OneCycleLR, which moves beta1 too, and clipping; one program. Rounding of float32, which Adam magnifies."""
    model = Net()
    alone = copy.deepcopy(model)
    optimizer, theirs = (optim.AdamW(decayed(m), lr=1e-3, weight_decay=0.1) for m in (model, alone))
    schedule, other = (optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=12) for o in (optimizer, theirs))
    step = step_of(model, loss_fn, optimizer, clip_grad_norm=0.1, **options)
    state = step.init(seed=0)
    with warnings.catch_warnings(action="error"):  # of schedulers that see no step of the optimizer
        for batch in batches(10):
            state, metrics = step(state, batch)
            schedule.step()
            theirs.zero_grad()
            loss = loss_fn(alone, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            theirs.step()
            other.step()
            assert abs(float(metrics["loss"]) - float(loss.detach())) < 1e-5
            assert abs(float(metrics["grad_norm"]) - float(norm)) < 1e-4
    assert step.num_compiles == 1
    for mine, wanted in zip(step.export(state).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)
    optimizer.load_state_dict(step.export_optimizer(state))
    for place, own in theirs.state_dict()["state"].items():
        for name, value in own.items():
            found = optimizer.state_dict()["state"][place][name].cpu()
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-6)


def test_sgd_without_momentum_keeps_no_state_as_in_torch() -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer=optimizer, mesh=(1, 1))
    alone = copy.deepcopy(model)
    theirs = optim.SGD(alone.parameters(), lr=0.1)
    state, _ = step(step.init(), x := torch.ones(2, 4))
    mean_square(alone, x).backward()
    theirs.step()
    assert step.export_optimizer(state) == optimizer.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("make", [optim.AdamW, functools.partial(optim.SGD, momentum=0.9, dampening=0.5)])
def test_a_parameter_that_no_step_has_reached_has_no_state_also_in_another_process(make: Callable[..., Any]) -> None:
    x, model, alone = torch.randn(8, 4), Late(), Late()
    made = [step_of(model, lambda m, x: mean_square(m.first, x), make(model.parameters())) for _ in range(2)]
    state, _ = made[0](made[0].init(), x)
    assert sorted(made[1].export_optimizer(state)["state"]) == [0, 1]  # of first; made[1] has compiled nothing
    turned = make([{"params": [p]} for p in [*model.parameters()][::-1]])
    assert sorted(step_of(model, optimizer=turned).export_optimizer(state)["state"]) == [2, 3]  # by name
    reaching = step_of(model, optimizer=make(model.parameters()))
    for _ in range(2):  # and then begins at step 0
        state, _ = reaching(state, x)
    optimizer = make(alone.parameters())
    for loss_of in (lambda: mean_square(alone.first, x), lambda: mean_square(alone, x), lambda: mean_square(alone, x)):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    for mine, wanted in zip(reaching.export(state).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-6)  # float32, three steps
    found, own = reaching.export_optimizer(state)["state"], optimizer.state_dict()["state"]
    assert {k: v["step"] for k, v in found.items() if "step" in v} == {
        k: v["step"] for k, v in own.items() if "step" in v
    }


def test_adagrad_has_a_state_before_its_first_step_as_in_torch() -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    exported = (step := step_of(model, optimizer=optimizer)).export_optimizer(step.init())
    wanted = optim.Adagrad(nn.Linear(4, 4).parameters(), initial_accumulator_value=0.5).state_dict()["state"]
    torch.testing.assert_close(exported["state"], wanted, rtol=0, atol=0)


def test_a_frozen_parameter_keeps_the_state_that_it_has_in_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.Adam(model.parameters())
    mean_square(model, X).backward()
    optimizer.step()
    wanted = copy.deepcopy(optimizer.state_dict()["state"])
    model[0].requires_grad_(False)
    step = step_of(model, optimizer=optimizer)
    state, _ = step(step.init(), X)
    found = step.export_optimizer(state)["state"]
    assert [found[at]["step"].item() for at in range(4)] == [1, 1, 2, 2]
    torch.testing.assert_close([found[0], found[1]], [wanted[0], wanted[1]], rtol=0, atol=0)


def test_a_state_goes_on_from_that_of_torch() -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    first, *rest = batches(4)
    loss_fn(model, first).backward()
    optimizer.step()
    step = step_of(model, loss_fn, optimizer, mesh=(4, 1), clip_grad_value=0.01)
    alone = copy.deepcopy(model)
    theirs = optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    theirs.load_state_dict(optimizer.state_dict())
    state = step.init(seed=0)
    rates = list[float]()
    for batch in rest:
        rates.append(optimizer.param_groups[0]["lr"])
        state, _ = step(state, batch)
        schedule.step(1.0)  # no better: half the rate
    assert rates[2] == pytest.approx(rates[1] / 2)
    for number, batch in enumerate(rest):
        theirs.zero_grad()
        loss_fn(alone, batch).backward()
        nn.utils.clip_grad_value_(alone.parameters(), 0.01)
        theirs.param_groups[0]["lr"] = rates[number]
        theirs.step()
    for mine, wanted in zip(step.export(state).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)


class Late(nn.Module):
    """A parameter that has no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.first(x))


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD, dampening", "RMSprop, centered", "Adagrad"])
def test_a_parameter_without_a_state_begins_at_step_0_as_in_torch(kind: str) -> None:
    x, model = torch.randn(8, 4), Late()
    optimizer = KINDS[kind](model.parameters())

    def eager(optimizer: optim.Optimizer, loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step = step_of(model, optimizer=optimizer)
    for _ in range(3):
        eager(optimizer, mean_square(model.first, x))
    alone = copy.deepcopy(model)
    theirs = KINDS[kind](alone.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    state = step.init()
    for _ in range(2):
        state, _ = step(state, x)
    for _ in range(2):
        eager(theirs, mean_square(alone, x))
    for mine, wanted in zip(step.export(state).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-6)  # float32, two steps
    found, own = step.export_optimizer(state)["state"], theirs.state_dict()["state"]
    assert {key: float(kept["step"]) for key, kept in found.items() if "step" in kept} == {
        key: float(kept["step"]) for key, kept in own.items() if "step" in kept
    }


def test_a_state_that_is_loaded_after_init_is_that_of_the_next_step_as_in_torch() -> None:
    model, alone, other = Late(), Late(), Late()
    optimizer, theirs, trained = (optim.AdamW(m.parameters(), lr=0.1) for m in (model, alone, other))
    mean_square(other, X).backward()
    trained.step()
    step = step_of(model, optimizer=optimizer)
    state = step.init()
    for loaded in (trained, trained, theirs):  # the last one is that of the run
        given = copy.deepcopy(loaded.state_dict())
        for each in (optimizer, theirs):
            each.load_state_dict(given)
        state, _ = step(state, X)
        theirs.zero_grad()
        mean_square(alone, X).backward()
        theirs.step()
    for mine, wanted in zip(step.export(state).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-6)  # float32, three steps
    found, own = step.export_optimizer(state)["state"], theirs.state_dict()["state"]
    assert [float(found[key]["step"]) for key in own] == [3] * 4
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)


def test_a_parameter_in_no_group_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level("INFO"):
        step = step_of(model, loss_fn, optim.AdamW(model.head.parameters()), mesh=(2, 1))
    assert "in no parameter group of the optimizer" in caplog.text
    before = copy.deepcopy(model)
    state, _ = step(step.init(seed=0), batches(1)[0])
    out = step.export(state)
    assert torch.equal(out.blocks[0].up.weight, before.blocks[0].up.weight)
    assert not torch.equal(out.head.weight, before.head.weight)


@pytest.mark.parametrize("kind", [optim.NAdam, optim.Adam])
def test_the_proof_compares_with_torchs_own_step(kind: Any) -> None:
    model = Net()
    optimizer = kind(decayed(model), lr=1e-2, weight_decay=0.5, decoupled_weight_decay=True)
    step = step_of(model, loss_fn, optimizer, mesh=(2, 1), clip_grad_norm=0.1)
    state = step.init(seed=0)
    for batch in batches(2):
        state, _ = step(state, batch)
    found = step.prove(state, batches(1)[0])
    found.raise_if_different()
    assert any(row.kind == "update" for row in found.rows)


MUON_FAULTS = {"none": {}, "lr": {"lr": 0.024}, "decay": {"weight_decay": 0.0}, "momentum": {"momentum": 0.8}}


@pytest.mark.parametrize("fault", MUON_FAULTS)
def test_the_proof_allows_muon_its_rounding_and_no_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its iteration in bfloat16 magnifies the order of sums: most where a gradient has few rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32, bias=False), torch.nn.Tanh(), torch.nn.Linear(32, 8, bias=False)
    )
    optimizer = optim.Muon(model.parameters(), lr=0.02, weight_decay=0.2)
    step = step_of(model, lambda model, x: (model(x) - 1).square().mean(), optimizer, mesh=(2, 1))
    state = step.init(seed=0)
    for num in (2, 64, 64):
        step.prove(state, torch.randn(num, 16)).raise_if_different()
        state, _ = step(state, torch.randn(num, 16))
    in_torch = TorchOptimizer.steps_in_torch

    def wrong(self: TorchOptimizer, *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            for name, value in MUON_FAULTS[fault].items():
                patch.setitem(self.optimizer.param_groups[0], name, value)
            return in_torch(self, *args, **options)

    monkeypatch.setattr(TorchOptimizer, "steps_in_torch", wrong)
    found = step.prove(state, torch.randn(64, 16))
    different = {row.name for row in found.rows if row.worst > found.tolerance}
    assert different == (set() if fault == "none" else {"0.weight", "2.weight"})


# What is refused


def make(optimizer: Any, **options: Any) -> Any:
    return step_of(Net(), loss_fn, optimizer, mesh=(1, 1), **options)


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"parameters that are not the model's:\n\n  group 0, parameter 0, of shape \(8,\)"
    ):
        make(optim.AdamW(Net().parameters()))


def test_other_classes_are_refused_by_name() -> None:
    class Own(optim.AdamW):
        pass

    with pytest.raises(TypeError, match=r"the optimizer is a .*Own.*optax"):
        make(Own(Net().parameters()))


def test_groups_that_change_are_refused() -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, loss_fn, optimizer, mesh=(1, 1))
    state = step.init(seed=0)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="have changed since the step was made"):
        step(state, batches(1)[0])
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(ValueError, match="have changed since the step was made"):
        step(state, batches(1)[0])


def test_step_hooks_are_refused() -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, loss_fn, optimizer, mesh=(1, 1))
    state, _ = step(step.init(seed=0), batches(1)[0])
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
    ):
        hook = register(lambda *args: None)
        with pytest.raises(NotImplementedError, match="make_train_step: the optimizer has step hooks"):
            step_of(model, loss_fn, optimizer)
        with pytest.raises(NotImplementedError, match="make_train_step: the optimizer has step hooks"):
            step(state, batches(1)[0])
        hook.remove()
    step(state, batches(1)[0])


def test_another_step_of_an_optimizer_is_refused() -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps it too
    step_of(model, loss_fn, optimizer)
    setattr(optimizer, "step", lambda closure=None: None)  # noqa: B010
    with pytest.raises(
        NotImplementedError, match=r"optimizer.step of this SGD was replaced by .*lambda.*del optimizer"
    ):
        step_of(model, loss_fn, optimizer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"clip_grad_value": -1.0}, ValueError, "clip_grad_value must be a positive number or None, got -1.0"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, ValueError, "clip_grad_norm or clip_grad_value, not both"),
    ],
)
def test_wrong_limits_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(optim.SGD(Net().parameters(), lr=0.1), **options)


def test_an_optax_step_has_no_state_for_torch() -> None:
    step = make(ts.optim.sgd(0.1))
    with pytest.raises(TypeError, match="made with an optax transformation"):
        step.export_optimizer(step.init(seed=0))
