"""The first value that is not finite, planted in many places and named each time."""

import dataclasses
import math

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
HALF = torch.cat([X[:4], torch.full((4, 6), 1e30)])  # the later rows overflow in squares


class Layer(nn.Module):
    def __init__(self, breaks=""):
        super().__init__()
        self.inner, self.breaks = nn.Linear(6, 6), breaks
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        y = self.inner(x) * self.scale
        if self.breaks == "log":
            y = torch.log(y * 0)
        if self.breaks == "divide":
            y = y / (y * 0)
        if self.breaks == "sqrt":
            y = torch.sqrt(y * 0)
        if self.breaks == "norm":
            y = y + (y * 0).norm(dim=-1, keepdim=True)
        if self.breaks == "softmax":
            y = y.masked_fill(y > -1e9, -math.inf).softmax(-1)
        if self.breaks == "exp":
            y = torch.exp(y * 0 + 100)
        if self.breaks == "acos":
            y = torch.acos(y * 0 + 2)
        if self.breaks == "pow":
            y = (y * 0).pow(0.5)
        if self.breaks == "square":
            y = x.square() + y
        return x * 0.5 + y


class Net(nn.Module):
    def __init__(self, breaks="", at=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(breaks if number == at else "") for number in range(6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean(model, x):
    return F.dropout(model(x), 0.1).square().mean()


def with_log(model, x):
    return torch.log(model(x).square() * 0).mean()


def filled(model, name, value):
    model.state_dict()[name].view(-1)[0] = value
    return model


AT_3 = {"module": "layers.3"}
PLANTED = {  # model, loss, batch, options, what is to be named
    "log": (Net("log"), mean, X, {}, {"place": "forward", "name": "log", **AT_3}),
    "divide": (Net("divide"), mean, X, {}, {"place": "forward", "name": "div", "value": "infinity", **AT_3}),
    "softmax": (Net("softmax"), mean, X, {}, {"place": "forward", "name": "softmax", "value": "NaN", **AT_3}),
    "exp": (Net("exp"), mean, X, {}, {"place": "forward", "name": "exp", "value": "infinity", **AT_3}),
    "acos": (Net("acos"), mean, X, {}, {"place": "forward", "name": "acos", "value": "NaN", **AT_3}),
    "sqrt, backward": (Net("sqrt"), mean, X, {}, {"place": "backward", "name": "sqrt", **AT_3}),
    "pow, backward": (Net("pow"), mean, X, {}, {"place": "backward", "name": "pow", **AT_3}),
    "first layer": (Net("log", 0), mean, X, {}, {"place": "forward", "module": "layers.0"}),
    "last layer": (Net("sqrt", 5), mean, X, {}, {"place": "backward", "module": "layers.5"}),
    "loss": (Net(), with_log, X, {}, {"place": "forward", "module": "loss_fn", "name": "log"}),
    "layers one by one": (Net("log"), mean, X, {"scan_layers": False}, {"place": "forward", **AT_3}),
    "a loop of all": (Net(), mean, HALF, {}, {"place": "forward", "name": "square", "module": "loss_fn"}),
    "remat": (Net("log"), mean, X, {"remat": "block"}, {"place": "forward", **AT_3}),
    "remat, backward": (Net("sqrt"), mean, X, {"remat": "block"}, {"place": "backward", **AT_3}),
    "microbatch": (Net("square"), mean, HALF, {"accumulate_steps": 4, "mesh": (1, 1)},
                   {"place": "forward", "microbatch": 2, "num_microbatches": 4, "name": "square", **AT_3}),
    "microbatch, backward": (Net("sqrt"), mean, X, {"accumulate_steps": 2}, {"place": "backward", "microbatch": 0}),
    "batch": (Net(), mean, torch.where(X > 1, math.nan, X), {}, {"place": "batch", "name": "batch", "value": "NaN"}),
    "parameter": (filled(Net(), "layers.2.inner.weight", math.nan), mean, X, {},
                  {"place": "parameter", "name": "layers.2.inner.weight"}),
    "buffer": (filled(Net(), "layers.4.scale", math.inf), mean, X, {}, {"place": "buffer", "name": "layers.4.scale"}),
    "bfloat16": (Net("exp"), mean, X, {"compute_dtype": torch.bfloat16}, {"place": "forward", "name": "exp", **AT_3}),
    "norm of gradients": (Net(), lambda m, x: m(x).sum() * 1e25, X, {}, {"place": "norm"}),
}  # fmt: skip


def make(model, loss_fn, mesh=(4, 2), **options):
    plan = ts.ShardingPlan({"layers.*.inner.weight": P("model")}, default=P())
    sizes = {"batch": mesh[0], "model": mesh[1]}
    return ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=ts.make_mesh(**sizes), plan=plan, **options)


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_named(planted):
    model, loss_fn, batch, options, wanted = planted
    step = make(model, loss_fn, **options)
    report = ts.find_nan(step, step.init(seed=0), batch)
    assert report
    assert {name: getattr(report, name) for name in wanted} == wanted, str(report)
    if report.place in ("forward", "backward"):
        assert 'test_find_nan.py", line' in report.line
        assert report.sentence in str(report)


def test_the_modules_before_are_shown_with_their_largest_entries():
    step = make(model := Net("log"), mean)
    report = ts.find_nan(step, step.init(seed=0), X)
    assert [m.name for m in report.before][-2:] == ["layers.2", "layers.3.inner"]
    x = X
    for layer in model.layers[:3]:
        x = layer(x)
    assert report.before[-2].largest == pytest.approx(x.abs().max().item())
    assert "iteration 3 of a loop" in " ".join(report.notes) or not step.programs


def test_a_finite_step_has_none():
    step = make(Net(), mean)
    report = ts.find_nan(step, step.init(seed=0), X)
    assert not report
    assert "All values of this step are finite" in str(report)


def test_a_mask_of_minus_infinity_is_not_named():
    def masked(model, x):
        scores = model(x).masked_fill(torch.tensor([[True, False]]), -math.inf)
        return scores.softmax(-1).log()[:, 1].sum() + torch.sqrt(x * 0 + model(x).sum() * 0).sum()

    step = make(Net(), masked)
    report = ts.find_nan(step, step.init(seed=0), X)
    assert (report.place, report.name) == ("backward", "sqrt")


def test_what_only_bfloat16_breaks_says_so():
    def small(model, x):
        y = model.head(x)  # the 1e-30 is lost beside 1 in half of the digits
        return torch.log((1 + 1e-3 * torch.tanh(y.float()) - 1).abs().bfloat16().square() * 1e-38).mean()

    step = make(Net(), small, compute_dtype=torch.bfloat16)
    report = ts.find_nan(step, step.init(seed=0), X)
    assert report.place in ("forward", "backward")
    assert any("without it" in note for note in report.notes)


def test_the_update_is_looked_at_too():
    model = Net()
    huge = optax.sgd(1e38)
    mesh, plan = ts.make_mesh(batch=2), ts.ShardingPlan({}, default=P())
    step = ts.make_train_step(model, lambda m, x: m(x).sum() * 1e6, huge, mesh=mesh, plan=plan)
    report = ts.find_nan(step, step.init(seed=0), X)
    assert report.place == "update"


def test_nothing_of_the_model_or_the_state_changes():
    step = make(model := Net("sqrt"), mean)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = step.init(seed=0)
    ts.find_nan(step, state, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert int(step(state, X)[0].step) == 1  # it was not donated


@pytest.mark.parametrize("given", ["step", "state"])
def test_wrong_arguments_are_refused(given):
    step = make(Net(), mean)
    arguments = {"step": step, "state": step.init(seed=0), "batch": X, given: 3}
    with pytest.raises(TypeError, match=f"find_nan: {given} must be a Train"):
        ts.find_nan(**arguments)


def test_a_state_that_was_donated_is_refused():
    step = make(Net(), mean)
    state = step.init(seed=0)
    step(state, X)
    with pytest.raises(ValueError, match="was donated to an earlier call"):
        ts.find_nan(step, state, X)
    assert dataclasses.is_dataclass(state)
