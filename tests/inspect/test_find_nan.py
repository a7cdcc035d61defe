"""Values that are not finite, planted at one place each, and named."""

import linecache
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

D = 4
EVERYWHERE = ts.ShardingPlan({}, default=P())
MESHES = {"(1,1)": (1, 1), "(2,1)": (2, 1), "(4,2)": (4, 2)}


class Planted(nn.Module):
    """Does one thing to what it is given."""

    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, x):
        return self.do(x)


class Block(nn.Module):
    """A layer of several that are alike; it divides by a buffer."""

    def __init__(self, do=None):
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.do = do
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) / self.scale  # in layer 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        scores = (self.proj(x) @ x.T).masked_fill(torch.ones(len(x), len(x)) > 0, -math.inf)
        return scores.softmax(-1) @ x  # every key is masked


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0  # of an own function


class WithOwn(nn.Module):
    def forward(self, x):
        return Own.apply(x) * 2  # own


class Half(nn.Module):
    def __init__(self, dtype, size):
        super().__init__()
        self.dtype, self.size = dtype, size

    def forward(self, x):
        return ((x.to(self.dtype).abs() + 1) * self.size).float()  # overflows


def between(do):
    return nn.Sequential(nn.Linear(D, D), Planted(do), nn.Linear(D, 1))


def layers(change=None, number=6):
    model = nn.Sequential(*[Block() for _ in range(number)], nn.Linear(D, 1))
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def total(model, batch):
    return model(batch).square().mean()


def log_in_loss(model, batch):
    return torch.log(model(batch) * 0).mean()  # in the loss


def rows():
    return torch.randn(16, D, generator=torch.Generator().manual_seed(0))


def spoiled(row, value):
    x = rows()
    x[row] = value
    return x


def shared(x):
    return x / x.detach().square().sum(-1, keepdim=True).mul(0)  # division


def root(x):
    return torch.sqrt(x * x * 0)  # sqrt


def to_zero(x):
    return (x * 0).norm(dim=-1, keepdim=True) + x  # norm: torch's own gradient of it is 0 there


def length(x):
    return (x * 0).square().sum(-1, keepdim=True).sqrt() + x  # length


def power(x):
    return (x * 0) ** 0.5  # power


def exponent(x):
    return torch.exp(x.abs() * 1000 + 1000)  # exp


def arc(x):
    return torch.acos(x.detach() * 0 + 2) + x  # acos


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(root, x, use_reentrant=False)


def guarded(x):
    """The half of the pattern that helps the value alone."""
    return torch.where(x.detach() > 99, torch.sqrt(x * 0), x)  # where


def first_row_of_second(x):
    return torch.log(x.relu() * 0 + 1) + torch.log((x < 50) * 1.0)  # only where a row is large


def set_scale(model):
    model[3].scale.fill_(0)


def set_scale_nan(model):
    model[3].scale.fill_(math.nan)


def set_weight_inf(model):
    model[2].inner.weight[0, 0] = math.inf


def large_gradient(model, batch):
    return model(batch).sum() * 1e30


SCAN = {"scan_layers": True}
CASES = {
    # name: (model, loss, batch, options, what is to be found, what the line says)
    "log of zero": (lambda: between(lambda x: torch.log(x * 0)), total, rows(), {}, ("forward", "1", "log"), "log(x"),
    "division by zero": (lambda: between(shared), total, rows(), {}, ("forward", "1", "__truediv__|div"), "# division"),
    "root's gradient": (lambda: between(root), total, rows(), {}, ("backward", "1", "sqrt"), "# sqrt"),
    "masked row": (
        lambda: nn.Sequential(nn.Linear(D, D), Attention(), nn.Linear(D, 1)),
        total,
        rows(),
        {"mesh": "(1,1)"},
        ("forward", "1", "softmax"),
        "scores.softmax",
    ),
    "float16": (
        lambda: nn.Sequential(nn.Linear(D, D), Half(torch.float16, 1e5), nn.Linear(D, 1)),
        total,
        rows(),
        {},
        ("forward", "1", "mul|__mul__"),
        "# overflows",
    ),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(D, D), Half(torch.bfloat16, 3.3e38), nn.Linear(D, 1)),
        total,
        rows() * 10,
        {"compute_dtype": torch.bfloat16},
        ("forward", "1", "mul|__mul__"),
        "# overflows",
    ),
    "length of zero": (lambda: between(length), total, rows(), {}, ("backward", "1", "sqrt"), "# length"),
    "power": (lambda: between(power), total, rows(), {}, ("backward", "1", "pow|__pow__"), "# power"),
    "exp": (lambda: between(exponent), total, rows(), {}, ("forward", "1", "exp"), "# exp"),
    "acos": (lambda: between(arc), total, rows(), {}, ("forward", "1", "acos"), "# acos"),
    "where": (lambda: between(guarded), total, rows(), {}, ("backward", "1", "sqrt"), "# where"),
    "in a checkpoint": (lambda: between(checkpointed), total, rows(), {}, ("backward", "1", "sqrt"), "# sqrt"),
    "layer 3 of 6": (
        lambda: layers(set_scale),
        total,
        rows(),
        SCAN,
        ("forward", "3", "__truediv__|div"),
        "# in layer 3",
    ),
    "layer 3 of 6, remat": (
        lambda: layers(set_scale),
        total,
        rows(),
        {**SCAN, "remat": "block"},
        ("forward", "3", "__truediv__|div"),
        "# in layer 3",
    ),
    "layer 3 of 6, (4,2), accumulation": (
        lambda: layers(set_scale),
        total,
        rows(),
        {**SCAN, "mesh": "(4,2)", "accumulate_steps": 2, "plan": ts.ShardingPlan({"*.weight": P("model")}, default=P())},
        ("forward", "3", "__truediv__|div"),
        "# in layer 3",
    ),
    "loss_fn": (lambda: nn.Linear(D, 1), log_in_loss, rows(), {}, ("forward", "loss_fn", "log"), "# in the loss"),
    "microbatch 2": (
        lambda: nn.Sequential(Planted(first_row_of_second), nn.Linear(D, 1)),
        total,
        spoiled(13, 99.0),
        {"accumulate_steps": 2, "mesh": "(2,1)"},
        ("forward", "0", "log", 1),
        "# only where",
    ),
    "buffer": (lambda: layers(set_scale_nan), total, rows(), SCAN, ("buffer", "", "3.scale"), ""),
    "parameter": (lambda: layers(set_weight_inf), total, rows(), SCAN, ("parameter", "", "2.inner.weight"), ""),
    "batch": (lambda: nn.Linear(D, 1), lambda m, b: total(m, b["x"]), {"x": spoiled(3, math.nan)}, {}, ("batch", "", "batch['x']"), ""),
    "batch, infinity": (lambda: nn.Linear(D, 1), total, spoiled(3, math.inf), {}, ("batch", "", "batch"), ""),
    "own function": (
        lambda: nn.Sequential(nn.Linear(D, D), WithOwn(), nn.Linear(D, 1)),
        total,
        rows(),
        {},
        ("backward", "1", "OwnBackward"),
        "# own",
    ),
    "norm of gradients": (lambda: nn.Linear(D, 1), large_gradient, rows(), {}, ("norm", "", "weight|bias"), ""),
}  # fmt: skip


def make(model, loss_fn, options):
    options = {"plan": EVERYWHERE, **options}
    sizes = MESHES[options.pop("mesh", "(2,1)")]
    torch.manual_seed(0)
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1])
    return ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=mesh, **options)


@pytest.mark.parametrize("case", CASES)
def test_what_is_planted_is_named(case):
    build, loss_fn, batch, options, wanted, said = CASES[case]
    torch.manual_seed(0)
    step = make(build(), loss_fn, options)
    state = step.init(seed=0)
    report = ts.find_nan(step, state, batch)
    place, module, name, *microbatch = wanted
    assert report, str(report)
    assert (report.place, report.module) == (place, module), str(report)
    assert re.fullmatch(name.replace("[", r"\["), report.name), str(report)
    if microbatch:
        assert [report.microbatch] == microbatch
    assert said in report.line
    if said:
        assert "test_find_nan.py" in report.line
        assert str(report).splitlines()[0].endswith(").")
    # the step itself agrees that something is wrong
    _, metrics = step(state, batch, skip_grad_norm=math.inf)
    assert bool(metrics["guard"].skipped)


def test_there_are_twenty_places():
    assert len(CASES) >= 20


def test_what_is_finite_is_said_to_be():
    """An infinity that vanishes again, forward and backward, is no fault."""
    model = between(lambda x: torch.exp(torch.log(x.detach() * 0)) + torch.sqrt(torch.where(x > 99, x, 0)))
    model[1].do, do = torch.relu, model[1].do
    model[1].do = lambda x: torch.exp(torch.log(x.detach() * 0)) + torch.relu(torch.sqrt(x.abs() + 1))
    step = make(model, lambda m, x: F.dropout(m(x), 0.5).sum(), {"accumulate_steps": 2})
    report = ts.find_nan(step, step.init(seed=0), rows())
    assert not report
    assert report.place == ""
    assert str(report).startswith("All values of this step are finite.")
    assert report.loss == pytest.approx(report.eager_loss, rel=1e-5)  # rounding; the dropout is that of the step
    assert do is not None


def test_report_has_the_modules_before_and_the_loop():
    step = make(layers(set_scale, number=8), total, SCAN)
    report = ts.find_nan(step, step.init(seed=0), rows())
    assert [value.name for value in report.before] == ["0.inner", "0", "1.inner", "1", "2.inner", "2", "3.inner"]
    with torch.no_grad():
        eager = step.model[0](rows()).abs().max()
    assert report.before[1].largest == pytest.approx(float(eager), rel=1e-6)
    text = str(report)
    assert "The step runs 3 as iteration 3 of a loop over 8 layers." in text
    assert re.search(r"3.inner +Linear +\(16, 4\) float32 +largest 0\.\d+", text)
    assert "Loss: nan in the step, nan in eager torch" in text
    many = make(nn.Sequential(*[nn.Linear(D, D) for _ in range(30)], Planted(torch.log)), total, {})
    assert len(ts.find_nan(many, many.init(seed=0), -rows()).before) == 20


def test_backward_has_the_gradients_before():
    model = nn.Sequential(nn.Linear(D, D), Planted(root), nn.Linear(D, D), nn.Linear(D, 1))
    step = make(model, total, {})
    report = ts.find_nan(step, step.init(seed=0), rows())
    assert [value.name for value in report.before][-3:] == ["3", "2", "1"]
    assert all(value.finite for value in report.before)
    assert "the gradient that arrives: (16, 4) float32 from" in str(report)
    assert "result: (16, 4) float32 from 0 to 0" in str(report)


def test_lower_precision_is_compared_with_full():
    def overflows(x):
        return (x @ torch.full((D, D), 3e38)) * 1e-38

    model = nn.Sequential(nn.Linear(D, D), Planted(overflows), nn.Linear(D, 1))
    with torch.no_grad():
        model[0].weight.mul_(0)
        model[0].bias.fill_(0.2834)  # 4 times that of 3e38 is just below the largest of float32, above that of bfloat16
    step = make(model, total, {"compute_dtype": torch.bfloat16})
    report = ts.find_nan(step, step.init(seed=0), rows())
    assert report.place == "forward"
    assert "This is what eager torch has with compute_dtype=torch.bfloat16; without it, all is finite" in str(report)


def kernel(x):
    return jnp.where(jnp.ones(x.shape) > 0, jnp.nan, x)


def test_step_alone_is_said():
    """A kernel that is wrong: eager torch does not have it."""
    step = make(nn.Sequential(nn.Linear(D, D), nn.Softsign(), nn.Linear(D, 1)), total, {})
    with ts.override(F.softsign, kernel):
        report = ts.find_nan(step, step.init(seed=0), rows())
    assert report.place == "step"
    assert math.isnan(report.loss)
    assert math.isfinite(report.eager_loss)
    assert "eager torch on the CPU has none" in str(report)


def test_an_optimizer_that_divides_by_zero_is_named():
    mesh = ts.make_mesh(batch=2)
    model = nn.Linear(D, 1)
    divides = optax.scale_by_rms(decay=0.5, eps=0.0, initial_scale=0.0)
    step = ts.make_train_step(model, lambda m, x: m(x * 0).sum(), divides, mesh=mesh, plan=EVERYWHERE)
    report = ts.find_nan(step, step.init(seed=0), rows())
    assert (report.place, report.name) == ("update", "weight"), str(report)
    assert "the optimizer makes weight not finite" in str(report)


def test_buffers_that_a_batch_spoils_are_found():
    model = nn.Sequential(nn.BatchNorm1d(D, affine=False), nn.Hardtanh(), nn.Linear(D, 1))
    step = make(model, total, {})
    report = ts.find_nan(step, step.init(seed=0), rows() * 1e30)
    assert (report.place, report.module, report.name) == ("forward", "0", "batch_norm"), str(report)


def test_bad_arguments_are_refused():
    step = make(nn.Linear(D, 1), total, {})
    with pytest.raises(TypeError, match="find_nan: step must be a TrainStep, got Linear. make_train_step gives one."):
        ts.find_nan(nn.Linear(1, 1), None, rows())
    with pytest.raises(TypeError, match="find_nan: state must be a TrainState, got NoneType."):
        ts.find_nan(step, None, rows())
    state = step.init(seed=0)
    step(state, rows())
    with pytest.raises(ValueError, match="find_nan: .*donated"):
        ts.find_nan(step, state, rows())
    assert jax.device_count() >= 8
    assert linecache  # lines are read from this file
