"""Bugs of the libraries beneath, as small as they get. When one of these passes, its guard in torch_shard can go."""

import copy

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
from tests.oracles.steps import step_of
from tests.tables.cases import chosen
from torch_shard._lowering.compiler_options import cut_add_pad, safe_pads

KNOWN = jax.__version__.startswith("0.10.")  # of later ones it was not measured


@pytest.fixture
def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 8), "float32"), rng.standard_normal((2, 8), "float32")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a bug of XLA's CPU backend")
@pytest.mark.xfail(
    strict=False,  # LLVM vectorises by the CPU that it finds: wrong on some, right on others
    reason="XLA:CPU (jaxlib 0.10.2): row 1 of the padded sum gets the values of row 0",
)
def test_xla_cpu_pads_two_rows_of_a_sum_of_slices(operands) -> None:
    a, b = operands
    np.testing.assert_allclose(jax.jit(cut_add_pad)(0, a, b), np.pad(a[:, :4] + b[:, :4], ((0, 0), (8, 8))))


def test_the_guard_makes_it_right(operands) -> None:
    a, b = operands
    found = jax.jit(cut_add_pad, compiler_options=safe_pads())(0, a, b)
    np.testing.assert_allclose(found, np.pad(a[:, :4] + b[:, :4], ((0, 0), (8, 8))))


class HandCutGRU(nn.Module):
    """Gates cut by slices, and by chunk: torch's gradients of both are concatenations, which are not affected."""

    def __init__(self, pad: bool) -> None:
        super().__init__()
        self.input, self.hidden, self.pad = nn.Linear(4, 24), nn.Linear(8, 24), pad

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        h, out = x_BTC.new_zeros(x_BTC.shape[0], 8), []
        for t in range(x_BTC.shape[1]):
            i, s = self.input(x_BTC[:, t]), self.hidden(h)
            r, z = torch.sigmoid(i[:, :8] + s[:, :8]), torch.sigmoid(i[:, 8:16] + s[:, 8:16])
            n = torch.tanh(i.chunk(3, 1)[2] + r * s.chunk(3, 1)[2])
            h = (h - n) * z + n
            out.append(F.pad(h, (8, 8)) if self.pad else h)
        return torch.stack(out)


@pytest.mark.parametrize("pad", chosen([False, True], [True]))
def test_recurrent_gradients_are_right_when_sharded(pad: bool) -> None:
    """Two local rows is where programs that JAX differentiates go wrong by some percent."""
    torch.manual_seed(0)
    model, x = HandCutGRU(pad), torch.randn(4 * 2, 4, 4)
    mesh, plan = ts.make_mesh(batch=4, model=2), ts.ShardingPlan({"**": P("model")})
    step = step_of(model, lambda m, x: m(x).sum(), optax.sgd(1.0), mesh=mesh, plan=plan)
    alone = copy.deepcopy(model)
    state, _ = step(step.init(), x)
    alone(x).sum().backward()
    for name, parameter in alone.named_parameters():
        wanted = (parameter - parameter.grad).detach().numpy()
        np.testing.assert_allclose(state.params[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="Shardy (jaxlib 0.10.2): an axis that it splits between two dims is put wrongly")
def test_a_dim_that_is_put_together_may_have_axes_in_another_order_than_the_meshs() -> None:
    mesh = ts.make_mesh(batch=4, model=2)
    rng = np.random.default_rng(0)
    grad, x = (rng.standard_normal((8, 8, 16)).astype("float32") for _ in range(2))

    def of_weight(grad: jax.Array, x: jax.Array) -> jax.Array:
        grouped = (array.reshape(8, 4, 2, 16) for array in (grad, x))
        return jnp.einsum("ngos,ngis->goi", *grouped).reshape(8, 2)

    rows, out = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("batch"), P(("model", "batch"))))
    found = jax.jit(of_weight, in_shardings=(rows, rows), out_shardings=out)(grad, x)
    np.testing.assert_allclose(found, of_weight(grad, x), rtol=1e-5, atol=1e-5)  # sums of 128 in another order


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="XLA's partitioner (jaxlib 0.10.2): twice the gradient, once per `model` device")
def test_the_partitioner_sums_a_grouped_convolutions_gradient_twice() -> None:
    mesh = ts.make_mesh(batch=4, model=2)
    x, w = np.ones((8, 4, 5), np.float32), np.ones((4, 2, 3), np.float32)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2).sum()

    split = [jax.device_put(a, jax.sharding.NamedSharding(mesh, spec)) for a, spec in ((w, P()), (x, P("batch")))]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(*split), jax.grad(loss)(w, x))


@pytest.mark.slow
@pytest.mark.xfail(strict=KNOWN, reason="XLA's partitioner (jaxlib 0.10.2): shards of a gradient are permuted")
def test_a_gradient_may_be_laid_out_over_two_axes_in_one_dim() -> None:
    mesh = ts.make_mesh(extra=2, batch=2, model=2)
    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal(shape, "float32") for shape in [(8, 16), (16, 16), (16, 16)])
    specs = (P("model"), P(("extra", "model"), "batch"), P("batch"))
    placed = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]

    def grad(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: ((jnp.tanh(x @ first.T) @ w.T) ** 2).sum())(second)

    found = jax.jit(grad, in_shardings=placed, out_shardings=placed[1])(*weights, x)
    np.testing.assert_allclose(found, grad(*weights, x), rtol=1e-3, atol=1e-3)  # float32; it is off by its own size


@pytest.mark.slow
@pytest.mark.xfail(strict=KNOWN, reason="XLA's partitioner (jaxlib 0.10.2): the padding of indices is counted")
def test_indices_that_do_not_divide_are_counted() -> None:
    mesh = ts.make_mesh(batch=4, model=2)
    rows = np.random.default_rng(0).integers(0, 5, (8, 7))

    def count(rows: jax.Array) -> jax.Array:
        return jnp.zeros(5).at[jnp.concatenate([rows.reshape(-1), jnp.arange(5)])].add(1)

    found = jax.jit(count)(jax.device_put(rows, jax.sharding.NamedSharding(mesh, P("batch"))))
    np.testing.assert_array_equal(found, count(jnp.asarray(rows)))


@pytest.mark.slow
@pytest.mark.xfail(strict=KNOWN, reason="XLA's partitioner (jaxlib 0.10.2): a kernel's own dims must not be split")
def test_a_kernel_may_be_split_along_its_own_dim() -> None:
    mesh = ts.make_mesh(batch=2, model=2, extra=2)
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((16, 16, 4), "float32"), rng.standard_normal((4, 16, 12), "float32")
    placed = [jax.sharding.NamedSharding(mesh, spec) for spec in (P("batch", None, ("extra", "model")), P("batch"))]

    def grad(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (jax.lax.conv_general_dilated(x, w, (2,), [(0, 0)]) ** 2).sum())(w)

    found = jax.jit(grad, in_shardings=placed, out_shardings=placed[0])(w, x)
    np.testing.assert_allclose(found, grad(w, x), rtol=1e-3, atol=1e-2)  # float32; it is off by its own size
