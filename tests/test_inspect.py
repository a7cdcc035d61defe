"""What `visualize_sharding` draws, read back from the text."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import torch_shard as ts
from torch_shard._inspect import visualize_sharding


def draw(array, **kwargs):
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(visualize_sharding(array, **kwargs))
    return capture.get()


def cells(drawing):
    """The cells of the grid, row by row: lines of devices and lines of ranges take turns."""
    lines = [line for line in drawing.splitlines() if line.startswith("│")]
    parts = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return [list(zip(*pair, strict=True)) for pair in zip(parts[::2], parts[1::2], strict=True)]


def sharded(shape, *spec, **axis_sizes):
    sharding = NamedSharding(ts.make_mesh(**(axis_sizes or {"batch": 4, "model": 2})), P(*spec))
    return jax.device_put(np.zeros(shape, np.float32), sharding)


def test_row_parallel_weight_lies_side_by_side():
    assert cells(draw(sharded((4, 6), None, "model"))) == [
        [("CPU 0, 2, 4, 6", "[:, 0:3]"), ("CPU 1, 3, 5, 7", "[:, 3:6]")]
    ]


def test_column_parallel_weight_is_stacked():
    assert cells(draw(sharded((4, 6), "model"))) == [
        [("CPU 0, 2, 4, 6", "[0:2, :]")],
        [("CPU 1, 3, 5, 7", "[2:4, :]")],
    ]


def test_two_split_dims_make_a_grid():
    grid = cells(draw(sharded((4, 6), "batch", "model")))
    assert [[devices for devices, _ in row] for row in grid] == [[f"CPU {2 * i}", f"CPU {2 * i + 1}"] for i in range(4)]
    assert grid[3][1] == ("CPU 7", "[3:4, 3:6]")


def test_vector_lies_down_and_unsplit_dims_are_not_drawn():
    assert len(cells(draw(sharded((8,), "batch")))) == 1
    assert cells(draw(sharded((3, 4, 5), None, "model", None))) == [
        [("CPU 0, 2, 4, 6", "[:, 0:2, :]"), ("CPU 1, 3, 5, 7", "[:, 2:4, :]")]
    ]


def test_three_split_dims_keep_the_last_across():
    grid = cells(draw(sharded((2, 2, 2), "a", "b", "c", a=2, b=2, c=2)))
    assert [len(row) for row in grid] == [2] * 4
    assert grid[2] == [("CPU 4", "[1:2, 0:1, 0:1]"), ("CPU 5", "[1:2, 0:1, 1:2]")]


def test_drawing_agrees_with_the_shards_themselves():
    array = sharded((8, 6), ("batch", "model"))
    drawn = {devices: part for row in cells(draw(array)) for devices, part in row}
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(8)
        assert drawn[f"CPU {shard.device.id}"] == f"[{start}:{stop}, :]"


@pytest.mark.parametrize("shape", [(), (4,), (0, 4)], ids=str)
def test_replicated_array_is_one_cell(shape):
    (((devices, part),),) = cells(draw(sharded(shape)))
    assert devices == "CPU 0, 1, 2, 3, 4, 5, 6, 7"
    assert part == f"[{', '.join(':' * len(shape))}]"


def test_title_says_name_shape_dtype_spec_and_mesh():
    title = draw(sharded((4, 6), "model"), name="up.weight").splitlines()[0]
    assert title.strip() == "up.weight (4, 6) float32 P('model') on (batch=4, model=2)"


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


def test_too_many_shards_are_refused(monkeypatch):
    monkeypatch.setattr("torch_shard._inspect.MAX_CELLS", 4)
    with pytest.raises(ValueError, match=r"8 shards are more than can be drawn \(4\)"):
        visualize_sharding(sharded((8,), ("batch", "model")))
