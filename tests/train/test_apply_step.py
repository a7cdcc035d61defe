"""`make_apply`: the forward pass in eval mode, against eager torch."""

import copy

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import WHOLE, make_mesh

PLAN = ts.ShardingPlan({"0.weight": P("model"), "0.bias": P("model"), "4.weight": P(None, "model")}, default=P())
ATOL = 1e-5  # float32; sums over devices are in another order


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def test_outputs_are_those_of_eager_torch_in_eval_mode_and_stay_split():
    model, mesh, batch = net(), make_mesh((4, 2)), torch.randn(8, 8)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(batch)
    apply = ts.make_apply(model, mesh=mesh, plan=PLAN)
    out = apply(batch)
    np.testing.assert_allclose(out, expected, atol=ATOL)
    assert out.sharding.shard_shape(out.shape) == (2, 4)
    assert model.training  # its own flags are left alone
    np.testing.assert_allclose(apply(apply.init(), batch), expected, atol=ATOL)
    assert apply.num_compiles == 1
    exported = apply.export_program(torch.empty(8, 8, device="meta"))
    assert exported.nr_devices == 8
    assert exported.out_avals[-1].shape == (8, 4)
    np.testing.assert_allclose(apply(batch[:3]), expected[:3], atol=ATOL)  # does not divide, and is computed whole


def test_own_values_are_read_at_each_call_and_a_state_is_of_a_step():
    model, mesh = net(), make_mesh((4, 2))
    step = step_of(copy.deepcopy(model), plan=PLAN)
    apply, batch = ts.make_apply(model, mesh=mesh, plan=PLAN), torch.randn(8, 8)
    state, _ = step(step.init(), batch)
    expected = step.export(state).eval()(batch).detach()
    np.testing.assert_allclose(apply(state, batch), expected, atol=ATOL)
    assert not np.allclose(apply(batch), expected, atol=ATOL)
    step(state, batch)  # the state was only read
    model[4].bias.data.zero_()
    model[4].weight.data.zero_()
    assert not np.any(apply(batch))


@pytest.mark.parametrize("rows", [8, 3], ids=["split", "whole"])
def test_transforms_of_jax_go_around_the_first_call(rows):
    model, batch = net().eval(), torch.randn(rows, 8)
    x = batch.clone().requires_grad_()
    model(x).square().sum().backward()
    apply = ts.make_apply(model, mesh=make_mesh((4, 2)), plan=PLAN)
    grad = jax.grad(lambda x: jax.numpy.square(apply(x)).sum())
    np.testing.assert_allclose(grad(batch.numpy()), x.grad, atol=ATOL)
    apply = ts.make_apply(model, mesh=make_mesh((4, 2)), plan=PLAN)
    np.testing.assert_allclose(jax.jit(apply)(batch.numpy()), model(batch).detach(), atol=ATOL)
    np.testing.assert_allclose(apply(batch), model(batch).detach(), atol=ATOL)
    assert apply.num_compiles == 1


def test_a_function_of_model_and_batch_gives_any_containers():
    model = net()

    def fn(model, batch):
        hidden = model[0](batch["x"])
        return {"hidden": hidden, "pair": (hidden.sum(), hidden.sum(0)), "count": 3}

    apply = ts.make_apply(model, mesh=make_mesh((4, 2)), plan=PLAN, fn=fn)
    batch = {"x": torch.randn(8, 8)}
    with torch.no_grad():
        expected = fn(model, batch)
    out = apply(batch)
    jax.tree.map(lambda found, of: np.testing.assert_allclose(found, of, atol=10 * ATOL), out, expected)
    assert out["hidden"].sharding.shard_shape((8, 16))[0] == 2
    assert out["pair"][1].sharding.is_fully_replicated


def test_an_output_with_the_rows_of_a_leaf_that_is_not_split_is_whole():
    """Three rows, which do not divide over four devices."""
    apply = ts.make_apply(
        net(),
        mesh=make_mesh((4, 2)),
        plan=PLAN,
        fn=lambda model, batch: (model(batch["x"]), 2 * batch["mask"]),
        batch_spec={"mask": P()},
    )
    out, mask = apply({"mask": torch.ones(3, 3), "x": torch.randn(8, 8)})
    assert (out.sharding.shard_shape(out.shape), mask.sharding.is_fully_replicated) == ((2, 4), True)


def test_mappings_and_tuples_are_arguments():
    class Two(nn.Module):
        def forward(self, a, b):
            return a - b

    apply = ts.make_apply(Two(), mesh=make_mesh((4, 2)), plan=WHOLE)
    a, b = torch.randn(8), torch.randn(8)
    np.testing.assert_array_equal(apply((a, b)), a - b)
    np.testing.assert_array_equal(apply({"b": b, "a": a}), a - b)


def test_errors_say_what_to_do():
    mesh = make_mesh((4, 2))
    with pytest.raises(
        TypeError, match=r"make_apply: call apply\(state, batch\) or apply\(batch\), found apply\(int, int, int\)"
    ):
        ts.make_apply(net(), mesh=mesh, plan=PLAN)(1, 2, 3)
    with pytest.raises(TypeError, match="make_apply: outputs must be tensors or numbers in containers, but object is"):
        ts.make_apply(net(), mesh=mesh, plan=PLAN, fn=lambda model, batch: object())(torch.ones(8, 8))
    with pytest.raises(TypeError, match="make_apply: fn "):
        ts.make_apply(net(), mesh=mesh, plan=PLAN, fn=3)


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


def test_a_program_that_needs_options_of_the_compiler_runs_within_jax_jit():
    """JAX takes options of what it compiles by itself alone; sums of exponentials have some on the CPU."""
    batch, apply = torch.randn(8, 4), ts.make_apply(Exponential(), mesh=make_mesh((8, 1)), plan=WHOLE)
    np.testing.assert_allclose(apply(batch), batch.exp(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(apply)(batch.numpy()), batch.exp(), rtol=1e-6)
