"""The adapters against eager torch: values, gradients of every order, randomness, modes, errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard.collectives import axis_size

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums in another order


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE)


def wavy(x: torch.Tensor) -> torch.Tensor:
    """Its derivatives differ where torch cuts them: detach and no_grad."""
    with torch.no_grad():
        weight = x.cos()
    return (x.sin() * weight * x * x.detach()).sum()


X = torch.tensor([0.3, -1.2, 2.0])


def torch_grad(fn: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, create_graph=True)[0]


@pytest.mark.parametrize("argument", [X, X.numpy(), X.to("jax")], ids=["cpu", "numpy", "jax"])
def test_arguments_may_live_anywhere(argument: Any) -> None:
    value, grad = ts.jax_value_and_grad(wavy)(argument)
    assert_close(value, wavy(X))
    assert_close(grad, torch_grad(wavy, X))


def test_python_scalars_and_containers_are_arguments() -> None:
    def fn(tree: dict, scale: float, name: str) -> dict:
        assert name == "sum"
        return {"out": tree["a"][0] * scale + tree["b"], "n": len(tree), "none": None}

    for adapt in (ts.jax_jit, functools.partial(ts.jax_jit, static_argnums=2)):
        args = ({"a": [torch.ones(2)], "b": torch.zeros(2)}, 3.0, "sum")
        if adapt is ts.jax_jit:
            with pytest.raises(TypeError, match="str"):
                adapt(fn)(*args)
            continue
        out = adapt(fn)(*args)
        assert_close(out["out"], torch.full((2,), 3.0))
        assert out["none"] is None


COMPOSITIONS = {
    "jit": (ts.jax_jit, lambda fn: fn),
    "grad": (ts.jax_grad, lambda fn: lambda x: torch_grad(fn, x)),
    "jit of grad": (lambda fn: ts.jax_jit(ts.jax_grad(fn)), lambda fn: lambda x: torch_grad(fn, x)),
    "grad of jit": (lambda fn: ts.jax_grad(ts.jax_jit(fn)), lambda fn: lambda x: torch_grad(fn, x)),
    "grad of checkpoint": (lambda fn: ts.jax_grad(ts.jax_checkpoint(fn)), lambda fn: lambda x: torch_grad(fn, x)),
    "grad of grad": (
        lambda fn: ts.jax_grad(lambda x: ts.jax_grad(fn)(x).sum()),
        lambda fn: lambda x: torch_grad(lambda y: _grad_sum(fn, y), x),
    ),
}


def _grad_sum(fn: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(fn(x), x, create_graph=True)[0].sum()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_equal_torch(name: str) -> None:
    adapt, oracle = COMPOSITIONS[name]
    assert_close(adapt(wavy)(X), oracle(wavy)(X))


@pytest.mark.parametrize("inner", ["plain", "grad"])
def test_vmap_equals_a_loop(inner: str) -> None:
    fn, oracle = (wavy, wavy) if inner == "plain" else (ts.jax_grad(wavy), lambda x: torch_grad(wavy, x))
    rows = torch.stack([X, 2 * X, -X])
    assert_close(ts.jax_vmap(fn)(rows), torch.stack([oracle(row) for row in rows]))
    assert_close(ts.jax_jit(ts.jax_vmap(fn))(rows), torch.stack([oracle(row) for row in rows]))


def test_vmap_takes_axes() -> None:
    fn = ts.jax_vmap(lambda a, b: a @ b, in_axes=(1, None), out_axes=1)
    a, b = torch.randn(3, 4), torch.randn(3, 2)
    assert_close(fn(a, b), (a.T @ b).T)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_torch_autograd_sees_through_adapters(device: str) -> None:
    x = X.to(device).clone().requires_grad_()
    (ts.jax_jit(wavy)(x) * 2).backward()
    assert x.grad.device == x.device
    assert_close(x.grad, 2 * torch_grad(wavy, X))


def test_value_and_grad_takes_argnums_and_aux() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return (x * y * z).sum(), {"double": 2 * y, "kind": "aux"}

    x, y, z = X, X + 1, X + 2
    (value, aux), (gx, gz) = ts.jax_value_and_grad(fn, argnums=(0, 2), has_aux=True)(x, y, z)
    assert_close(value, (x * y * z).sum())
    assert_close(aux["double"], 2 * y)
    assert aux["kind"] == "aux"
    assert_close(gx, y * z)
    assert_close(gz, x * y)


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1), 3.0], ids=["vector", "integer", "number"])
def test_only_scalars_are_differentiated(value: Any) -> None:
    with pytest.raises(TypeError, match=r"must return a scalar floating-point tensor.*it returned .*has_aux=True"):
        ts.jax_value_and_grad(lambda x: value)(X)


def test_a_jitted_gradient_computes_the_forward_pass_once() -> None:
    grad = ts.jax_view(ts.jax_value_and_grad(lambda w, x: F.softmax(x @ w, -1).square().sum()))
    program = jax.jit(grad).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile().as_text()
    assert program.count(" exponential(") == 1


def test_integers_have_gradient_zero() -> None:
    tree = {"w": X, "count": torch.tensor(3)}
    grads = ts.jax_grad(lambda t: (t["w"] ** 2 * t["count"]).sum())(tree)
    assert_close(grads["w"], 6 * X)
    assert int(grads["count"]) == 0


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


def test_dropout_differs_by_call_and_repeats_by_seed() -> None:
    model, x = Noisy(), torch.ones(4, 64)
    fn = ts.jax_jit(model)
    torch.manual_seed(0)
    first, second = fn(x).cpu(), fn(x).cpu()
    torch.manual_seed(0)
    again = fn(x).cpu()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    kept = first != 0
    assert_close(first[kept], (2 * model.linear(x))[kept])
    assert 0.35 < kept.float().mean() < 0.65  # 256 fair coins: 0.5 +- 5 standard errors


def test_forward_and_backward_drop_the_same_elements() -> None:
    x = torch.ones(1000)
    value, grad = ts.jax_value_and_grad(lambda x: F.dropout(x, 0.3).sum())(x)
    assert_close(value, grad.cpu().sum())  # the loss is linear: its gradient is the mask
    assert 0.2 < (grad == 0).float().mean() < 0.4


def test_nested_calls_draw_their_own_numbers() -> None:
    def fn(x: torch.Tensor) -> Any:
        draw = ts.jax_value_and_grad(lambda y: (y * torch.rand_like(y)).sum())
        return draw(x), draw(x)

    (value1, grad1), (value2, grad2) = ts.jax_jit(fn)(torch.ones(8))
    assert_close(value1, grad1.cpu().sum())
    assert_close(value2, grad2.cpu().sum())
    assert not torch.equal(grad1.cpu(), grad2.cpu())


def test_training_mode_is_read_at_each_call() -> None:
    model, x = Noisy(), torch.ones(4, 64)
    fn = ts.jax_jit(model)
    assert (fn(x) == 0).any()
    model.eval()
    assert_close(fn(x), model(x))
    model.train()
    assert (fn(x) == 0).any()


def test_closed_over_parameters_are_read_at_each_call() -> None:
    model = nn.Linear(3, 2)
    fn = ts.jax_jit(lambda x: model(x))
    assert_close(fn(X), model(X))
    with torch.no_grad():
        model.weight.add_(1)
    assert_close(fn(X), model(X))
    model.to("jax")
    assert_close(fn(X), model.to("cpu")(X))


def test_the_source_documents_loop_trains() -> None:
    """jax_value_and_grad, and optax through call_jax, in one jitted torch function."""
    torch.manual_seed(0)
    model, optimizer = nn.Linear(3, 1), optax.adam(1e-2)
    x, y = torch.randn(16, 3), torch.randn(16, 1)

    def loss_fn(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    @ts.jax_jit
    def train_step(weights: dict, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = ts.jax_value_and_grad(loss_fn)(weights, x, y)
        updates, opt_state = ts.call_jax(optimizer.update, grads, opt_state, weights)
        return loss, ts.call_jax(optax.apply_updates, weights, updates), opt_state

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt_state = ts.call_jax(optimizer.init, weights)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss, weights, opt_state = train_step(weights, opt_state, x, y)
        wanted = F.mse_loss(model(x), y)
        adam.zero_grad()
        wanted.backward()
        adam.step()
        assert_close(loss, wanted)
    assert_close(weights["weight"], model.weight)


def test_jax_functions_inside_torch_have_jax_gradients() -> None:
    fn = ts.jax_jit(ts.jax_grad(lambda x: ts.call_jax(jnp.sinc, x * 2).sum()))
    assert_close(fn(X), 2 * torch.from_numpy(np.array(jax.vmap(jax.grad(jnp.sinc))(2 * X.numpy()))))
    assert_close(ts.torch_view(jnp.cumsum)(X), X.cumsum(0))
    assert_close(ts.jax_jit(lambda x: x.apply_jax(jnp.cumsum) + 1)(X), X.cumsum(0) + 1)


def test_torch_functions_inside_jax_have_torch_gradients() -> None:
    fn = ts.jax_view(wavy)
    found = jax.jit(jax.grad(lambda x: fn(x) * 2))(jnp.asarray(X.numpy()))
    assert_close(torch.from_numpy(np.array(found)), 2 * torch_grad(wavy, X))
    assert_close(ts.torch_view(ts.call_torch(torch.sin, jnp.asarray(X.numpy()))), X.sin())


def test_a_torch_function_in_jax_needs_a_key_to_draw() -> None:
    fn = ts.jax_view(lambda x: F.dropout(x, 0.5))
    with pytest.raises(ValueError, match=r"draws random numbers: pass it a key \(key=jax.random.key\(seed\)\)"):
        fn(jnp.ones(4))
    key = jax.random.key(0)
    assert jnp.array_equal(fn(jnp.ones(64), key=key), fn(jnp.ones(64), key=key))


@pytest.mark.parametrize("as_expression", [True, False])
def test_a_sharding_constraint_inside_jit(as_expression: bool) -> None:
    mesh = ts.make_mesh(x=4, y=2)
    wanted = NamedSharding(mesh, P("y", "x"))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if as_expression:
            return y.shard_(wanted) + 0
        y.shard_(wanted)
        return y

    x = torch.arange(64.0).view(8, 8).to("jax").shard_(NamedSharding(mesh, P("x", "y")))
    out = ts.jax_jit(fn)(x)
    assert out.sharding.is_equivalent_to(wanted, 2)
    assert_close(out, 2 * torch.arange(64.0).view(8, 8))
    replicated = ts.jax_jit(lambda x: (x + 1).shard_(NamedSharding(mesh, P())))(x)
    assert replicated.sharding.is_fully_replicated


def test_jit_takes_the_arguments_of_jax_jit() -> None:
    mesh = ts.make_mesh(x=8)
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    fn = ts.jax_jit(
        lambda a, b: (a + b, a.sum()), in_shardings=(split, whole), out_shardings=(split, whole), donate_argnums=0
    )
    a = torch.arange(8.0).to("jax").shard_(split)
    total, _ = fn(a, torch.ones(8))
    assert total.sharding.is_equivalent_to(split, 1)
    assert a.jax().is_deleted()
    power = ts.jax_jit(lambda x, n: x**n, static_argnums=1)
    assert_close(power(X, 3), X**3)
    assert_close(power(X, 2), X**2)


def test_one_compile_per_signature() -> None:
    traces = []
    fn = ts.jax_jit(lambda x: traces.append(1) or x + 1)
    for _ in range(3):
        fn(X)
    assert len(traces) == 1
    fn(torch.ones(5))
    assert len(traces) == 2


def test_static_values_of_other_types_are_other_programs() -> None:
    fn = ts.jax_jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 2.0, 1, True, 1.0):
        assert fn(torch.arange(3, dtype=torch.int32), n).dtype == (torch.arange(3, dtype=torch.int32) * n).dtype
    divide = ts.jax_view(lambda x, n: x / n)
    assert [divide(jnp.ones(()), zero).item() for zero in (0.0, -0.0)] == [float("inf"), -float("inf")]


def test_meshes_with_explicit_axes_are_refused_with_a_reason() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"shard_: every mesh axis must be Auto.*make_mesh\(x=8\)"):
        torch.ones(8, device="jax").shard_(NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match=r"call_jax: every mesh axis must be Auto.*make_mesh\(x=8\)"):
        torch.ones(8, device="jax").apply_jax(jax.device_put, NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match=r"jax_jit: every mesh axis must be Auto.*make_mesh\(x=8\)"):
        ts.jax_jit(torch.sin, out_shardings=NamedSharding(mesh, P("x")))


def test_writing_to_an_argument_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"writes in place to argument tensor 1.*x = x\.clone\(\)"):
        ts.jax_jit(lambda a, b: b.add_(a))(X, X)


def test_unhashable_static_values_are_named() -> None:
    class Odd:
        __hash__ = None

    with pytest.raises(TypeError, match="argument of type Odd, which is neither a tensor nor hashable"):
        ts.jax_grad(lambda x, o: x.sum())(X, Odd())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.vmap])
def test_torchs_own_transforms_of_what_closes_over_parameters(transform: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = model(x).sin()
        return out if transform is torch.vmap else out.sum()

    x = torch.randn(3, 4)
    torch.testing.assert_close(ts.jax_jit(transform(fn))(x).cpu(), transform(fn)(x).detach())


def test_a_key_is_needed_only_where_an_adapted_function_within_draws() -> None:
    fn = ts.jax_view(lambda x: ts.jax_jit(ts.jax_vmap(torch.sin))(x))
    assert_close(ts.torch_view(fn(jnp.ones(3))), torch.ones(3).sin())
    with pytest.raises(ValueError, match="draws random numbers: pass it a key"):
        ts.jax_view(lambda x: ts.jax_jit(torch.rand_like)(x))(jnp.ones(3))
    assert ts.jax_view(fn) is fn


LOOPS = {
    "given": lambda view, x: ts.call_jax(jax.lax.fori_loop, 0, 3, view, x),
    "within": lambda view, x: ts.call_jax(lambda x: jax.lax.fori_loop(0, 3, view, x), x),
    "jit": lambda view, x: ts.call_jax(lambda x: jax.jit(view)(2, jax.jit(view)(1, jax.jit(view)(0, x))), x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_jax_over_torch_functions_read_what_these_close_over(name: str) -> None:
    """JAX keeps the trace of a body by its identity, and with it the values of the first call."""
    fn = ts.jax_view(lambda x, w: LOOPS[name](ts.jax_view(lambda i, c: c * w), x))
    compiled = jax.jit(lambda x, w: fn(x, w))
    x = jnp.ones(2)
    for run in (fn, compiled):
        for w in (2.0, 3.0):
            assert run(x, x * w).tolist() == [w**3] * 2
    grad = jax.grad(lambda w: fn(x, w).sum())
    assert grad(x * 2).tolist() == [12.0] * 2
    assert jax.jit(grad)(x * 3).tolist() == [27.0] * 2


def test_views_given_to_loops_of_jax_read_their_tensors_at_each_call() -> None:
    w = torch.full((2,), 2.0)
    body = ts.jax_view(lambda i, c: c * w)
    for _ in range(2):
        assert_close(ts.call_jax(jax.lax.fori_loop, 0, 3, body, torch.ones(2)), w**3)
        w += 1


class Sine(torch.autograd.Function):
    """Its own derivative is twice torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0].cos()


UNSEEN = {
    "autograd.Function": Sine.apply,
    "vmap": lambda w: torch.func.vmap(lambda row, w: row * w.sum(), in_dims=(0, None))(w, w),
    "grad": torch.func.grad(lambda w: (w.sin() * w).sum()),
    "vjp": lambda w: torch.func.vjp(torch.sin, w)[1](w)[0],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_closed_over_has_its_gradient_where_no_torch_function_is_called(name: str) -> None:
    def loss(adapt: Any, w: torch.Tensor) -> torch.Tensor:
        return (adapt(lambda x: UNSEEN[name](w) * x)(X) ** 2).sum()

    assert_close(ts.jax_grad(lambda w: loss(ts.jax_jit, w))(X), torch_grad(lambda w: loss(lambda f: f, w), X))


def test_a_view_within_one_call_is_captured_for_each_size_of_an_axis() -> None:
    view = ts.jax_view(lambda x: x * axis_size("i"))

    def both(x: jax.Array) -> Any:
        return [jax.vmap(view, axis_name="i")(x[:n]) for n in (2, 3)]

    for found, size in zip(ts.jax_jit(lambda x: ts.call_jax(both, x))(torch.ones(3)), (2, 3), strict=True):
        assert_close(found, torch.full((size,), float(size)))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_eager_gradients_reach_what_an_adapted_function_closes_over(device: str) -> None:
    torch.manual_seed(0)
    model, x, traces = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(2, 3), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        traces.append(1)
        return model(x)[torch.tensor([0, 1, 0])].square().sum()

    leaf = x.clone().requires_grad_()
    model.eval()
    wanted = torch.autograd.grad(loss(leaf), [leaf, *model.parameters()])
    model.to(device)
    fn, counts = ts.jax_jit(loss), []
    for _ in range(3):
        leaf = x.to(device).clone().requires_grad_()
        found = torch.autograd.grad(fn(leaf), [leaf, *model.parameters()])
        for f, w in zip(found, wanted, strict=True):
            assert f.device.type == leaf.device.type
            assert_close(f, w)
        counts.append(len(traces))
    assert len(set(counts)) == 1  # captured for the first call only
    model.train()
    dropped = torch.stack([fn(leaf).detach().cpu() for _ in range(8)])
    assert len(dropped.unique()) > 1


def test_literals_of_functions_that_close_over_what_is_differentiated() -> None:
    def loss(jit: Any, c: torch.Tensor) -> torch.Tensor:
        inner = jit(lambda x: torch.zeros(4, 3).index_put((torch.tensor([0, 1]),), c).square().sum() + x)
        return inner(c.sum())

    assert_close(ts.jax_grad(lambda c: loss(ts.jax_jit, c))(X), torch_grad(lambda c: loss(lambda f: f, c), X))
