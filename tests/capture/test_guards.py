"""Python values outside of the model that a loss reads: a change between steps is seen, one by the loss is refused."""

import array
import collections
import concurrent.futures
import dataclasses
import functools
import importlib
import logging
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import loss_on_cpu
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH, Dropping

FACTOR = 1.0


@dataclasses.dataclass
class Settings:
    factor: float = 1.0
    parts: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Trainer:
    def __init__(self) -> None:
        self.factor, self.steps = 1.0, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * self.factor

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(model, batch)


class Plain:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Deep(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.cfg = Plain(depth=Plain(x=Plain(y=1.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.cfg.depth.x.y


class Classed(nn.Linear):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class Absent(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x) * self.scale  # pyright: ignore
        except AttributeError:
            return super().forward(x)


def absent() -> float:
    try:
        return ABSENT  # type: ignore[name-defined]
    except NameError:
        return 1.0


def helper() -> float:
    return 1.0


def reloaded() -> float:
    return 1.0


def by_global(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * FACTOR


def plain(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return model(batch).square().mean() * factor


def beta() -> float:
    return annealed()


def annealed() -> float:
    return FACTOR * schedule.current() + schedule.offset


class Schedule:
    def __init__(self) -> None:
        self.value, self.offset = 1.0, 0.0

    def current(self) -> float:
        return self.halved * 2

    @property
    def halved(self) -> float:
        return self.value / 2


schedule = Schedule()


def by_functions(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * beta()


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor()

    def factor(self) -> float:
        return beta()


def times(factor: Callable[[], float]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A loss that reads a number."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * factor()

    return loss


def closures() -> dict[str, Callable[[], tuple[nn.Module, Any, Callable[[], None]]]]:
    def cell() -> Any:
        factor = [1.0]

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean() * factor[0]

        return nn.Linear(8, 8), loss, lambda: factor.__setitem__(0, 3.0)

    def reassigned_tensor() -> Any:
        box = types.SimpleNamespace(factor=torch.tensor(1.0))
        loss = lambda model, batch: model(batch).square().mean() * box.factor  # noqa: E731
        return nn.Linear(8, 8), loss, lambda: setattr(box, "factor", torch.tensor(3.0))

    def module_global() -> Any:
        return nn.Linear(8, 8), by_global, lambda: globals().__setitem__("FACTOR", 3.0)

    def bound_method() -> Any:
        trainer = Trainer()
        return nn.Linear(8, 8), trainer.loss, lambda: setattr(trainer, "factor", 3.0)

    def partial() -> Any:
        settings = {"factor": 1.0}
        loss = functools.partial(plain, **settings)
        return nn.Linear(8, 8), loss, lambda: loss.keywords.__setitem__("factor", 3.0)

    def through_methods() -> Any:
        schedule.value = 1.0
        return nn.Linear(8, 8), by_functions, lambda: setattr(schedule, "value", 3.0)

    def through_forward() -> Any:
        schedule.offset = 0.0
        return Scaled(8, 8), plain, lambda: setattr(schedule, "offset", 3.0)

    def called_object() -> Any:
        trainer = Trainer()
        return nn.Linear(8, 8), trainer, lambda: setattr(trainer, "factor", 3.0)

    def many_weights() -> Any:
        weights = [1.0] * 1001

        return nn.Linear(8, 8), times(lambda: sum(weights)), lambda: weights.__setitem__(1000, 3.0)

    def dispatched_function() -> Any:
        box = Plain(scale=1.0)
        table = {"scaled": [lambda x: x * box.scale]}

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return table["scaled"][0](model(batch)).square().mean()

        return nn.Linear(8, 8), loss, lambda: setattr(box, "scale", 3.0)

    def replaced_function() -> Any:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean() * helper()

        return nn.Linear(8, 8), loss, lambda: globals().__setitem__("helper", lambda: 3.0)

    def replaced_code() -> Any:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean() * reloaded()

        return nn.Linear(8, 8), loss, lambda: setattr(reloaded, "__code__", (lambda: 3.0).__code__)

    def closure_of_a_called_function() -> Any:
        def make() -> Any:
            factor = 1.0

            def scaled(x: torch.Tensor) -> torch.Tensor:
                return x * factor

            def change() -> None:
                nonlocal factor
                factor = 3.0

            return scaled, change

        scaled, change = make()
        make()
        functions = {"scaled": scaled}

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return functions["scaled"](model(batch)).square().mean()

        return nn.Linear(8, 8), loss, change

    def returned_object() -> Any:
        cfg = Plain(scale=1.0)
        held = [cfg]

        def current() -> Plain:
            return next(iter(held))

        return nn.Linear(8, 8), times(lambda: current().scale), lambda: setattr(cfg, "scale", 3.0)

    def numpy_array() -> Any:
        weights = np.ones(4, np.float32)

        return nn.Linear(8, 8), times(lambda: float(weights.sum())), lambda: weights.__setitem__(0, 3.0)

    def attribute_of_a_class() -> Any:
        model = Classed(8, 8)
        return model, plain, lambda: setattr(Classed, "factor", 3.0)

    def object_of_the_model() -> Any:
        model = Deep()
        return model, plain, lambda: setattr(model.cfg.depth.x, "y", 3.0)

    def swapped_submodule() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        return model, plain, lambda: model.__setitem__(1, nn.Tanh())

    def appended_submodule() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        return model, plain, lambda: model.append(nn.Tanh())

    def forward_of_an_instance() -> Any:
        model = nn.Linear(8, 8)
        return model, plain, lambda: setattr(model, "forward", lambda x: 3 * F.linear(x, model.weight, model.bias))

    def forward_hook() -> Any:
        model = nn.Linear(8, 8)
        return model, plain, lambda: model.register_forward_hook(lambda module, args, out: out * 3)

    def dropped_default() -> Any:
        def loss(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return model(batch).square().mean() * factor

        return nn.Linear(8, 8), loss, lambda: setattr(loss, "__defaults__", (3.0,))

    def in_another_layer() -> Any:
        model = nn.Sequential(*(Deep() for _ in range(4)))
        return model, plain, lambda: setattr(model[2].cfg.depth.x, "y", 3.0)

    def teacher() -> Any:
        other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(model(batch), other(batch).detach())

        return nn.Linear(8, 8), loss, lambda: other.__setitem__(0, nn.Linear(8, 8))

    def absent_attribute() -> Any:
        def current() -> float:
            return getattr(cfg, "scale", 1.0) * (3.0 if hasattr(cfg, "other") else 1.0)

        cfg = Plain()
        return nn.Linear(8, 8), times(current), lambda: setattr(cfg, "other", None)

    def absent_attribute_of_the_model() -> Any:
        model = Absent(8, 8)
        return model, plain, lambda: setattr(model, "scale", 3.0)

    def absent_global() -> Any:
        return nn.Linear(8, 8), times(absent), lambda: globals().__setitem__("ABSENT", 3.0)

    def named_like_a_global() -> Any:
        cfg = Plain(FACTOR=1.0)
        return nn.Linear(8, 8), times(lambda: cfg.FACTOR * FACTOR), lambda: setattr(cfg, "FACTOR", 3.0)

    def forward_of_a_class() -> Any:
        class Own(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

        def thrice(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return 3 * F.linear(x, self.weight, self.bias)

        return Own(8, 8), plain, lambda: setattr(Own, "forward", thrice)

    def distribution() -> Any:
        normal = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
        read = lambda: normal.log_prob(torch.tensor(1.0))  # noqa: E731
        return nn.Linear(8, 8), times(read), lambda: setattr(normal, "scale", torch.tensor(3.0))  # pyright: ignore

    def class_with_a_constructor() -> Any:
        class Own:
            scale = 1.0

            def __new__(cls) -> Any:
                return super().__new__(cls)

            @classmethod
            def current(cls) -> float:
                return cls.scale

        return nn.Linear(8, 8), times(lambda: Own().current()), lambda: setattr(Own, "scale", 3.0)

    def array_of_python() -> Any:
        held = array.array("d", [1.0])
        return nn.Linear(8, 8), times(lambda: held[0]), lambda: held.__setitem__(0, 3.0)

    def proxy_of_a_dict() -> Any:
        held = {"scale": 1.0}
        proxy = types.MappingProxyType(held)
        return nn.Linear(8, 8), times(lambda: proxy["scale"]), lambda: held.__setitem__("scale", 3.0)

    def other_object_of_the_model() -> Any:
        model = Deep()
        return model, plain, lambda: setattr(model, "cfg", Plain(depth=Plain(x=Plain(y=3.0))))

    def nothing_of_the_model() -> Any:
        model: Any = nn.Linear(8, 8)
        model.scale = None

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            return plain(model, batch) * (model.scale or 1)

        return model, loss, lambda: setattr(model, "scale", 3.0)

    def attribute_of_a_function() -> Any:
        def current() -> float:
            return current.scale  # pyright: ignore

        current.scale = 1.0
        return nn.Linear(8, 8), times(current), lambda: setattr(current, "scale", 3.0)

    def list_of_a_library() -> Any:
        held = collections.UserList([1.0])
        return nn.Linear(8, 8), times(lambda: held[0]), lambda: held.__setitem__(0, 3.0)

    def bytes_in_place() -> Any:
        held = bytearray(b"\x01")
        return nn.Linear(8, 8), times(lambda: held[0]), lambda: held.__setitem__(0, 3)

    def dict_of_globals() -> Any:
        return nn.Linear(8, 8), times(lambda: globals()["FACTOR"]), lambda: globals().__setitem__("FACTOR", 3.0)

    made = (other_object_of_the_model, nothing_of_the_model, attribute_of_a_function, list_of_a_library)
    made += (bytes_in_place, dict_of_globals)
    made += (many_weights, dispatched_function, replaced_function, replaced_code)
    made += (closure_of_a_called_function, returned_object, numpy_array, attribute_of_a_class)
    made += (object_of_the_model, swapped_submodule, appended_submodule, forward_of_an_instance)
    made += (absent_attribute, absent_attribute_of_the_model, absent_global, named_like_a_global, forward_of_a_class)
    made += (distribution, class_with_a_constructor, array_of_python, proxy_of_a_dict)
    made += (forward_hook, dropped_default, in_another_layer, teacher)
    made += (cell, reassigned_tensor, module_global, bound_method, partial)
    made += (through_methods, through_forward, called_object)
    return {make.__name__: make for make in made}


PLAN = ts.ShardingPlan({}, default=P())


@pytest.mark.parametrize("name", closures())
def test_a_change_between_steps_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, value in (("FACTOR", 1.0), ("helper", helper)):
        monkeypatch.setitem(globals(), changed, value)
    monkeypatch.setattr(Classed, "factor", 1.0)
    monkeypatch.delitem(globals(), "ABSENT", raising=False)
    model, loss_fn, change = closures()[name]()
    batch = torch.randn(8, 8)
    step = sgd_step(model, loss_fn, rate=0.0)
    state = step.init()
    for num_compiles in (1, 1, 2, 2):
        if num_compiles == 2 and step.num_compiles == 1:
            change()
        wanted = loss_on_cpu(model, loss_fn, batch)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)
        assert step.num_compiles == num_compiles


def test_counters_of_the_trainer_do_not_compile_again() -> None:
    trainer = Trainer()
    step, state, batch = stepped(trainer.loss)
    for _ in range(2):
        trainer.steps += 1
        state, _ = step(state, batch)
    assert step.num_compiles == 1


@pytest.mark.parametrize("depends", [True, False])
def test_what_the_loss_itself_changes(depends: bool) -> None:
    count = [0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return model(batch).square().mean() * (count[0] if depends else 1)

    model = nn.Linear(8, 8)
    step = sgd_step(model, loss, look_again=True, rate=0.0)
    state, losses = step.init(), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(8, 8))
        losses.append(float(metrics["loss"]))
    assert count == [3]
    assert step.num_compiles == (3 if depends else 1)
    np.testing.assert_allclose(losses, losses[0] * np.arange(1, 4) if depends else losses[0], rtol=1e-6)


def test_a_teacher_beside_the_model_is_followed() -> None:
    """Its parameters are read at each step, and so is its mode."""
    torch.manual_seed(0)
    teacher, model = Dropping(), nn.Linear(16, 16)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    step = sgd_step(model, loss_fn, (4, 2), rate=0.0)
    state, x = step.init(), torch.randn(BATCH, 16)
    state, training = step(state, x)
    teacher.eval()
    state, evaluating = step(state, x)
    np.testing.assert_allclose(evaluating["loss"], loss_on_cpu(model, loss_fn, x), rtol=1e-5)
    assert float(training["loss"]) != float(evaluating["loss"])
    with torch.no_grad():
        teacher.layer.weight.zero_()
    state, moved = step(state, x)
    np.testing.assert_allclose(moved["loss"], loss_on_cpu(model, loss_fn, x), rtol=1e-5)


def test_an_explanation_lists_what_a_program_keeps() -> None:
    found = ts.explain_capture(nn.Linear(8, 8), by_functions, torch.ones(8, 8))
    assert {f"FACTOR = {FACTOR}", f"schedule.offset = {schedule.offset}", f"Schedule.value = {schedule.value}"} <= set(
        found.frozen
    )


def stepped(loss_fn: Any, model: nn.Module | None = None) -> tuple[Any, Any, torch.Tensor]:
    """A step that has run once: it, its state, and the batch."""
    model, batch = model or nn.Linear(8, 8), torch.ones(8, 8)
    step = sgd_step(model, loss_fn, rate=0.0)
    return step, step(step.init(), batch)[0], batch


def test_what_has_another_value_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    model.beta, model.shift = 1.0, torch.zeros(8)  # pyright: ignore[reportAttributeAccessIssue]
    loss = lambda model, batch: (model.beta * model(batch) + model.shift).square().mean()  # noqa: E731
    step, state, batch = stepped(loss, model)
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        for name, value in (("beta", 0.5), ("shift", torch.ones(8))):
            setattr(model, name, value)
            state, metrics = step(state, batch)
            np.testing.assert_allclose(metrics["loss"], loss_on_cpu(model, loss, batch), rtol=1e-5)
            assert f"the attribute {name} has another value" in caplog.text


def calls_of(fn: Callable[[], object]) -> int:
    """How many Python functions a call runs."""
    count = [0]
    sys.setprofile(lambda frame, event, arg: count.__setitem__(0, count[0] + (event == "call")))
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count[0]


def test_what_is_read_is_compared_without_python_for_each_value() -> None:
    """The cost of a step does not grow with the values, but by what C takes to compare identities."""
    many = [[float(i)] * 20 for i in range(900)]
    nested = {str(i): {"scale": 1.0} for i in range(100)}

    few, _, _ = stepped(plain)
    step, state, batch = stepped(
        times(lambda: sum(map(sum, many)) * nested["7"]["scale"]), nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    )
    assert calls_of(step.programs[0].loss.captured.outdated) == calls_of(few.programs[0].loss.captured.outdated) < 40
    many[899][19] = 0.0
    before = step.num_compiles
    step(state, batch)
    assert step.num_compiles == before + 1


def test_what_is_too_large_to_compare_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    large, table, small = [0.5] * 200_000, np.ones(1 << 20), [1.0]
    step, state, batch = stepped(times(lambda: large[0] * float(table[0]) * small[0]))
    small[0] = 2.0
    state, _ = step(state, batch)
    assert step.num_compiles == 2
    (said,) = (r.getMessage() for r in caplog.records if "too large" in r.getMessage())
    assert "large (200,000 items), table (an array of 8,388,608 bytes)" in said
    assert "make them tensors" in said
    large.append(1.0)
    step(state, batch)
    assert step.num_compiles == 2, "said, and so not compared"


def test_equal_values_in_new_objects_do_not_compile_again() -> None:
    cfg = types.SimpleNamespace(weights=[1.0, 2.0], inner=Settings(), shape=(1, 2), scale=1.5, table=np.ones(2))
    factor = lambda: sum(cfg.weights) * cfg.inner.factor * sum(cfg.shape) * cfg.scale * float(cfg.table[0])  # noqa: E731
    step, state, batch = stepped(times(factor))
    for _ in range(2):
        cfg.weights, cfg.inner, cfg.shape, cfg.scale = [1.0, 2.0], Settings(), (1, 1 + 1), float("1.5")
        cfg.table = np.ones(2)
        state, _ = step(state, batch)
    assert step.num_compiles == 1
    cfg.weights[1] = 3.0
    step(state, batch)
    assert step.num_compiles == 2


@pytest.mark.parametrize("values", [(1, 1.0), (0.0, -0.0), (1, True)])
def test_values_that_are_equal_and_yet_others(values: tuple[Any, Any]) -> None:
    box = Plain(value=values[0])
    step, state, batch = stepped(times(lambda: 2.0 if box.value is None else 1.0))
    box.value = values[1]
    step(state, batch)
    assert step.num_compiles == 2


class Irreps(tuple):
    """A container that is read in a way of its own, as that of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


def test_containers_that_are_read_in_ways_of_their_own() -> None:
    box = Plain(irreps=Irreps([1.0, 2.0]), kinds={"a": {Plain, 2}})
    model = nn.Linear(8, 8)
    model.irreps = box.irreps  # pyright: ignore[reportArgumentType]
    step, state, batch = stepped(times(lambda: box.irreps[1] + (2 in box.kinds["a"])), model)
    state, _ = step(state, batch)
    assert step.num_compiles == 1
    box.irreps = Irreps([1.0, 3.0])
    step(state, batch)
    assert step.num_compiles == 2


def test_attributes_that_nobody_reads_may_change() -> None:
    state_of_the_run = Settings()
    trainer = Plain(settings=state_of_the_run, scale=1.0, epoch=0)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        trainer.last = None
        return model(batch).square().mean() * trainer.settings.factor * trainer.scale

    step, state, batch = stepped(loss)
    for epoch in range(3):
        trainer.epoch, trainer.last, state_of_the_run.parts = epoch, epoch, [float(epoch)]
        state, _ = step(state, batch)
    assert step.num_compiles == 1


def test_a_profile_function_that_is_set_goes_on() -> None:
    seen: list[str] = []

    def profile(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        ts.explain_capture(nn.Linear(8, 8), by_functions, torch.ones(8, 8))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert {"by_functions", "annealed", "explain_capture", "capture"} <= set(seen)


def test_no_profile_function_is_left_by_a_capture_that_fails() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as meant")

    with pytest.raises(RuntimeError, match="as meant"):
        stepped(loss)
    assert sys.getprofile() is None


def test_the_package_of_the_loss_is_the_users_own_where_it_is_installed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "installed_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("SCALE = 1.0\n")
    (package / "losses.py").write_text(
        "from installed_trainer import settings\n\n"
        "def scale():\n    return settings.SCALE\n\n"
        "def loss(model, batch):\n    return model(batch).square().mean() * scale()\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    losses, settings = (importlib.import_module(f"installed_trainer.{name}") for name in ("losses", "settings"))
    model = nn.Linear(8, 8)
    step, state, batch = stepped(losses.loss, model)
    settings.SCALE = 3.0
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss_on_cpu(model, losses.loss, batch), rtol=1e-6)


def test_two_threads_each_see_their_own_functions() -> None:
    def trained(scale: float) -> tuple[float, float]:
        box, model = Plain(scale=scale), nn.Linear(8, 8)
        loss = times(lambda: box.scale)
        step, state, batch = stepped(loss, model)
        box.scale = 3 * scale
        _, metrics = step(state, batch)
        return float(metrics["loss"]), loss_on_cpu(model, loss, batch)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found, wanted in pool.map(trained, (1.0, 2.0)):
            assert found == pytest.approx(wanted, rel=1e-6)
