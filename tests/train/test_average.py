"""The moving average of parameters (`ema=`) beside torch's own."""

import copy

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_shard as ts
from tests.oracles.steps import step_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
DECAY = 0.8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.out(self.norm(self.blocks(x))) * self.frozen


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def in_torch(model, steps):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.n_averaged.fill_(1)  # torch takes the values after the first step as they are; here those before it count
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, X).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module


@pytest.mark.parametrize(("kind", "limit"), [("torch", {"skip_grad_norm": 1e6}), ("optax", {})])
def test_the_average_is_torchs(kind, limit):
    model = Net().eval()  # without running statistics, which microbatches change one by one
    eager = in_torch(copy.deepcopy(model), 4)
    sgd = optax.sgd(0.1, momentum=0.9)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9) if kind == "torch" else sgd
    plan = ts.ShardingPlan({"out.weight": P(None, "model")}, default=P())
    step = step_of(model, loss_fn, optimizer, mesh=(2, 2), plan=plan, ema=DECAY, accumulate_steps=2)
    state = step.init(seed=0)
    for _ in range(4):
        state, _ = step(state, X, **limit)
    found = step.export(state, ema=True).state_dict()
    for name, wanted in eager.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(step.export(state).out.weight, found["out.weight"])
    evaluated = step.evaluation()(step.averaged(state), X)["loss"]
    assert float(evaluated) == pytest.approx(loss_fn(eager, X).item(), rel=1e-5)
    step.prove(state, X).raise_if_different()
    if kind == "torch":
        assert set(step.export_optimizer(state)["state"][0]) == {"momentum_buffer"}


def test_a_step_that_is_skipped_is_not_averaged():
    model = Net().eval()
    step, before = step_of(model, loss_fn, mesh=(2, 1), ema=DECAY), copy.deepcopy(model)
    state, metrics = step(step.init(seed=0), X, skip_grad_norm=1e-9)
    assert metrics["guard"].skipped
    assert torch.equal(step.export(state, ema=True).out.weight, before.out.weight)


def test_an_average_goes_on_from_a_checkpoint(tmp_path):
    step = step_of(Net(), loss_fn, optax.adam(0.1), mesh=(2, 1), ema=DECAY)
    state, _ = step(step.init(seed=0), X)
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        checkpointer.wait()
        again = checkpointer.restore(step)
    before, after = (step.export(each, ema=True).state_dict() for each in (state, again))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("decay", [1.0, -0.1, True, "0.9", float("nan")])
def test_bad_decays_are_refused(decay):
    with pytest.raises(ValueError, match="make_train_step: ema must be the decay of the average"):
        step_of(Net(), loss_fn, ema=decay)


def test_without_averages_there_are_none():
    state = step_of(Net(), loss_fn).init(seed=0)
    for step in (step_of(Net(), loss_fn), step_of(Net(), loss_fn, ema=DECAY)):
        with pytest.raises(ValueError, match="the state has no averages"):
            step.export(state, ema=True)


@pytest.mark.parametrize(
    "optimizer", [lambda model: torch.optim.Adam(model.parameters()), lambda model: optax.adam(0.1)]
)
@pytest.mark.parametrize("options", [{"ema": DECAY}, {"moment_dtype": torch.bfloat16}])
def test_what_a_state_was_made_with_is_said_where_it_differs(optimizer, options, tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    steps = [step_of(model, loss_fn, optimizer(model), **own) for own in (options, {})]
    (name,) = options
    said = "The state was made with{} {name}=, and this step with{} {name}=: make the step with{} {name}= too"
    for (one, other), given, own in ((steps, "", "out"), (steps[::-1], "out", "")):
        with ts.Checkpointer(tmp_path / f"with{given}") as checkpoints:
            checkpoints.save(one.init())
            with pytest.raises(ValueError, match=said.format(given, own, given, name=name)):
                checkpoints.restore(other)
        if name == "ema":
            with pytest.raises(ValueError, match=said.format(given, own, given, name=name)):
                other(one.init(), X)
