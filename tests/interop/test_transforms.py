"""The adapters against eager torch: values, gradients of every order, randomness, errors."""

# ruff: noqa: E501  (a table)

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.derivatives import X, assert_close, torch_grad, wavy
from tests.oracles.errors import assert_refused


@pytest.mark.parametrize("argument", [X, X.numpy(), X.to("jax")], ids=["cpu", "numpy", "jax"])
def test_arguments_may_live_anywhere(argument: Any) -> None:
    value, grad = ts.jax_value_and_grad(wavy)(argument)
    assert_close(value, wavy(X))
    assert_close(grad, torch_grad(wavy, X))


def test_python_scalars_and_containers_are_arguments() -> None:
    def fn(tree: dict, scale: float, name: str) -> dict:
        assert name == "sum"
        return {"out": tree["a"][0] * scale + tree["b"], "n": len(tree), "none": None}

    out = ts.jax_jit(fn, static_argnums=2)({"a": [torch.ones(2)], "b": torch.zeros(2)}, 3.0, "sum")
    assert_close(out["out"], torch.full((2,), 3.0))
    assert out["none"] is None


GRADIENTS = {
    "grad": ts.jax_grad,
    "jit of grad": lambda fn: ts.jax_jit(ts.jax_grad(fn)),
    "grad of jit": lambda fn: ts.jax_grad(ts.jax_jit(fn)),
    "grad of checkpoint": lambda fn: ts.jax_grad(ts.jax_checkpoint(fn)),
    "grad of value_and_grad of jit": lambda fn: ts.jax_grad(lambda x: ts.jax_value_and_grad(ts.jax_jit(fn))(x)[0]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_compositions_have_torchs_gradient(name: str) -> None:
    assert_close(GRADIENTS[name](wavy)(X), torch_grad(wavy, X))


def test_a_gradient_of_a_gradient_equals_torchs() -> None:
    found = ts.jax_grad(lambda x: ts.jax_grad(wavy)(x).sum())(X)
    assert_close(found, torch_grad(lambda x: torch_grad(wavy, x).sum(), X))


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


def test_a_jitted_gradient_computes_the_forward_pass_once() -> None:
    grad = ts.jax_view(ts.jax_value_and_grad(lambda w, x: F.softmax(x @ w, -1).square().sum()))
    program = jax.jit(grad).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile().as_text()
    assert program.count(" exponential(") == 1


def test_integers_have_gradient_zero() -> None:
    tree = {"w": X, "count": torch.tensor(3)}
    grads = ts.jax_grad(lambda t: (t["w"] ** 2 * t["count"]).sum())(tree)
    assert_close(grads["w"], 6 * X)
    assert int(grads["count"]) == 0


def test_nested_calls_draw_their_own_numbers() -> None:
    def fn(x: torch.Tensor) -> Any:
        draw = ts.jax_value_and_grad(lambda y: (y * torch.rand_like(y)).sum())
        return draw(x), draw(x)

    (value1, grad1), (value2, grad2) = ts.jax_jit(fn)(torch.ones(8))
    assert_close(value1, grad1.cpu().sum())
    assert_close(value2, grad2.cpu().sum())
    assert not torch.equal(grad1.cpu(), grad2.cpu())


def test_a_sharding_constraint_inside_jit() -> None:
    mesh = ts.make_mesh(x=4, y=2)
    wanted = NamedSharding(mesh, P("y", "x"))

    def fn(x: torch.Tensor) -> Any:
        y, z = x * 2, x * 2
        y.shard_(wanted)
        return y, z.shard_(wanted) + 0, (x + 1).shard_(NamedSharding(mesh, P()))

    x = torch.arange(64.0).view(8, 8)
    *split, whole = ts.jax_jit(fn)(x.to("jax").shard_(NamedSharding(mesh, P("x", "y"))))
    for out in split:
        assert out.sharding.is_equivalent_to(wanted, 2)
        assert_close(out, 2 * x)
    assert whole.sharding.is_fully_replicated


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
    for _ in range(5):
        fn(X)
    assert len(traces) == 2  # the second is a look at what it is at its second call
    fn(torch.ones(5))
    assert len(traces) == 3


def test_static_values_of_other_types_are_other_programs() -> None:
    fn = ts.jax_jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 2.0, 1, True, 1.0):
        assert fn(torch.arange(3, dtype=torch.int32), n).dtype == (torch.arange(3, dtype=torch.int32) * n).dtype
    divide = ts.jax_view(lambda x, n: x / n)
    assert [divide(jnp.ones(()), zero).item() for zero in (0.0, -0.0)] == [float("inf"), -float("inf")]


class Odd:
    __hash__ = None


def explicit() -> NamedSharding:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    return NamedSharding(mesh, P("x"))


SCALAR = "TypeError: .*must return a scalar floating-point tensor.*it returned .*has_aux=True"
AUTO = r": every mesh axis must be Auto.*make_mesh\(x=8\)"
REFUSED = {
    "ts.jax_value_and_grad(lambda x: torch.ones(2))(X)": SCALAR,
    "ts.jax_value_and_grad(lambda x: torch.tensor(1))(X)": SCALAR,
    "ts.jax_value_and_grad(lambda x: 3.0)(X)": SCALAR,
    "ts.jax_jit(lambda x, name: x)(X, 'sum')": "TypeError: .*str",
    "torch.ones(8, device='jax').shard_(explicit())": f"ValueError: shard_{AUTO}",
    "torch.ones(8, device='jax').apply_jax(jax.device_put, explicit())": f"ValueError: call_jax{AUTO}",
    "ts.jax_jit(torch.sin, out_shardings=explicit())": f"ValueError: jax_jit{AUTO}",
    "ts.jax_jit(lambda a, b: b.add_(a))(X, X)": r"NotImplementedError: .*writes in place to argument tensor 1.*x = x\.clone\(\)",
    "ts.jax_grad(lambda x, o: x.sum())(X, Odd())": "TypeError: unhashable type: 'Odd'",
    "ts.jax_jit(torch.sin, static_argnums='0')(X)": "TypeError: 'str' object cannot be interpreted as an integer",
    "ts.jax_jit(torch.sin, wrong=1)(X)": "TypeError: .*unexpected keyword argument 'wrong'",
    "ts.jax_grad(lambda x: x.sum())('text')": "TypeError: .*invalid data type 'str'",
}


def test_what_is_refused() -> None:
    assert_refused(REFUSED, lambda text: eval(text))


def test_gradients_are_taken_in_inference_mode() -> None:
    with torch.inference_mode():
        found = [
            ts.jax_grad(wavy)(X),
            ts.jax_grad(ts.jax_jit(wavy))(X),
            ts.torch_view(jax.grad(ts.jax_view(wavy))(ts.jax_view(X))),
        ]
    for grad in found:
        assert_close(grad, torch_grad(wavy, X))


COMPLEX = torch.complex(torch.linspace(-1, 2, 6), torch.linspace(2, 1, 6))


def test_gradients_of_complex_numbers_are_torchs() -> None:
    """Of JAX functions too, whose own are the conjugates; and JAX's where JAX takes them."""

    def in_torch(z: torch.Tensor) -> torch.Tensor:
        return (z * z * (1 + 2j) + z.conj()).abs().sum()

    def in_jax(z: jax.Array) -> jax.Array:
        return jnp.abs(z * z * (1 + 2j) + jnp.conj(z)).sum()

    wanted = COMPLEX.clone().requires_grad_()
    in_torch(wanted).backward()
    for fn in (ts.jax_jit(in_torch), ts.torch_view(in_jax), ts.jax_checkpoint(ts.torch_view(in_jax))):
        leaf = COMPLEX.clone().requires_grad_()
        fn(leaf).backward()
        assert_close(leaf.grad, wanted.grad)
        assert_close(ts.jax_grad(fn)(COMPLEX), wanted.grad)
    array = jnp.asarray(COMPLEX.numpy())
    for transform in (jax.grad, lambda fn: lambda z: jax.jvp(fn, (z,), (z * (2 - 1j),))[1]):
        np.testing.assert_allclose(transform(ts.jax_view(in_torch))(array), transform(in_jax)(array), rtol=1e-4)


def test_threads_share_an_adapted_function() -> None:
    model = torch.nn.Linear(4, 4)
    fn, found = ts.jax_jit(model), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: fn(torch.ones(i + 1, 4))})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        assert_close(found[i].detach(), model(torch.ones(i + 1, 4)).detach())
