"""The training step: one program, the state where the plan says, randomness, ties, export, and every refusal."""

import copy
import dataclasses
import logging
import random
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn.utils import prune

import torch_shard as ts
from tests.tables.cases import BATCH, CASES, chosen, make_mesh, squared_error

CASE = {case.name: case for case in CASES}
WHOLE = ts.ShardingPlan({}, default=P())
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def make(case: Any, sizes: tuple[int, int] = (4, 2), optimizer: Any = None, model: nn.Module | None = None) -> Any:
    optimizer = optimizer or optax.adam(1e-2)
    return ts.make_train_step(model or case.model(), case.loss_fn, optimizer, mesh=make_mesh(sizes), plan=case.plan)


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
    case = CASE["gpt"]
    step = make(case)
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
    make(case, model=model).lower(make(case, model=model).init(), batch)
    monkeypatch.setattr("torch_shard._lowering.program.capture", None)  # a capture would fail now
    step = make(case, sizes=(8, 1), model=model)
    step(step.init(), batch)


def test_another_batch_shape_compiles_again_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    case = CASE["mlp"]
    step = make(case)
    state = step.init()
    x, y = case.batches(1)[0]
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        state, _ = step(state, (x, y))
        assert not caplog.records
        for _ in range(2):
            state, _ = step(state, (x[:4], y[:4]))
    (record,) = caplog.records
    assert re.search(r"make_train_step compiles again: .*shape=\(8, 12\).* is now .*shape=\(4, 12\)", record.message)


def test_the_state_is_donated() -> None:
    case = CASE["mlp"]
    step = make(case)
    state, (batch,) = step.init(), case.batches(1)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    with pytest.raises(ValueError, match=r"donated to an earlier call.*state, metrics = step\(state, batch\)"):
        step(state, batch)


def test_moments_lie_like_their_parameters() -> None:
    step = make(CASE["gpt"], optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    state = step.init()
    for moments in (state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        for name, moment in moments.items():
            assert moment.sharding.is_equivalent_to(step.plan[name], moment.ndim), name
    assert state.params["blocks.0.up.weight"].sharding.shard_shape((64, 16)) == (32, 16)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x))


def masks(sizes: tuple[int, int], seed: int) -> list[np.ndarray]:
    """Which outputs were dropped in three steps."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        out = model(x)
        return out.square().mean(), {"kept": (out != 0)}

    plan = ts.ShardingPlan({"layer.weight": P("model")}, default=P())
    torch.manual_seed(0)
    step = ts.make_train_step(Dropping(), loss_fn, optax.sgd(0.0), mesh=make_mesh(sizes), plan=plan)
    state, found = step.init(seed=seed), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(BATCH, 16))
        found.append(np.array(metrics["kept"]))
    return found


def test_dropout_differs_by_step_repeats_by_seed_and_is_the_same_on_every_mesh() -> None:
    first = masks((8, 1), seed=0)
    assert not np.array_equal(first[0], first[1])
    assert 0.2 < np.mean(first) < 0.8  # 384 fair coins
    for sizes in [(8, 1), (4, 2), (1, 8), (1, 1)]:
        assert np.array_equal(first, masks(sizes, seed=0)), sizes
    assert not np.array_equal(first, masks((8, 1), seed=1))


def test_switching_to_eval_runs_the_other_program() -> None:
    torch.manual_seed(0)
    model = Dropping()
    step = ts.make_train_step(
        model, lambda m, x: m(x).square().mean(), optax.sgd(0.0), mesh=make_mesh((4, 2)), plan=WHOLE
    )
    state, x = step.init(), torch.randn(BATCH, 16)
    wanted = model.layer(x).square().mean().item()
    state, training = step(state, x)
    model.eval()
    state, evaluating = step(state, x)
    model.train()
    state, again = step(state, x)
    assert step.num_compiles == 2
    np.testing.assert_allclose(evaluating["loss"], wanted, rtol=1e-5)
    assert abs(float(training["loss"]) - wanted) > 1e-3
    assert abs(float(again["loss"]) - wanted) > 1e-3


def test_the_eval_step_is_in_eval_mode_and_leaves_model_and_state_alone() -> None:
    case = CASE["resnet_train"]
    model = case.model()
    step, (batch,) = make(case, model=model), case.batches(1)
    evaluate = ts.make_eval_step(model, case.loss_fn, mesh=make_mesh((4, 2)), plan=case.plan)
    state, _ = step(step.init(), batch)
    before = ts.gather(state.buffers)
    metrics = evaluate(state, batch)
    assert model.training
    assert all(m.training for m in model.modules())
    exported = step.export(state).eval()
    with torch.no_grad():
        np.testing.assert_allclose(metrics["loss"], case.loss_fn(exported, batch).item(), rtol=1e-4)
    assert all(torch.equal(before[n], t) for n, t in ts.gather(state.buffers).items())


def test_export_is_an_ordinary_module_with_ties_and_flags() -> None:
    case = CASE["tied"]
    model = case.model()
    model.out.bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    step = make(case, model=model)
    state, _ = step(step.init(), case.batches(1)[0])
    exported = step.export(state)
    assert exported.again.weight is exported.encode.weight is exported.extra
    assert [n for n, p in exported.named_parameters() if not p.requires_grad] == ["out.bias"]
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in exported.parameters())
    np.testing.assert_array_equal(exported.encode.weight.detach().numpy(), state.params["extra"])  # the first name
    assert not torch.equal(exported.encode.weight, model.encode.weight)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())  # the model was only read


def test_metrics_of_the_loss_come_back() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        return loss, {"error": {"mean": (out - batch["y"]).abs().mean()}, "rows": batch["x"].shape[0]}

    x, y = CASE["mlp"].batches(1)[0]
    model = CASE["mlp"].model()
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=CASE["mlp"].plan)
    _, metrics = step(step.init(), {"x": x, "y": y.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(metrics["error"]["mean"], (model(x) - y).abs().mean(), rtol=1e-5)
    assert int(metrics["rows"]) == BATCH
    assert set(metrics) == {"loss", "grad_norm", "error", "rows"}


def test_the_gradient_norm_is_torchs() -> None:
    case = CASE["gpt"]
    model, (batch,) = case.model(), case.batches(1)
    _, metrics = (step := make(case, model=model))(step.init(), batch)
    case.loss_fn(model, batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-5)


def test_parameters_without_a_gradient_stay_as_torch_leaves_them() -> None:
    """AdamW would decay them; torch skips a parameter whose .grad is None."""
    case = CASE["frozen"]
    model = case.model()
    step = make(case, optimizer=optax.adamw(0.1, weight_decay=0.5), model=model)
    state, _ = step(step.init(), case.batches(1)[0])
    for name in ("unused.weight", "unused.bias", "layers.2.weight", "layers.4.bias"):
        np.testing.assert_array_equal(state.tensors[name], model.get_parameter(name).detach().numpy())
    assert set(state.frozen) == {"layers.2.weight", "layers.2.bias", "layers.4.bias"}
    assert set(state.opt_state[0].mu) == set(state.params)


def test_hooks_on_parameters_act() -> None:
    model = nn.Linear(8, 4)
    model.weight.register_hook(lambda grad: grad * 3)
    plan = WHOLE
    step = ts.make_train_step(model, squared_error, optax.sgd(1.0), mesh=make_mesh((4, 2)), plan=plan)
    batch = (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    state, _ = step(step.init(), batch)
    squared_error(model, batch).backward()
    wanted = (model.weight - model.weight.grad).detach()
    np.testing.assert_allclose(state.params["weight"], wanted, rtol=1e-5, atol=1e-6)


def test_plain_attributes_are_read_at_each_step() -> None:
    case = CASE["buffers"]
    model, (batch,) = case.model(), case.batches(1)
    step = make(case, optimizer=optax.sgd(0.0), model=model)
    state, first = step(step.init(), batch)
    model.shift.add_(1)
    _, second = step(state, batch)
    assert abs(float(first["loss"]) - float(second["loss"])) > 1e-3
    assert step.num_compiles == 1


def test_a_model_on_the_jax_device_keeps_its_values() -> None:
    case = CASE["mlp"]
    model, (batch,) = case.model(), case.batches(1)
    wanted = case.loss_fn(model, batch).item()
    ts.place(model, make_mesh((4, 2)), case.plan)
    step = make(case, model=model)
    _, metrics = step(step.init(), batch)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert torch.isfinite(model[0].weight.detach().cpu()).all()  # the step did not donate the model's own arrays


def test_a_teacher_beside_the_model_is_followed() -> None:
    """Its parameters are read at each step, and so is its mode."""
    torch.manual_seed(0)
    teacher, model = Dropping(), nn.Linear(16, 16)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    step = ts.make_train_step(model, loss_fn, optax.sgd(0.0), mesh=make_mesh((4, 2)), plan=WHOLE)
    state, x = step.init(), torch.randn(BATCH, 16)
    state, training = step(state, x)
    teacher.eval()
    state, evaluating = step(state, x)
    np.testing.assert_allclose(evaluating["loss"], loss_fn(model, x).item(), rtol=1e-5)
    assert float(training["loss"]) != float(evaluating["loss"])
    with torch.no_grad():
        teacher.layer.weight.zero_()
    state, moved = step(state, x)
    np.testing.assert_allclose(moved["loss"], loss_fn(model, x).item(), rtol=1e-5)


def test_parameters_added_after_the_step_was_made() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    model.append(nn.Linear(4, 4))
    with refuses("parameters or buffers were added to the model or removed.*Make a new step"):
        step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))


def test_lower_gives_the_program() -> None:
    case = CASE["mlp"]
    step = make(case)
    state, (batch,) = step.init(), case.batches(1)
    compiled = step.lower(state, batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert "all-reduce" in compiled.as_text()


def test_tensor_parallel_blocks_communicate_as_the_textbook_says() -> None:
    """Megatron's count: two all-reduces over `model` per block forward and two backward, and nothing is gathered."""
    case = CASE["gpt"]
    step = make(case)
    program = step.lower(step.init(), case.batches(1)[0]).compile().as_text()
    found = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(.*?replica_groups=(\S+),", program)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(groups == "{{0,1},{2,3},{4,5},{6,7}}" for _, groups in found) == 4 * 2  # two blocks
    assert len(found) <= 4 * 2 + 3  # the loss, all gradients in one, the gradient norm


# What is refused, and how.


def refuses(match: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=match)


def test_a_batch_that_does_not_divide() -> None:
    case = CASE["mlp"]
    step = make(case)
    x, y = case.batches(1)[0]
    with refuses(
        r"(?s)mesh \(batch=4, model=2\).*batch\[0\] \(6, 12\): dim 0 = 6 is not a multiple of batch=4.*drop_last"
    ):
        step(step.init(), (x[:6], y))


def test_a_batch_of_an_unknown_kind() -> None:
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

    step = make(CASE["mlp"])
    with refuses(r"leaf of type Pair.*register_dataclass\(Pair\)", TypeError):
        step(step.init(), Pair(torch.ones(8, 8), torch.ones(8, 4)))


def test_a_mesh_without_the_batch_axis() -> None:
    mesh = ts.make_mesh(data=8)
    with refuses(r"mesh \(data=8\) has none.*batch_spec=P\('data'\)"):
        ts.make_train_step(nn.Linear(2, 2), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)
    step = ts.make_train_step(
        nn.Linear(8, 4), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE, batch_spec=P("data")
    )
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))


def test_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    with refuses(r"make_train_step: every mesh axis must be Auto.*make_mesh\(batch=8\)"):
        ts.make_train_step(nn.Linear(2, 2), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)


def test_wrong_kinds_of_arguments() -> None:
    mesh, model = make_mesh((8, 1)), nn.Linear(2, 2)
    with refuses("model must be a Module, got builtin", TypeError):
        ts.make_train_step(torch.sin, squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)  # pyright: ignore
    with refuses("plan must be a ShardingPlan, got dict", TypeError):
        ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=mesh, plan={})  # pyright: ignore
    with refuses(r"must be an optax gradient transformation.*got SGD", TypeError):
        ts.make_train_step(model, squared_error, torch.optim.SGD(model.parameters()), mesh=mesh, plan=WHOLE)  # pyright: ignore
    with refuses("no parameter of Linear has requires_grad=True"):
        ts.make_train_step(nn.Linear(2, 2).requires_grad_(False), squared_error, optax.sgd(0.1), mesh=mesh, plan=WHOLE)


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (lambda m, x: m(x), TypeError, r"must return a scalar.*it returned \(8, 4\) torch.float32.*\.mean\(\)"),
        (lambda m, x: m(x).mean().item(), NotImplementedError, r"item\(\)"),
        (lambda m, x: (m(x).mean(), [1]), TypeError, "metrics of type list"),
        (lambda m, x: (m(x).mean(), {"loss": x}), ValueError, "the step itself reports loss"),
        (lambda m, x: m(x).detach().mean(), ValueError, "does not depend on any trainable parameter"),
        (
            lambda m, x: m(x).mean() + torch.special.airy_ai(x).mean(),
            NotImplementedError,
            r"aten.special_airy_ai.*test_train",
        ),
    ],
)
def test_losses_that_cannot_be_trained(loss_fn: Any, error: type[Exception], match: str) -> None:
    step = ts.make_train_step(nn.Linear(8, 4), loss_fn, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    with pytest.raises(error, match=f"(?s){match}"):
        step(step.init(), torch.ones(8, 8))


def test_requires_grad_changed_behind_the_step() -> None:
    case = CASE["mlp"]
    model, (batch,) = case.model(), case.batches(1)
    step = make(case, model=model)
    state, _ = step(step.init(), batch)
    model[0].weight.requires_grad_(False)
    with refuses(r"requires_grad of 0\.weight has changed since the step was made.*Make a new step"):
        step(state, batch)


def test_a_post_accumulate_hook() -> None:
    model = nn.Linear(8, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    with refuses(r"weight has a post-accumulate-grad hook.*register_hook", NotImplementedError):
        step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))


def test_integers_of_a_batch_must_fit() -> None:
    case = CASE["gpt"]
    step = make(case)
    x, y = case.batches(1)[0]
    with refuses("values from 0 to 1099511627776, which do not fit int32", OverflowError):
        step(step.init(), (x.clone().index_fill_(0, torch.tensor([0]), 2**40).clamp(min=0), y))


def test_writes_to_plain_attributes_are_taken_back_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    model = Keeps(8, 4)
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))
    assert not hasattr(model, "last")
    assert "forward writes the plain attribute last" in caplog.text


def test_sharded_params_of_a_placed_model() -> None:
    mesh = make_mesh((4, 2))
    plan = ts.ShardingPlan({"weight": P(None, "model")}, default=P())
    model = ts.place(nn.Linear(8, 4), mesh, plan)
    assert model.weight.jax().sharding == NamedSharding(mesh, P(None, "model"))


class Recomputed(nn.Module):
    """Its backward pass runs parts of it again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_() if self.use_reentrant else x
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.use_reentrant
        )
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * self.second.bias.detach().sum().cos())
        return self.second(hidden)


def agrees_with_torch(model: nn.Module, loss_fn: Any, batches: list[Any], sizes: tuple[int, int] = (4, 2)) -> None:
    """SGD with momentum, several steps: every parameter against eager torch."""
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1, momentum=0.9), mesh=make_mesh(sizes), plan=WHOLE)
    state, wanted = step.init(), copy.deepcopy(model)
    sgd = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        state, metrics = step(state, batch)
        sgd.zero_grad()
        loss = loss_fn(wanted, batch)
        loss.backward()
        sgd.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    for name, parameter in wanted.named_parameters():
        found = state.tensors[name]
        np.testing.assert_allclose(found, parameter.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_pass_that_runs_parts_again_sees_the_state(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for _ in range(4)]
    agrees_with_torch(Recomputed(use_reentrant), squared_error, batches)


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4), (1, 8)], ids=str)
def test_grouped_convolutions_have_torchs_gradient_on_every_mesh(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=8, dilation=2))
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(BATCH, 4, 9, 9)
    model(x)
    agrees_with_torch(model, squared_error, [(x, torch.randn(BATCH, 4))], sizes)


def test_a_batch_may_be_written_to_while_the_step_runs() -> None:
    case = CASE["mlp"]
    model, (batch,) = case.model(), case.batches(1)
    wanted = case.loss_fn(model, batch).item()
    step = make(case, optimizer=optax.sgd(0.0), model=model)
    state = step.init()
    for _ in range(5):
        buffer = [x.clone() for x in batch]
        state, metrics = step(state, tuple(buffer))
        for x in buffer:
            x.mul_(1e6)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def test_parameters_that_only_some_batches_reach() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def loss_fn(model: nn.Module, batch: dict) -> torch.Tensor:
        return sum(getattr(model, name)(x).square().mean() for name, x in batch.items())

    step = ts.make_train_step(Heads(), loss_fn, optax.adam(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    state, _ = step(step.init(), {"a": torch.ones(8, 8)})
    with refuses(
        r"reaches a\.bias, a\.weight, b\.bias, b\.weight for some batches and not for others", NotImplementedError
    ):
        step(state, {"b": torch.ones(8, 8)})


def test_numbers_of_the_model_may_change(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed(nn.Linear):
        beta = 1.0

        def __init__(self) -> None:
            super().__init__(8, 4)
            self.beta, self.shift = 1.0, torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.beta * super().forward(x) + self.shift

    torch.manual_seed(0)
    model, batch = Annealed(), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    step = ts.make_train_step(model, squared_error, optax.sgd(0.0), mesh=make_mesh((8, 1)), plan=WHOLE)
    state, _ = step(step.init(), batch)
    with caplog.at_level(logging.INFO, logger="torch_shard"):
        for beta, shift in [(0.5, torch.zeros(4)), (0.5, torch.ones(4))]:
            model.beta, model.shift = beta, shift
            state, metrics = step(state, batch)
            np.testing.assert_allclose(metrics["loss"], squared_error(model, batch).item(), rtol=1e-5)
    assert "the attribute beta has another value" in caplog.text
    assert "the attribute shift has another value" in caplog.text


def test_a_label_out_of_range_is_loud() -> None:
    """torch raises; a compiled program cannot, so the loss is not a number."""
    step = ts.make_train_step(
        nn.Linear(8, 4), lambda m, b: F.cross_entropy(m(b[0]), b[1]), optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE
    )
    labels = torch.zeros(8, dtype=torch.int64)
    state, metrics = step(step.init(), (torch.ones(8, 8), labels))
    assert np.isfinite(metrics["loss"])
    labels[3] = 4
    _, metrics = step(state, (torch.ones(8, 8), labels))
    assert np.isnan(metrics["loss"])


def decays(params: dict) -> dict:
    return {name: "weight" in name for name in params}


OPTIMIZERS = {
    "multi_transform": optax.multi_transform({True: optax.adamw(1e-2), False: optax.sgd(1e-2, momentum=0.9)}, decays),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), decays), optax.adam(1e-2)),
    "masked adamw": optax.masked(optax.adamw(1e-2), decays),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 2, 10), mask=decays),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", chosen(OPTIMIZERS, ("multi_transform", "multi_steps", "adafactor", "plateau")))
def test_optimizers_of_optax_do_what_they_do_unsharded(name: str) -> None:
    case = CASE["mlp"]
    model, batches = case.model(), case.batches(3)
    found = []
    for sizes in [(1, 1), (4, 2)]:
        step = make(case, sizes, OPTIMIZERS[name], model)
        state = step.init()
        for batch in batches:
            state, _ = step(state, batch)
        found.append(ts.gather(state.params))
        assert step.num_compiles == 1
    for parameter, value in found[0].items():
        torch.testing.assert_close(found[1][parameter], value, rtol=1e-4, atol=1e-5)


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(16.0)
            self.register_buffer("whole", base)
            self.register_buffer("part", base[4:12])
            self.layer = nn.Linear(8, 4)

    with refuses("whole and part share memory", NotImplementedError):
        ts.make_train_step(Views(), squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)


def test_parts_of_one_storage_are_not_shared_memory() -> None:
    model = nn.Linear(8, 4)
    storage = torch.randn(36)
    model.weight, model.bias = nn.Parameter(storage[:32].view(4, 8)), nn.Parameter(storage[32:])
    ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)


def test_dicts_of_a_batch_keep_their_order() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert list(batch) == ["y", "x"]
        assert list(batch["y"]) == ["b", "a"]
        return F.mse_loss(model(batch["x"]), torch.stack(list(batch["y"].values()), 1))

    model, plan = nn.Linear(8, 2), ts.ShardingPlan({}, default=P())
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=plan)
    batch = {"y": {"b": torch.ones(8), "a": torch.zeros(8)}, "x": torch.randn(8, 8)}
    _, metrics = step(step.init(), batch)
    np.testing.assert_allclose(metrics["loss"], loss_fn(model, batch).item(), rtol=1e-6)


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["random", "numpy"])
def test_python_random_numbers_are_refused(draw: Any) -> None:
    with refuses("draws from Python's `random` or from numpy.random", NotImplementedError):
        ts.jax_jit(lambda x: x * draw())(torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_modules_that_keep_computed_tensors_are_exported() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    prune.l1_unstructured(model[1], "weight", 0.5)
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=WHOLE)
    batch = torch.ones(8, 8), torch.ones(8, 4)
    state, _ = step(step.init(), batch)
    trained = step.export(state)
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], squared_error(trained, batch).item(), rtol=1e-5)
