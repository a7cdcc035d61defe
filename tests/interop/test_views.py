"""JAX functions in torch and torch functions in JAX."""

import functools
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
from tests.oracles.derivatives import X, assert_close, torch_grad, wavy
from tests.oracles.steps import step_of
from torch_shard.collectives import axis_size


def test_a_loop_of_ones_own_trains() -> None:
    """jax_value_and_grad, and optax through call_jax, in one jitted torch function."""
    torch.manual_seed(0)
    model, optimizer = nn.Linear(3, 1), optax.adam(1e-2)
    x, y = torch.randn(16, 3), torch.randn(16, 1)

    def loss_fn(weights: dict) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    @ts.jax_jit
    def train_step(weights: dict, opt_state: Any) -> Any:
        loss, grads = ts.jax_value_and_grad(loss_fn)(weights)
        updates, opt_state = ts.call_jax(optimizer.update, grads, opt_state, weights)
        return loss, ts.call_jax(optax.apply_updates, weights, updates), opt_state

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt_state = ts.call_jax(optimizer.init, weights)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss, weights, opt_state = train_step(weights, opt_state)
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


def test_a_key_is_needed_only_where_an_adapted_function_within_draws() -> None:
    fn = ts.jax_view(lambda x: ts.jax_jit(ts.jax_vmap(torch.sin))(x))
    assert_close(ts.torch_view(fn(jnp.ones(3))), torch.ones(3).sin())
    with pytest.raises(ValueError, match="draws random numbers: pass it a key"):
        ts.jax_view(lambda x: ts.jax_jit(torch.rand_like)(x))(jnp.ones(3))
    assert ts.jax_view(fn) is fn


def test_a_view_within_one_call_is_captured_for_each_size_of_an_axis() -> None:
    view = ts.jax_view(lambda x: x * axis_size("i"))

    def both(x: jax.Array) -> Any:
        return [jax.vmap(view, axis_name="i")(x[:n]) for n in (2, 3)]

    for found, size in zip(ts.jax_jit(lambda x: ts.call_jax(both, x))(torch.ones(3)), (2, 3), strict=True):
        assert_close(found, torch.full((size,), float(size)))


class WithJax(nn.Module):
    """JAX on what a layer gives and on a parameter, among CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ts.call_jax(lambda a, w: jnp.tanh(a) * w, self.layer(x), self.scale) + self.layer.bias


def test_jax_within_a_model_trains_is_proved_and_exported() -> None:
    x, model = torch.randn(8, 4), WithJax()
    step = step_of(model)
    state, _ = step(step.init(), x)
    step.prove(state, x).raise_if_different()
    exported = step.export(state)
    wanted = torch.tanh(exported.layer(x)) * exported.scale + exported.layer.bias
    assert exported(x).device.type == "cpu"
    torch.testing.assert_close(exported(x), wanted, rtol=1e-5, atol=1e-6)  # two ways to compute tanh in float32
    exported(x).sum().backward()
    assert exported.scale.grad is not None
    assert exported.scale.grad.device.type == "cpu"


def test_torch_takes_arrays_of_numpy() -> None:
    np.testing.assert_allclose(ts.call_torch(torch.sin, np.ones(3, np.float32)), np.sin(np.ones(3)), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own hessian
def test_forward_mode_gives_torchs_derivatives() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3), torch.tensor([0.0, 1.0, 2.0])

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x)) * x.relu()  # whose derivative at 0 is a choice

    def of_jax(x: jax.Array) -> jax.Array:
        return ts.call_torch(of_torch, x)

    array, near = jnp.asarray(x.numpy()), {"rtol": 1e-5, "atol": 1e-6}  # float32
    np.testing.assert_allclose(jax.jacfwd(of_jax)(array), torch.func.jacrev(of_torch)(x).detach(), **near)
    wanted = torch.func.hessian(lambda x: of_torch(x).sum())(x).detach()
    np.testing.assert_allclose(jax.jit(jax.hessian(lambda x: of_jax(x).sum()))(array), wanted, **near)


def test_forward_mode_of_integers_and_of_what_draws() -> None:
    ones = jnp.ones(9)
    doubled, place = jax.jvp(lambda x: ts.call_torch(lambda a: (a * 2, a.argmax()), x), (ones,), (ones,))[1]
    np.testing.assert_allclose(doubled, 2 * ones)
    assert place.dtype == jax.dtypes.float0
    key = jax.random.key(0)
    dropped, moved = jax.jvp(lambda x: ts.call_torch(nn.functional.dropout, x, key=key), (ones,), (ones,))
    np.testing.assert_array_equal(dropped, moved)  # the same are dropped


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode_within_a_map(check_vma: bool) -> None:
    """Of what varies over devices, and of what does not."""
    mesh, weight = ts.make_mesh(batch=8), torch.arange(1.0, 4.0)

    def of_torch(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * weight).sum() * s + s * s

    def local(of: Any, x: jax.Array, s: jax.Array) -> jax.Array:
        pushed = jax.jvp(of, (x, s), (2 * x, 3 * s))[1]
        return jnp.stack([pushed, jax.jvp(lambda s: of(x, s), (s,), (s,))[1]])[None]

    def of_jax(x: jax.Array, s: jax.Array) -> jax.Array:
        return jnp.sin(x * weight.numpy()).sum() * s + s * s

    x, s = jnp.arange(8.0), jnp.float32(0.5)
    found, wanted = (
        jax.jit(
            jax.shard_map(
                functools.partial(local, of),
                mesh=mesh,
                in_specs=(P("batch"), P()),
                out_specs=P("batch"),
                check_vma=check_vma,
            )
        )(x, s)
        for of in (ts.jax_view(of_torch), of_jax)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)  # float32


def test_torch_within_an_eager_shard_map() -> None:
    mesh = ts.make_mesh(batch=8)
    mapped = jax.shard_map(lambda x: ts.call_torch(torch.sin, x), mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    np.testing.assert_allclose(mapped(jnp.arange(8.0)), np.sin(np.arange(8.0)), rtol=1e-6, atol=1e-7)


def test_a_module_on_a_mesh_with_explicit_axes_within_auto_axes() -> None:
    """As the error for such a mesh says, with dropout's key, and gradients that lie as the parameters do."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    net = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 6), nn.Dropout(0.0))
    ids = torch.arange(8)

    def loss_of(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, params, (x,)).square().mean()

    params = jax.device_put(
        ts.jax_view(dict(net.named_parameters())),
        {name: jax.NamedSharding(mesh, P("tensor") if name == "1.bias" else P()) for name, _ in net.named_parameters()},
    )
    rows = jax.device_put(jnp.asarray(ids.numpy(), jnp.int32), jax.NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"loss_of\(\), but 'data' is Explicit, 'tensor' is Explicit.*auto_axes"):
        jax.jit(jax.grad(ts.jax_view(loss_of)))(params, rows, key=jax.random.key(0))

    with jax.set_mesh(mesh):
        view = jax.sharding.auto_axes(ts.jax_view(loss_of), out_sharding=P())
        loss, grads = jax.jit(jax.value_and_grad(view))(params, rows, key=jax.random.key(0))

    wanted = loss_of(dict(net.named_parameters()), ids)
    wanted.backward()
    assert_close(ts.torch_view(loss).cpu(), wanted.detach())
    for name, parameter in net.named_parameters():
        assert grads[name].sharding.is_equivalent_to(params[name].sharding, parameter.ndim)
        assert_close(ts.torch_view(grads[name]).cpu(), parameter.grad)
