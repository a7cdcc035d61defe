"""Operators of torch.library with a lowering of the user's: values, gradients of both kinds, and what is refused."""

# ruff: noqa: E501  (a table)

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import assert_refused
from tests.oracles.steps import sgd_step
from tests.tables.cases import make_mesh

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, a few products


@torch.library.custom_op("tests::power", mutates_args=())
def power(x: torch.Tensor, factor: float = 2.0, *, exponent: int = 3) -> torch.Tensor:
    return factor * x**exponent


@power.register_fake
def _power_shape(x, factor=2.0, *, exponent=3):
    return torch.empty_like(x)


@torch.library.custom_op("tests::power_backward", mutates_args=())
def power_backward(grad: torch.Tensor, x: torch.Tensor, factor: float, exponent: int) -> torch.Tensor:
    return grad * factor * exponent * x ** (exponent - 1)


@power_backward.register_fake
def _power_backward_shape(grad, x, factor, exponent):
    return torch.empty_like(x)


def _save(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.options = inputs[1], keyword_only_inputs["exponent"]


def _power_gradients(ctx, grad):
    return power_backward(grad, *ctx.saved_tensors, *ctx.options), None


power.register_autograd(_power_gradients, setup_context=_save)

LIBRARY = torch.library.Library("tests", "FRAGMENT")
for schema, kernel, fake in [
    ("cube(Tensor x) -> Tensor", lambda x: x**3, torch.empty_like),
    ("wavy(Tensor x, float w=1.0) -> (Tensor, Tensor)", lambda x, w=1.0: (x.sin(), w * x.cos()), None),
    ("doubled(Tensor[] xs) -> Tensor[]", lambda xs: [2 * x for x in xs], lambda xs: [*map(torch.empty_like, xs)]),
    ("over.one(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like),
    ("over.two(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y, lambda x, y: torch.empty_like(x)),
    ("wide(Tensor x) -> Tensor", lambda x: x.double(), lambda x: torch.empty_like(x)),
    ("ruleless(Tensor x) -> Tensor", lambda x: x + 1, None),
    ("add_one_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), torch.empty_like),
    ("same(Tensor(a) x) -> Tensor(a)", lambda x: x.view_as(x), torch.empty_like),
]:
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"tests::{name}", fake, lib=LIBRARY)
torch.library.register_fake("tests::wavy", lambda x, w=1.0: (torch.empty_like(x), torch.empty_like(x)), lib=LIBRARY)
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: torch.ops.tests.cube(x) + 1, "CompositeImplicitAutograd")
LIBRARY.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("noise", torch.rand_like, "CPU")
torch.library.register_fake("tests::noise", torch.empty_like, lib=LIBRARY)

LOWERINGS = [
    (power, lambda x, factor, *, exponent: factor * x**exponent),
    (torch.ops.tests.power_backward, lambda g, x, factor, exponent: g * factor * exponent * x ** (exponent - 1)),
    (torch.ops.tests.cube, lambda x: x**3),
    (torch.ops.tests.wavy.default, lambda x, w: (jnp.sin(x), w * jnp.cos(x))),
    (torch.ops.tests.doubled, lambda xs: [2 * x for x in xs]),
    (torch.ops.tests.over.one, lambda x: x + 1),
    (torch.ops.tests.over.two, jnp.multiply),
]


LOWERED = {}


@pytest.fixture(autouse=True)
def lowered():
    LOWERED.update((kernel.name, kernel) for kernel in (ts.lowering(op)(fn) for op, fn in LOWERINGS))
    yield
    for kernel in LOWERED.values():
        kernel.remove()


ops = torch.ops.tests
X = torch.linspace(0.5, 1.5, 6).reshape(2, 3)

CALLS = {  # and what is the same in operators of torch's own, which have derivatives
    "formula": (lambda x: power(x, exponent=2), lambda x: 2 * x**2),
    "formula, positional": (lambda x: ops.power(x, 3.0), lambda x: 3 * x**3),
    "none": (lambda x: ops.cube(x), lambda x: x**3),
    "none, overload": (lambda x: ops.cube.default(x * 2), lambda x: 8 * x**3),
    "several results": (lambda x: sum(ops.wavy(x, w=2.0)), lambda x: x.sin() + 2 * x.cos()),
    "one of several results": (lambda x: ops.wavy(x)[1], lambda x: x.cos()),
    "lists": (lambda x: sum(ops.doubled([x, x * x])), lambda x: 2 * x + 2 * x * x),
    "overloads": (lambda x: ops.over(ops.over(x), x), lambda x: (x + 1) * x),
    "without grad": (lambda x: ops.cube(x.detach()) + x * x, lambda x: x.detach() ** 3 + x * x),
}


@pytest.mark.parametrize("fn", CALLS.values(), ids=CALLS)
def test_value_and_gradients_of_two_orders_equal_eager_torch(fn):
    called, plain = fn

    def first(fn, x):
        return (fn(x) * X.cos()).sum()

    leaf = X.clone().requires_grad_()
    grad = torch.autograd.grad(first(plain, leaf), leaf, create_graph=True)[0]
    wanted = torch.autograd.grad(grad.sin().sum(), leaf, materialize_grads=True)[0]

    def of_gradient(x):
        x = x.detach().requires_grad_()
        grad = torch.autograd.grad(first(called, x), x, create_graph=True)[0]
        return grad.detach(), torch.autograd.grad(grad.sin().sum(), x, materialize_grads=True)[0]

    value, found = ts.jax_jit(ts.jax_value_and_grad(lambda x: first(called, x)))(X)
    torch.testing.assert_close(value.cpu(), first(plain, X), **CLOSE)
    torch.testing.assert_close(found.cpu(), grad.detach(), **CLOSE)
    for f, w in zip(ts.jax_jit(of_gradient)(X), (grad.detach(), wanted), strict=True):
        torch.testing.assert_close(f.cpu(), w, **CLOSE)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + ops.cube(torch.tanh(self.linear(x))) + power(x, 0.1, exponent=2)


class PlainBlock(Block):
    def forward(self, x):
        return x + torch.tanh(self.linear(x)) ** 3 + 0.1 * x**2


def square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("remat", ["none", "block"])
def test_layers_with_such_operators_are_one_loop(remat):
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(4, 4), *(kind() for _ in range(3))) for kind in (Block, PlainBlock))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    step = sgd_step(model, square, (4, 1), remat=remat)
    state, metrics = step(step.init(), x)
    loss = square(plain, x)
    loss.backward()
    torch.testing.assert_close(float(metrics["loss"]), loss.item())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(torch.tensor(state.params[name].tolist()), p.detach() - 0.1 * p.grad, **CLOSE)
    report = step.report()
    assert "1 to 3: one loop, 3 iterations" in report
    assert "tests::cube: 3 calls run as <lambda>" in report
    lowerings = {op.name: op.lowering for op in ts.explain_capture(model, square, x).operators}
    assert lowerings["tests.cube.default"] == lowerings["tests.power_backward.default"] == "yours"


def test_maps_and_the_eager_device():
    wanted = X**3
    torch.testing.assert_close(ts.jax_vmap(ops.cube)(X).cpu(), wanted)
    torch.testing.assert_close(ops.cube(X.to("jax")).cpu(), wanted)
    torch.testing.assert_close(ts.jax_grad(lambda x: ts.jax_vmap(ops.cube)(x).sum())(X).cpu(), 3 * X**2)


def test_autocast_is_that_of_the_operator():
    @torch.library.custom_op("tests::plus", mutates_args=())
    def plus(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    plus.register_fake(torch.empty_like)
    plus.register_autocast("cpu", torch.bfloat16)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return plus(x), ops.cube(x)

    with ts.lowering(plus)(lambda x: x + 1):
        for found, wanted in zip(ts.jax_jit(run)(X), run(X), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found.cpu(), wanted)


def test_an_operator_that_draws_takes_a_key():
    with ts.lowering(ops.noise)(lambda key, x: jax.random.uniform(key, x.shape)):
        step = sgd_step(nn.Linear(3, 3), lambda m, x: (m(x) * ops.noise(x)).mean(), (2, 1), rate=0.0)
        losses = [float(step(step.init(seed=seed), X)[1]["loss"]) for seed in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]
        with pytest.raises(NotImplementedError, match=r"tests::noise draws random numbers.*register_autograd"):
            ts.jax_grad(lambda x: ops.noise(x).sum())(X)


@pytest.mark.parametrize("mesh", [None, make_mesh((4, 1))], ids=["of the step", "given"])
def test_on_a_mesh_each_device_has_its_part(mesh):
    shapes = set()

    def double(xs):
        shapes.update(x.shape for x in xs)
        return [2 * x for x in xs]

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)

    def loss_fn(model, x):
        return sum(ops.doubled([model(x), x])).square().mean()

    wanted = loss_fn(model, x)
    (gradient,) = torch.autograd.grad((2 * model(x) + 2 * x).square().mean(), model.weight)
    trained = (model.weight - gradient).detach()
    LOWERED["tests::doubled"].remove()
    with ts.lowering(ops.doubled, in_specs=([P("batch"), P("batch")],), out_specs=P("batch"), mesh=mesh)(double):
        step = sgd_step(model, loss_fn, (4, 1), rate=1.0)
        state, metrics = step(step.init(), x)
    assert shapes == {(2, 4)}
    torch.testing.assert_close(float(metrics["loss"]), wanted.item())
    torch.testing.assert_close(torch.tensor(state.params["weight"].tolist()), trained, **CLOSE)


REFUSED = {
    "ts.lowering(torch.tanh)": r"TypeError: lowering: operator must be an operator of torch.library, .*override",
    "ts.lowering('tests::cube')": r"TypeError: lowering: operator must be an operator",
    "ts.lowering(ops.over)": r"ValueError: lowering: tests.over has 2 overloads. Say which: torch.ops.tests.over.one, ",
    "ts.lowering(torch.ops.aten.relu.default)": r"ValueError: lowering: aten::relu has a lowering, torch_shard's.*override",
    "ts.lowering(ops.composite)": r"ValueError: lowering: tests::composite is a composite \(Comp.*another dispatch key",
    "ts.lowering(ops.add_one_)": r"ValueError: lowering: tests::add_one_ writes to its arguments, or returns a view",
    "ts.lowering(ops.same)": r"ValueError: lowering: tests::same writes to its arguments, or returns a view",
    "ts.lowering(ops.wide)(5)": r"TypeError: lowering: fn must be a Callable, got int",
    "run('wide', lambda: 1)": r"TypeError: .*<lambda>\(\) takes 0 positional arguments but 1 was given",
    "run('noise', lambda x: x)": r"TypeError: .*<lambda>\(\) takes 1 positional argument but 2 were given",
    "ts.lowering(ops.wide, in_specs=P())": r"ValueError: lowering: in_specs and out_specs go together",
    "ts.lowering(ops.wide, mesh=3, in_specs=P(), out_specs=P())": r"TypeError: lowering: mesh must be a jax",
    "ts.lowering(ops.wide, mesh=make_mesh((4, 1)))": r"ValueError: lowering: in_specs .*and a mesh needs both",
    "run('wide', lambda x: x, in_specs=P('modle'), out_specs=P(), mesh=make_mesh((4, 1)))": "ValueError: .*in_specs.* 'modle'",
    "run('wide', lambda x: x, in_specs='x', out_specs=P(), mesh=make_mesh((4, 1)))": "TypeError: .*PartitionSpec",
    "ts.lowering(ops.cube)(lambda x: x)": r"ValueError: lowering: tests::cube has <lambda> .* in its place already",
    "run('wide', lambda x: x[0])": r"ValueError: .*<lambda> .* must return what the fake rule of tests::wide .*says: "
    r"\(2, 3\) float32. It returned \(3,\) float32",
    "run('wide', lambda x: x.astype('bfloat16'))": r"ValueError: .*\(2, 3\) float32. It returned \(2, 3\) bfloat16",
    "run('wide', lambda x: (x, x))": r"ValueError: .* It returned \(2, 3\) float32, \(2, 3\) float32",
    "run('wide', lambda x: ts.call_torch(lambda x: x + WEIGHT, x))": r"NotImplementedError: <lambda> .*, the lowering "
    r"of tests::wide, reaches a torch tensor of shape \(3,\) by itself",
    "run('ruleless', lambda x: x)": r"NotImplementedError: .*Here an operator has no fake rule, .*tests.ruleless.*"
    r"torch.library.register_fake",
    "ts.jax_grad(lambda x: ops.composite(x).sum())(X)": r".*an autograd kernel was not registered",
}

WEIGHT = torch.ones(3, requires_grad=True)


def run(name, fn, **options):
    with ts.lowering(getattr(ops, name), **options)(fn):
        return ts.jax_jit(getattr(ops, name))(X)


@pytest.mark.filterwarnings("ignore")  # what PyTorch warns of is an error by ourselves
def test_what_is_refused():
    assert_refused(REFUSED, lambda text: eval(text))


def test_without_a_lowering_the_error_says_how_to_give_one():
    with pytest.raises(NotImplementedError, match=r"tests.wide(?s:.*)torch_shard.lowering"):
        ts.jax_jit(ops.wide)(X)
