"""The first value that is not finite, planted in many places and named each time."""

import math

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of

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
        if self.breaks == "sqrt":
            y = torch.sqrt(y * 0)
        if self.breaks == "exp":
            y = torch.exp(y * 0 + 100)
        if self.breaks == "square":
            y = x.square() + y
        return x * 0.5 + y


class Net(nn.Module):
    def __init__(self, breaks=""):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(breaks if number == 2 else "") for number in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean(model, x):
    return F.dropout(model(x), 0.1).square().mean()


def filled(model, name, value):
    model.state_dict()[name].view(-1)[0] = value
    return model


AT_2 = {"module": "layers.2"}
PLANTED = {  # model, loss, batch, options, what is to be named
    "layers one by one": (Net("log"), mean, X, {"scan_layers": False}, {"place": "forward", "name": "log", **AT_2}),
    "a loop of all": (Net(), mean, HALF, {}, {"place": "forward", "name": "square", "module": "loss_fn"}),
    "remat": (Net("exp"), mean, X, {"remat": "block"},
              {"place": "forward", "name": "exp", "value": "infinity", **AT_2}),
    "microbatch": (Net("square"), mean, HALF, {"accumulate_steps": 4, "mesh": (1, 1)},
                   {"place": "forward", "microbatch": 2, "num_microbatches": 4, "name": "square", **AT_2}),
    "batch": (Net(), mean, torch.where(X > 1, math.nan, X), {}, {"place": "batch", "name": "batch", "value": "NaN"}),
    "parameter": (filled(Net(), "layers.2.inner.weight", math.nan), mean, X, {},
                  {"place": "parameter", "name": "layers.2.inner.weight"}),
    "norm of gradients": (Net(), lambda m, x: m(x).sum() * 1e25, X, {}, {"place": "norm"}),
    "remat, backward": (Net("sqrt"), mean, X, {"remat": "block"}, {"place": "backward", **AT_2}),
    "buffer": (filled(Net(), "layers.1.scale", math.inf), mean, X, {}, {"place": "buffer", "name": "layers.1.scale"}),
}  # fmt: skip


def make(model, loss_fn=mean, **options):
    plan = ts.ShardingPlan({"layers.*.inner.weight": P("model")}, default=P())
    return step_of(model, loss_fn, plan=plan, **options)


@pytest.mark.parametrize(("model", "loss_fn", "batch", "options", "wanted"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_named(model, loss_fn, batch, options, wanted):
    step = make(model, loss_fn, **options)
    report = ts.find_nan(step, step.init(seed=0), batch)
    assert report
    assert {name: getattr(report, name) for name in wanted} == wanted, str(report)
    if report.place in ("forward", "backward"):
        assert 'test_find_nan.py", line' in report.line
        assert report.sentence in str(report)


def test_an_overflow_in_a_module_of_a_loop_says_what_it_was_given():
    step = make(filled(Net(), "layers.2.scale", 3e38), mean)
    report = ts.find_nan(step, step.init(seed=0), 1e3 * X)
    assert (report.place, report.name, report.module, report.value) == ("forward", "mul", "layers.2", "infinity")
    assert len(report.given) == 2
    assert report.given[1].startswith("(6,) float32 from 1 to 3e+38")


@pytest.mark.parametrize("options", [{}, {"trainable": "head.**"}], ids=["all", "a part of the model"])
def test_a_finite_step_has_none(options):
    step = make(Net(), mean, **options)
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
    step = make(Net(), lambda m, x: m(x).sum() * 1e6, optimizer=optax.sgd(1e38))
    report = ts.find_nan(step, step.init(seed=0), X)
    assert report.place == "update"


def test_nothing_of_the_model_or_the_state_changes_and_a_donated_state_is_refused():
    step = make(model := Net("sqrt"), mean)
    state = step.init(seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = ts.find_nan(step, state, X)
    assert (report.place, report.name, report.module) == ("backward", "sqrt", "layers.2")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert int(step(state, X)[0].step) == 1  # it was not donated
    with pytest.raises(ValueError, match="was donated to an earlier call"):
        ts.find_nan(step, state, X)


@pytest.mark.parametrize("given", ["step", "state"])
def test_wrong_arguments_are_refused(given):
    step = make(Net(), mean)
    arguments = {"step": step, "state": step.init(seed=0), "batch": X, given: 3}
    with pytest.raises(TypeError, match=f"find_nan: {given} must be a Train"):
        ts.find_nan(**arguments)
