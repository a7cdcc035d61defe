"""The model in the user's hands is the one that is trained: scripts whose lines around the step stay as they are.

Each script runs twice, in eager torch and with a step; all that it returns must be equal.
"""

import collections
import copy
import gc
import io
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard._state.live import LiveModel

Loss = Callable[[Any, Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.inner(self.norm(x)))


def layered() -> nn.Sequential:
    """With layers that a step stores as rows of one array."""
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(16, 4))


def normed() -> nn.Sequential:
    """With running statistics; a bias before them has a gradient that is rounding, which Adam magnifies."""
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def batches(num: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 16, generator=draws), torch.randint(0, 4, (8,), generator=draws)) for _ in range(num)]


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class InTorch:
    device = "cpu"

    def __init__(self, model: nn.Module, optimizer: Any = None, loss: Loss = cross_entropy, **options: Any) -> None:
        self.model, self.loss, self.max_norm = model, loss, options.get("clip_grad_norm")
        self.optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def __call__(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return float(loss.detach())


class OnMesh(InTorch):
    device = "jax"

    def __init__(self, model: nn.Module, optimizer: Any = None, loss: Loss = cross_entropy, **options: Any) -> None:
        super().__init__(model, optimizer, loss, **options)
        mesh = ts.make_mesh(batch=4, model=2)
        plan = ts.plans.fsdp(model, mesh)
        self.step = ts.make_train_step(model, loss, self.optimizer, mesh=mesh, plan=plan, **options)
        self.state = self.step.init(seed=0)

    def __call__(self, batch: Any) -> float:
        self.state, metrics = self.step(self.state, batch)
        return float(metrics["loss"])


New = type[InTorch]


def on_cpu(tree: Any) -> Any:
    """Copies of all tensors on the CPU, as eager torch would go on to write to its own."""
    if isinstance(tree, dict):
        return {key: on_cpu(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [on_cpu(value) for value in tree]
    return tree.detach().to("cpu").clone() if isinstance(tree, torch.Tensor) else tree


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return on_cpu(dict(model.state_dict()))


def moments(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    return on_cpu(optimizer.state_dict()["state"])


def saves_and_loads(new: New) -> Any:
    model = normed()
    train = new(model)
    for batch in batches(3):
        train(batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": train.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(value.device.type == "cpu" for value in saved["model"].values())
    return dict(saved["model"]), saved["optimizer"]["state"]


def saves_the_module_whole(new: New) -> Any:
    model = layered()
    train = new(model)
    train(batches(1)[0])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(type(parameter) is nn.Parameter for parameter in loaded.parameters())
    return weights(loaded), loaded(batches(1)[0][0]).detach()


def evaluates(new: New) -> Any:
    model = normed()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    model.eval()
    with torch.no_grad():
        out = model(batches(1, seed=7)[0][0].to(train.device))
    model.train()
    return on_cpu(out), losses, [train(batch) for batch in batches(2, seed=3)]


def clamps_after_each_step(new: New) -> Any:
    model, losses = layered(), []
    train = new(model)
    for batch in batches(3):
        losses.append(train(batch))
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)
    return losses, weights(model)


def averages(new: New) -> Any:
    model = normed()
    train = new(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for batch in batches(3):
        train(batch)
        averaged.update_parameters(model)
    return weights(averaged.module)


def swaps_in_an_average_of_its_own(new: New) -> Any:
    model, losses = layered(), []
    train = new(model)
    shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for batch in batches(2):
        losses.append(train(batch))
        for name, parameter in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * parameter.data
    backup = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = shadow[name]
    averaged = weights(model)
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    return averaged, [*losses, *map(train, batches(2, seed=3))], weights(model)


def follows_with_a_target_network(new: New) -> Any:
    model = layered()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) + F.mse_loss(model(batch[0]), target(batch[0]))

    train, losses = new(model, loss=loss), []
    for number, batch in enumerate(batches(4)):
        losses.append(train(batch))
        if number % 2:
            target.load_state_dict(model.state_dict())
    return losses


def resumes_after_init(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": train.optimizer.state_dict()})
    losses += [train(batch) for batch in batches(2, seed=3)]
    model.load_state_dict(saved["model"])
    train.optimizer.load_state_dict(saved["optimizer"])
    losses += [train(batch) for batch in batches(2, seed=4)]
    return losses, weights(model), moments(train.optimizer)


def writes_to_the_optimizer(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    for own in train.optimizer.state.values():
        own["exp_avg"].zero_()
    losses += [train(batch) for batch in batches(1, seed=3)]
    train.optimizer.state[model[1].inner.weight]["step"].zero_()
    losses += [train(batch) for batch in batches(1, seed=4)]
    train.optimizer.state = collections.defaultdict(dict)
    losses += [train(batch) for batch in batches(1, seed=5)]
    return losses, weights(model), moments(train.optimizer)


def gets_a_new_head(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    nn.init.zeros_(model[4].weight)
    losses += [train(batch) for batch in batches(1, seed=3)]
    model[4] = nn.Linear(16, 7)
    train = new(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return losses, [train(batch) for batch in batches(2, seed=4)], weights(model), moments(train.optimizer)


def unfreezes(new: New) -> Any:
    model = layered()
    model[:2].requires_grad_(False)
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    model[0].inner.weight.mul_(0.5)
    losses += [train(batch) for batch in batches(1, seed=3)]
    before = weights(model)
    model.requires_grad_(True)
    train = new(model)
    return losses, before, [train(batch) for batch in batches(2, seed=4)], weights(model)


def goes_to_the_cpu_and_back(new: New) -> Any:
    model = normed()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    model.to("cpu")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    before, out = weights(model), model(batches(1)[0][0]).detach()  # which writes the running statistics
    model.to(train.device)
    losses += [train(batch) for batch in batches(1, seed=3)]
    model.to("cpu")
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    return before, out, losses, [train(batch) for batch in batches(2, seed=4)], weights(model)


def trains_two_models_in_turn(new: New) -> Any:
    generator, critic = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))

    def of_critic(critic: Any, batch: Any) -> torch.Tensor:
        made = generator(batch[0].roll(1, 0)).detach()
        return F.softplus(-critic(batch[0])).mean() + F.softplus(critic(made)).mean()

    def of_generator(generator: Any, batch: Any) -> torch.Tensor:
        return F.softplus(-critic(generator(batch[0]))).mean()

    judge, make, losses = new(critic, loss=of_critic), new(generator, loss=of_generator), []
    for batch in batches(3):
        losses += [judge(batch), make(batch)]
    return losses, weights(generator), weights(critic)


def shares_layers_between_models(new: New) -> Any:
    encoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    models = [nn.Sequential(encoder, nn.Linear(16, 4)) for _ in range(2)]
    trains = [new(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    return [train(batch) for batch in batches(3) for train in trains], *map(weights, models)


def has_gradients_of_its_own(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    model.zero_grad()
    x = batches(1, seed=7)[0][0].to(train.device).requires_grad_()
    model(x).sum().backward()
    gradients = on_cpu([x.grad, model[1].inner.weight.grad])
    model.zero_grad()
    late = model(x).sum()
    losses += [train(batch) for batch in batches(2, seed=3)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    return losses, gradients


def keeps_copies(new: New) -> Any:
    model = layered()
    train = new(model)
    train(batches(1)[0])
    kept = [copy.deepcopy(model.state_dict()), {name: value.clone() for name, value in model.state_dict().items()}]
    kept.append({name: value.expand(value.shape).contiguous() * 1 for name, value in model.state_dict().items()})
    twin, alias = copy.deepcopy(model), model.state_dict()
    losses = [train(batch) for batch in batches(2, seed=3)]
    return losses, *map(on_cpu, map(dict, kept)), weights(twin), on_cpu(dict(alias))


def has_ties_and_buffers(new: New) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
            self.second.weight = self.first.weight
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("shift", torch.arange(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.last(self.second(torch.tanh(self.first(x)))) + self.shift

    model = Tied()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    model.second.weight.data.mul_(0.5)
    losses += [train(batch) for batch in batches(1, seed=3)]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert saved["first.weight"].data_ptr() == saved["second.weight"].data_ptr()
    return losses, dict(saved), on_cpu(model.shift), int(model.calls), str(model.calls.dtype)


def is_recurrent(new: New) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])

    model = Net()
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    return losses, on_cpu(model(batches(1)[0][0].to(train.device))), weights(model)


def has_hooks_and_lists(new: New) -> Any:
    model = layered()
    listed = list(model.parameters())
    hook = listed[2].register_hook(lambda grad: grad * 3)
    train = new(model, torch.optim.SGD(listed, lr=0.1))
    losses = [train(batch) for batch in batches(2)]
    hook.remove()
    losses += [train(batch) for batch in batches(1, seed=3)]
    assert all(own is other for own, other in zip(listed, model.parameters(), strict=True))
    return losses, on_cpu(listed)


def keeps_calls_that_do_nothing(new: New) -> Any:
    model, losses = layered(), []
    train = new(model, clip_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(train.optimizer, T_max=10)
    for batch in batches(3):
        losses.append(train(batch))
        schedule.step()
        train.optimizer.zero_grad()
        train.optimizer.step()
        model.zero_grad()
    return losses, schedule.get_last_lr(), weights(model)


def is_scripted(new: New) -> Any:
    model = torch.jit.script(normed())
    train = new(model)
    losses = [train(batch) for batch in batches(2)]
    return losses, on_cpu(model.eval()(batches(1)[0][0].to(train.device))), weights(model)


def swaps_parameters(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(1)]
    first, second = model[0].inner.weight, model[1].inner.weight
    first.data, second.data = second.data, first.data
    kept = model[2].inner.weight.data
    model[2].inner.weight.data = torch.ones_like(kept) * 0.1
    losses += [train(batch) for batch in batches(1, seed=3)]
    seen = on_cpu(kept)
    model[2].inner.weight.data = kept
    return losses, seen, [train(batch) for batch in batches(1, seed=4)], weights(model)


def moves_layers(new: New) -> Any:
    model = layered()
    train = new(model)
    losses = [train(batch) for batch in batches(1)]
    out = model[1]
    model[0], model[1] = nn.Linear(16, 16).to(train.device), model[0]
    train = new(model)
    losses += [train(batch) for batch in batches(2, seed=3)]
    return losses, weights(model), weights(out)


def has_one_optimizer_after_the_other(new: New) -> Any:
    model = layered()
    first, second = (torch.optim.Adam(model.parameters(), lr=rate) for rate in (1e-2, 1e-3))
    train = new(model, first)
    losses = [train(batch) for batch in batches(2)]
    train = new(model, second)
    losses += [train(batch) for batch in batches(1, seed=3)]
    return losses, moments(first), moments(second)


def goes_back_twice(new: New) -> Any:
    model = layered()
    train = new(model)
    train(batches(1)[0])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": train.optimizer.state_dict()})
    losses = []
    for _ in range(2):
        model.load_state_dict(saved["model"])
        train.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        losses += [train(batch) for batch in batches(1, seed=3)]
    zeros = torch.zeros(16, 16, device=train.device)
    for layer in (0, 1):
        train.optimizer.state[model[layer].inner.weight]["exp_avg"].copy_(zeros)
    return [*losses, train(batches(1)[0])], weights(model)


def has_a_parameter_of_its_own_kind(new: New) -> Any:
    class Bounded(nn.Parameter):
        pass

    model = layered()
    model[0].inner.weight = Bounded(model[0].inner.weight.detach())
    train, losses = new(model), []
    for batch in batches(2):
        losses.append(train(batch))
        for parameter in model.parameters():
            if isinstance(parameter, Bounded):
                parameter.data.clamp_(-0.05, 0.05)
    return losses, weights(model)


FAST = [
    swaps_parameters,
    moves_layers,
    saves_and_loads,
    evaluates,
    clamps_after_each_step,
    averages,
    swaps_in_an_average_of_its_own,
    resumes_after_init,
    gets_a_new_head,
    goes_to_the_cpu_and_back,
    trains_two_models_in_turn,
    has_gradients_of_its_own,
]
SLOW = [
    has_one_optimizer_after_the_other,
    goes_back_twice,
    has_a_parameter_of_its_own_kind,
    saves_the_module_whole,
    follows_with_a_target_network,
    writes_to_the_optimizer,
    unfreezes,
    shares_layers_between_models,
    keeps_copies,
    has_ties_and_buffers,
    is_recurrent,
    has_hooks_and_lists,
    keeps_calls_that_do_nothing,
    is_scripted,
]
SCRIPTS = [*FAST, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)]


def assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    elif isinstance(wanted, torch.Tensor | float):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)  # Adam divides by small numbers
    else:
        assert found == wanted


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_is_what_it_is_in_torch(script: Callable[[New], Any]) -> None:
    results = []
    for new in (InTorch, OnMesh):
        torch.manual_seed(3)
        results.append(script(new))
    wanted, found = results
    assert_equal(found, wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "loop": {"scan_layers": True, "remat": "block"},
    "one by one": {"scan_layers": False},
    "offload": {"offload": "optimizer"},
    "ema": {"ema": 0.9},
    "microbatches": {"accumulate_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_writes_reach_states_of_every_kind(name: str) -> None:
    results = []
    for new, options in ((InTorch, {}), (OnMesh, OPTIONS[name])):
        torch.manual_seed(3)
        model = layered()
        train = new(model, **options)
        losses = [train(batch) for batch in batches(2)]
        before = weights(model)
        for parameter in model[2].parameters():
            parameter.data.mul_(0.5)
        for own in train.optimizer.state.values():
            own["exp_avg"].mul_(0.5)
        losses += [train(batch) for batch in batches(2, seed=3)]
        results.append((losses, before, weights(model), moments(train.optimizer)))
    assert_equal(results[1], results[0])


def test_evaluations_proofs_checkpoints_and_exports_have_what_was_written() -> None:
    torch.manual_seed(3)
    model = layered()
    train = OnMesh(model)
    train(batches(1)[0])
    for parameter in model.parameters():
        parameter.data.mul_(0.7)
    batch = batches(1, seed=5)[0]
    twin = copy.deepcopy(model).to("cpu")
    wanted = cross_entropy(twin, batch).item()
    mesh, step = train.step.mesh, train.step
    step.prove(train.state, batch).raise_if_different()
    assert_equal(weights(step.export(train.state)), weights(twin))
    assert float(step.evaluation()(train.state, batch)["loss"]) == pytest.approx(wanted, rel=1e-5)
    apply = ts.make_apply(model, mesh=mesh, plan=ts.plans.fsdp(model, mesh))
    assert_equal(torch.from_numpy(np.array(apply(batch[0]))), twin(batch[0]).detach())
    with ts.Checkpointer(tempfile.mkdtemp()) as checkpointer:
        checkpointer.save(train.state)
        with torch.device("meta"):
            empty = layered()
        other = ts.make_train_step(
            empty, cross_entropy, torch.optim.AdamW(empty.parameters()), mesh=mesh, plan=ts.plans.fsdp(empty, mesh)
        )
        checkpointer.restore(other)
    assert_equal(weights(empty), weights(twin))
    assert_equal(moments(other.optimizer), moments(train.optimizer))
    assert train(batch) == pytest.approx(wanted, rel=1e-5)


def test_what_would_be_another_thing_than_in_torch_is_an_error_that_says_what_to_do() -> None:
    model = layered()
    train = OnMesh(model)
    train(batches(1)[0])
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_: .*clip_grad_norm=1\.0"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"^clip_grad_value_: .*clip_grad_value="):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"^0\.norm\.weight\.grad: .*watch="):
        [parameter.grad for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"^GradScaler: .*compute_dtype=torch\.bfloat16"):
        scaler.unscale_(train.optimizer)
    with pytest.raises(RuntimeError, match=r"A CPU tensor.*Move it first: tensor\.to\('jax'\)"):
        model(batches(1)[0][0])
    model(batches(1)[0][0].to("jax")).sum().backward()
    with pytest.raises(RuntimeError, match=r"^AdamW\.step\(\): .*make_train_step.*optimizer\.step\(\) out"):
        train.optimizer.step()
    train.optimizer.zero_grad()


def test_writes_go_to_the_last_state_alone() -> None:
    model = layered()
    train = OnMesh(model)
    train(batches(1)[0])
    copied = jax.tree.map(jnp.copy, train.state)
    train(batches(1)[0])
    model[0].inner.weight.data.zero_()
    with pytest.raises(ValueError, match=r"0\.inner\.weight.*that of step 2 .*is given that of step 1 "):
        train.step(copied, batches(1)[0])
    train(batches(1)[0])
    train.step(copied, batches(1)[0])  # nothing waits any more
    model[4].weight = nn.Parameter(torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"4\.weight of the model was replaced.*a new optimizer and a new step"):
        train(batches(1)[0])


def test_writes_to_an_optimizer_go_to_the_last_state_alone() -> None:
    model = layered()
    train = OnMesh(model)
    train(batches(1)[0])
    for own in train.optimizer.state.values():
        own["exp_avg"].mul_(-3)
    copied = jax.tree.map(jnp.copy, train.state)
    with pytest.raises(ValueError, match=r"the state of AdamW.*that of step 1 .*is given that of step 1 "):
        train.step(copied, batches(1)[0])


def test_a_module_that_was_replaced_and_memory_of_two_entries_are_refused() -> None:
    model = layered()
    train = OnMesh(model)
    train(batches(1)[0])
    model[0], model[1] = model[1], model[0]
    with pytest.raises(ValueError, match=r"0\.norm\.weight.* of the model was replaced"):
        train(batches(1)[0])
    model[0], model[1] = model[1], model[0]
    model[0].inner.weight.data = model[1].inner.weight.data
    with pytest.raises(NotImplementedError, match=r"0\.inner\.weight and 1\.inner\.weight share memory.*clone"):
        train(batches(1)[0])
    with pytest.raises(ValueError, match="read-only"):
        model[2].inner.weight.detach().numpy()[:] = 0


def test_an_init_that_fails_leaves_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layered()
    before, mesh = weights(model), ts.make_mesh(batch=8)
    plan = ts.ShardingPlan({}, default=P())

    def make() -> ts.TrainStep:
        return ts.make_train_step(
            model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), mesh=mesh, plan=plan, scan_layers=False
        )

    hold, count = LiveModel.hold, itertools.count()

    def failing(self: LiveModel, stacks: Any, tensors: Any) -> None:
        hold(self, stacks, tensors)
        if next(count) == 3:
            raise KeyboardInterrupt

    step = make()
    with monkeypatch.context() as patch:
        patch.setattr(LiveModel, "hold", failing)
        with pytest.raises(KeyboardInterrupt):
            step.init()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_equal(weights(model), before)
    state, _ = step(step.init(), batches(1)[0])
    for parameter in model.parameters():
        parameter.data.fill_(0.25)
    count = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(LiveModel, "hold", failing)
        with pytest.raises(KeyboardInterrupt):
            make().init()
    state, _ = step(state, batches(1)[0])
    twin = layered()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.25)
    InTorch(twin, torch.optim.SGD(twin.parameters(), 0.1))(batches(1)[0])
    assert_equal(weights(model), weights(twin))


def test_a_run_that_is_over_leaves_no_array() -> None:
    def run() -> None:
        train = OnMesh(layered())
        train(batches(1)[0])
        weights(train.model)

    run()
    gc.collect()
    before = len(jax.live_arrays())
    run()
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_memory_of_before_that_somebody_has_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = layered()
    kept = model[4].state_dict()
    OnMesh(model)
    assert "4.weight, 4.bias" in caplog.text
    assert "Take it after init" in caplog.text
    assert kept["weight"].device.type == "cpu"


def test_entries_of_a_state_that_is_gone_are_errors() -> None:
    model = layered()
    train = OnMesh(model)
    for leaf in jax.tree.leaves(train.state.params):
        leaf.delete()
    with pytest.raises(RuntimeError, match=r"^4\.bias has no values: they went into a step that failed.*restore"):
        model[4].bias.cpu()


@pytest.mark.parametrize("build", [layered, normed])
def test_an_array_that_left_the_model_outlives_the_step(build: Callable[[], nn.Module]) -> None:
    """A step takes back the memory of its state, and operators of torch may give what they are given."""
    model = build()
    train = OnMesh(model)
    kept: list[tuple[Any, torch.Tensor]] = []
    for value in model.state_dict().values():
        left = [
            value.clone(),
            value.expand(value.shape),
            value.contiguous(),
            value.reshape(value.shape),
            value.to("jax"),
        ]
        left = [each * 1 if number in (1, 2, 3, 4) else each for number, each in enumerate(left)]
        kept += [(each, each.cpu()) for each in (*left, nn.functional.dropout(value.float(), 0.5, training=False) * 1)]
    train(batches(1)[0])
    for found, wanted in kept:
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0)


def test_an_optax_run_shows_its_values_and_a_trial_leaves_the_model_alone() -> None:
    torch.manual_seed(3)
    model = layered()
    before, mesh = weights(model), ts.make_mesh(batch=8)
    plan = ts.ShardingPlan({}, default=P())
    ts.compare_with_torch(model, cross_entropy, batches(1)[0], mesh=mesh, plan=plan).raise_if_different()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_equal(weights(model), before)
    step = ts.make_train_step(model, cross_entropy, optax.sgd(0.1), mesh=mesh, plan=plan)
    state, _ = step(step.init(seed=0), batches(1)[0])
    step.prove(state, batches(1)[0]).raise_if_different()
    assert_equal(weights(model), weights(step.export(state)))
