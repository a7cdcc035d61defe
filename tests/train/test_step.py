"""A call of the step: nothing waits, nothing compiles twice, and the quick checks before it overlook nothing."""

import copy
import gc
import logging
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import mean_square, step_of
from tests.tables.cases import CASE, make_mesh, make_step


def make(model: nn.Module, loss_fn: Any = mean_square, sizes: tuple[int, int] = (4, 2)) -> Any:
    return step_of(model, loss_fn, optax.sgd(0.0), mesh=sizes)


def busy(rounds: jax.Array) -> jax.Array:
    """Zero, after that many rounds of work."""
    a = jax.lax.fori_loop(0, rounds, lambda i, a: jnp.sin(a @ a), jnp.full((300, 300), 0.01))
    return 0 * a.sum()


def busy_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, rounds = batch
    with torch.no_grad():
        work = ts.call_jax(busy, rounds)
    return mean_square(model, x) + work


@pytest.fixture(scope="module")
def step() -> Any:
    """On one device, as long as its batch says."""
    return make(nn.Linear(4, 4), busy_loss, (1, 1))


LONG = 1000  # rounds: about a second, where a call takes about a millisecond


def test_a_call_returns_while_the_step_before_it_still_runs(step: Any) -> None:
    state, x = step.init(), torch.ones(8, 4)
    state, _ = step(state, (x, 0))
    jax.block_until_ready(state)
    state, first = step(state, (x, LONG))
    state, second = step(state, (x, 0))
    assert not first["loss"].is_ready()
    assert float(second["loss"]) == float(first["loss"])


@pytest.mark.parametrize("waits", [False, True])
def test_only_simulated_devices_are_waited_for(step: Any, waits: bool) -> None:
    """XLA would wait for itself, with more programs in flight than it has threads for."""
    step = make(nn.Linear(4, 4), busy_loss) if waits else step
    state, x, rounds = step.init(), torch.ones(8, 4), 50 if waits else LONG
    state, _ = step(state, (x, 0))
    jax.block_until_ready((state, step.gradient_step(state, step.put((x, 0)))))
    state, running = step(state, (x, rounds))
    assert running["loss"].is_ready() == waits
    jax.block_until_ready(state)
    assert step.gradient_step(state, step.put((x, rounds)))["loss"].is_ready() == waits


def test_the_next_batch_is_on_the_mesh_while_the_step_still_runs(step: Any) -> None:
    state, x = step.init(), torch.ones(8, 4)
    state, _ = step(state, (x, 0))
    jax.block_until_ready(state)
    state, running = step(state, (x, LONG))
    given = 2 * x
    arrays = step.put((given, 0)).arrays
    given.zero_()  # which is the caller's again
    jax.block_until_ready(arrays)
    assert not running["loss"].is_ready()
    np.testing.assert_array_equal(arrays[0], 2 * x)


def test_a_batch_may_be_overwritten_as_soon_as_the_call_returns(step: Any) -> None:
    state, x = step.init(), torch.ones(8, 4)
    state, wanted = step(state, (x, 0))
    rounds = torch.tensor(LONG)
    state, metrics = step(state, (x, rounds))
    x.zero_()
    assert not metrics["loss"].is_ready()
    assert float(metrics["loss"]) == float(wanted["loss"])


def test_tensors_of_every_layout_arrive() -> None:
    pairs = torch.view_as_complex(torch.arange(64.0).view(8, 4, 2))
    batch = {
        "strided": torch.arange(32.0).view(4, 8).T,
        "a dtype that numpy lacks": torch.arange(64.0)[::2].view(8, 4).to(torch.bfloat16),
        "strided bfloat16": torch.arange(32.0).view(4, 8).T.to(torch.bfloat16),
        "conjugated lazily": pairs.conj(),
        "negated lazily": pairs.conj().imag,
        "with a gradient": torch.arange(32.0).view(8, 4).requires_grad_(),
    }

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return model.weight.square().mean(), batch

    step = make(nn.Linear(1, 1), loss_fn)
    _, metrics = step(step.init(), batch)
    for name, tensor in batch.items():
        found = ts.gather(metrics[name])
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor.detach().resolve_conj().resolve_neg()), name


class Settings(nn.Module):
    """Plain attributes of every kind that the check before a call looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.powers, self.shift = nn.Linear(4, 4), 1.5, [1, 2], torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x).pow(sum(self.powers)) + self.shift


def delete(model: Any) -> None:
    Settings.scale = 3.5  # what `self.scale` finds then
    del model.scale


CHANGES = [
    lambda model: setattr(model, "scale", 2.5),
    lambda model: model.powers.__setitem__(0, 2),
    lambda model: setattr(model, "scale", True),  # another type
    lambda model: setattr(model, "shift", torch.ones(4)),
    lambda model: vars(model).update(scale=0.5),
    delete,
]


def test_the_step_sees_a_changed_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "scale", None, raising=False)
    torch.manual_seed(0)
    model, x = Settings(), torch.randn(8, 4)
    step = make(model)
    state, metrics = step(step.init(), x)
    for number, change in enumerate(CHANGES, 2):
        before = float(metrics["loss"])
        change(model)
        for _ in range(2):
            state, metrics = step(state, x)
            wanted = mean_square(copy.deepcopy(model).cpu(), x).item()
            np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)  # the sums of float32 have another order
        assert abs(float(metrics["loss"]) - before) > 0.1 * before
        assert step.num_compiles == number


def test_an_attribute_that_gets_an_equal_value_compiles_nothing() -> None:
    model, x = Settings(), torch.ones(8, 4)
    step = make(model)
    state, _ = step(step.init(), x)
    for _ in range(2):
        model.scale, model.powers = float("1.5"), [1, 2]
        state, _ = step(state, x)
    assert step.num_compiles == 1


COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles() -> Any:
    """The durations of the backend compilations since the test began."""
    found: list[float] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def test_five_steps_compile_once(compiles: list[float]) -> None:
    case = CASE["tied"]
    step = make_step(case)
    state = step.init(seed=0)
    jax.block_until_ready(state)
    compiles.clear()
    for batch in case.batches(5):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    assert len(compiles) == 1
    assert step.num_compiles == 1


def test_a_second_step_for_the_same_model_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE["mlp"]
    model, (batch,) = case.model(), case.batches(1)
    make_step(case, model=model).lower(make_step(case, model=model).init(), batch)
    monkeypatch.setattr("torch_shard._lowering.program.capture", None)  # a capture would fail now
    step = make_step(case, sizes=(8, 1), model=model)
    step(step.init(), batch)


def test_another_batch_shape_compiles_again_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    case = CASE["mlp"]
    step = make_step(case)
    state = step.init()
    x, y = case.batches(1)[0]
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        state, _ = step(state, (x, y))
        for _ in range(2):
            state, _ = step(state, (x[:4], y[:4]))
    first, again, second = (record.message for record in caplog.records)
    assert re.fullmatch(r"make_train_step: ready in \d+\.\d s, for a batch of \(8, 12\), \(8, 4\)", first)
    assert re.search(r"make_train_step compiles again: .*shape=\(8, 12\).* is now .*shape=\(4, 12\)", again)
    assert second.startswith("make_train_step: ready in ")


def test_a_model_on_the_jax_device_keeps_its_values() -> None:
    case = CASE["mlp"]
    model, (batch,) = case.model(), case.batches(1)
    wanted = case.loss_fn(model, batch).item()
    ts.place(model, make_mesh((4, 2)), case.plan)
    step = make_step(case, model=model)
    _, metrics = step(step.init(), batch)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert torch.isfinite(model[0].weight.detach().cpu()).all()  # the step did not donate the model's own arrays


def test_parameters_added_after_the_step_was_made() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    step = make(model)
    model.append(nn.Linear(4, 4))
    with refuses("1.bias, 1.weight of the model was added, .*Make a new step"):
        step(step.init(), torch.ones(8, 8))


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(16.0)
            self.register_buffer("whole", base)
            self.register_buffer("part", base[4:12])
            self.layer = nn.Linear(8, 4)

    with refuses("whole and part share memory", NotImplementedError):
        make(Views())


def test_parts_of_one_storage_are_not_shared_memory() -> None:
    model = nn.Linear(8, 4)
    storage = torch.randn(36)
    model.weight, model.bias = nn.Parameter(storage[:32].view(4, 8)), nn.Parameter(storage[32:])
    make(model)


def count_up(step: Any, rows: list[int]) -> None:
    state = step.init()
    for n in rows:
        state, _ = step(state, {"x": torch.ones(n, 4), "scale": 1.0})


def scaled_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return batch["scale"] * mean_square(model, batch["x"])


def test_a_leaf_of_many_shapes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    step = make(nn.Linear(4, 4), scaled_square)
    count_up(step, [8, 4, 8, 4])
    assert not caplog.records
    count_up(step, [12, 16])
    (record,) = caplog.records
    assert record.message.startswith("make_train_step: each new shape of a batch is compiled")
    assert "batch['x'] has come as (8, 4), (4, 4), (12, 4). Pad to one size" in record.message
    assert "scale" not in record.message


def test_programs_that_were_not_used_for_long_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_shard._common.types.KEPT", 2)
    model = nn.Linear(4, 4)
    step = make(model, scaled_square)
    count_up(step, [8, 4, 8])
    of_four, of_eight = map(weakref.ref, step.programs)
    count_up(step, [12])
    gc.collect()
    assert of_four() is None
    assert of_eight() is step.programs[0]
