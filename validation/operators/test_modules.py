"""The modules of torch.nn on a mesh, those that the tests do not have there, and all within `jax_shard_map`."""

from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.lowering.test_nn import Tensors, assert_close, assert_equal_eager, made, parts_of, run, split
from tests.tables.nn_table import LAYERS, MORE, Row
from torch_shard.collectives import psum
from validation.operators.siblings import SIBLINGS

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own


@pytest.mark.parametrize("rows", parts_of(SIBLINGS))
def test_on_a_mesh(rows: list[Row]) -> None:
    assert_equal_eager(rows, split)


SCALES = torch.tensor([1.0, 0.75])


def scaled(made_row: Any, leaves: Tensors, scale: torch.Tensor) -> torch.Tensor:
    modules, _, fixed, inputs = made_row
    return run(modules[-1], {n: x * scale if n in inputs else x for n, x in leaves.items()}, fixed, inputs)[0]


@pytest.mark.parametrize("rows", parts_of(LAYERS) + parts_of(MORE + SIBLINGS))
def test_on_other_inputs_per_device(rows: list[Row]) -> None:
    """Inside jax_shard_map: parameters are the same on both devices, inputs are not."""
    each = [made(row) for row in rows]
    mesh, specs = ts.make_mesh(i=2), {"in_specs": (P(), P("i")), "out_specs": P()}

    def on_devices(made_row: Any) -> Any:
        mapped = lambda leaves, scale: psum(scaled(made_row, leaves, scale[0]), "i")  # noqa: E731
        return ts.jax_value_and_grad(ts.jax_shard_map(mapped, mesh=mesh, **specs))(made_row[1], SCALES)

    found = ts.jax_jit(lambda: [on_devices(made_row) for made_row in each])()
    for row, made_row, (found_value, found_grads) in zip(rows, each, found, strict=True):
        given = {n: x.clone().requires_grad_() for n, x in made_row[1].items()}
        value = sum(scaled(made_row, given, scale) for scale in SCALES)
        wanted = torch.autograd.grad(value, list(given.values()), allow_unused=True, materialize_grads=True)
        assert_close(found_value, value, row.rtol, f"{row.name}: value")
        for name, grad in zip(given, wanted, strict=True):
            assert_close(found_grads[name], grad, row.rtol, f"{row.name}: gradient of {name}")
