"""What `visualize_sharding` draws, read back from the text."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.drawn import LAYOUTS, MESHES, PLAN, Tied, cells, jax_parts, layout, sharded
from torch_shard._inspect.drawing import visualize_sharding


def draw(array, **kwargs):
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(visualize_sharding(array, **kwargs))
    return capture.get()


def test_three_split_dims_keep_the_last_across():
    grid = cells(draw(sharded((2, 2, 2), "a", "b", "c", a=2, b=2, c=2)))
    assert [len(row) for row in grid] == [2] * 4
    assert grid[2] == [("CPU 4", "[1:2, 0:1, 0:1]"), ("CPU 5", "[1:2, 0:1, 1:2]")]


@pytest.mark.parametrize("shape", [(), (4,), (0, 4)], ids=str)
def test_replicated_array_is_one_cell(shape):
    (((devices, part),),) = cells(draw(sharded(shape)))
    assert devices == "CPU 0, 1, 2, 3, 4, 5, 6, 7"
    assert part == f"[{', '.join(':' * len(shape))}]"


def test_tensor_on_the_jax_device_and_struct_are_drawn_alike():
    mesh = ts.make_mesh(batch=4, model=2)
    layer = ts.place(torch.nn.Linear(6, 4), mesh, ts.ShardingPlan({"weight": P("model")}, default=P()))
    struct = jax.ShapeDtypeStruct((4, 6), "float32", sharding=NamedSharding(mesh, P("model")))
    assert draw(layer.weight) == draw(struct) == draw(sharded((4, 6), "model"))


def test_array_on_one_device_has_no_spec():
    array = jax.device_put(np.zeros(3, np.float32), SingleDeviceSharding(jax.devices()[3]))
    assert draw(array).splitlines()[0].strip() == "(3,) float32"
    assert cells(draw(array)) == [[("CPU 3", "[:]")]]


def test_cpu_tensor_is_refused_with_remedy():
    with pytest.raises(TypeError, match=r"got Tensor, which has no sharding. Place it first: torch_shard.place"):
        visualize_sharding(torch.zeros(3))


def in_words(part, shape=(64, 32)):
    pairs = zip(part, shape, strict=True)
    return f"[{', '.join(':' if piece == (0, size) else f'{piece[0]}:{piece[1]}' for piece, size in pairs)}]"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_text_agrees_with_jax(mesh):
    for spec in LAYOUTS:
        struct = layout(mesh, spec)
        drawn = {
            int(device): part
            for row in cells(draw(struct))
            for owner, part in row
            for device in owner.removeprefix("CPU ").split(", ")
        }
        assert drawn == {device: in_words(part) for device, part in jax_parts(struct).items()}


def test_packages_that_take_long_are_imported_when_they_are_needed():
    code = "import sys, jax, torch_shard as ts; print(ts.visualize_sharding(jax.numpy.ones(3)))"
    late = ("matplotlib", "networkx", "orbax", "sympy", "tensorboardX", "transformers")  # sympy: torch's, for captures
    code += f"; print([name for name in {late} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "[]"


TIED = """\
Tied: 18 arrays, 4 layouts

{tokens,head}.weight (tied)  (16, 8) float32, each shard (8, 8)
blocks.{0..2}.up.weight      (32, 8) float32, each shard (16, 8)
P('model', None) on (batch=4, model=2)
┌────────────────┐
│ CPU 0, 2, 4, 6 │
│ [1 of 2, :]    │
├────────────────┤
│ CPU 1, 3, 5, 7 │
│ [2 of 2, :]    │
└────────────────┘

blocks.{0..2}.up.bias (32,) float32 P('model') on (batch=4, model=2)
┌────────────────┬────────────────┐
│ CPU 0, 2, 4, 6 │ CPU 1, 3, 5, 7 │
│ [0:16]         │ [16:32]        │
└────────────────┴────────────────┘

blocks.{0..2}.down.weight (8, 32) float32 P(None, 'model') on (batch=4, model=2)
┌────────────────┬────────────────┐
│ CPU 0, 2, 4, 6 │ CPU 1, 3, 5, 7 │
│ [:, 0:16]      │ [:, 16:32]     │
└────────────────┴────────────────┘

blocks.{0..2}.down.bias                      (8,) float32
norm.{weight,bias,running_mean,running_var}  (8,) float32
norm.num_batches_tracked                     () int32
P() on (batch=4, model=2)
┌────────────────────────────┐
│ CPU 0, 1, 2, 3, 4, 5, 6, 7 │
│ whole                      │
└────────────────────────────┘"""


def test_module_dict_and_plan_are_drawn_alike(mesh):
    model = Tied()
    planned = str(visualize_sharding(PLAN.resolve(model, mesh), name="Tied"))
    assert planned.replace("int64", "int32") == TIED  # a plan has the dtype of torch, an array that of JAX
    ts.place(model, mesh, PLAN)
    assert str(visualize_sharding(model)) == TIED
    assert str(visualize_sharding(model.state_dict(), name="Tied")) == TIED
    arrays = {name: tensor.jax() for name, tensor in model.state_dict().items()}
    assert str(visualize_sharding(arrays, name="Tied")) == TIED
    assert repr(visualize_sharding(model)) == "Drawing(Tied: 18 arrays, 4 layouts)"


def test_state_is_drawn_by_the_names_of_its_layers_also_when_donated(mesh):
    model = Tied()
    step = step_of(model, mesh=mesh, plan=PLAN)
    state = step.init(seed=0)
    assert "blocks.0.up.weight to blocks.2.up.weight" in repr(state.params)  # stacked
    wanted = TIED.replace("{tokens,head}.weight (tied)", "tokens.weight")
    drawn = str(visualize_sharding(state, name="Tied"))
    assert [line.split() for line in drawn.splitlines()] == [line.split() for line in wanted.splitlines()]
    step(state, torch.zeros(8, dtype=torch.int64))
    assert str(visualize_sharding(state, name="Tied")) == drawn
    assert visualize_sharding(state).heading == "TrainState: 18 arrays, 4 layouts"


def test_module_on_the_cpu_is_refused_with_all_names_and_remedy(mesh):
    with pytest.raises(TypeError) as caught:
        visualize_sharding(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert str(caught.value) == (
        "visualize_sharding: 7 of the 7 names in Sequential have no sharding (Parameter on cpu, Tensor on cpu): "
        "0.{weight,bias}, 1.{weight,bias,running_mean,running_var,num_batches_tracked}. Place them first, "
        "torch_shard.place(model, mesh, plan), or draw what a plan would do, "
        "visualize_sharding(plan.resolve(model, mesh))."
    )
    model = ts.place(Tied(), mesh, PLAN)
    model.norm.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match=r"1 of the 20 names in Tied have .* \(Parameter on cpu\): norm\.extra\. Place"):
        visualize_sharding(model)
    held = {"a": layout((4, 2), P()), "b": np.zeros(3), "c": jax.ShapeDtypeStruct((3,), "float32")}
    with pytest.raises(TypeError, match=r"2 of the 3 names in w have .* \(ndarray, ShapeDtypeStruct\): b, c\."):
        visualize_sharding(held, name="w")


def test_nothing_is_placed_within_a_compiled_function() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        visualize_sharding(x)
        return x

    for fn in (ts.jax_jit(draw), lambda x: jax.jit(draw)(x.jax())):
        with pytest.raises(TypeError, match=r"within a compiled function, tensors have no place yet\. Draw what"):
            fn(torch.ones(2, device="jax"))
