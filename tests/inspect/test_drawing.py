"""What `visualize_sharding` draws, read back from the text and from the pictures."""

import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from rich.console import Console
from torch import nn

import torch_shard as ts
from torch_shard._inspect.drawing import visualize_sharding
from torch_shard._inspect.grid import describe_names


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
    monkeypatch.setattr("torch_shard._inspect.grid.MAX_CELLS", 4)
    with pytest.raises(ValueError, match=r"8 shards are more than can be drawn \(4\)"):
        visualize_sharding(sharded((8,), ("batch", "model")))
    with pytest.raises(ValueError, match="8 shards of w are more"):
        visualize_sharding({"w": sharded((8,), ("batch", "model"))})


# Pictures

LAYOUTS = [P("a", "b"), P("b", "a"), P("a", None), P(None, "b"), P(("a", "b"), None), P()]
MESHES = [(8, 1), (4, 2), (2, 4)]


def layout(mesh, spec, shape=(64, 32)):
    sharding = NamedSharding(ts.make_mesh(a=mesh[0], b=mesh[1]), spec)
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def read_svg(path):
    """The texts of a picture with where they stand, (y, x, text)."""
    found = ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    return [(float(text.get("y")), float(text.get("x")), "".join(text.itertext())) for text in found]


def svg_cells(path):
    """The cells of a picture: (y, x) of each by its devices and its part."""
    pairs = itertools.pairwise(read_svg(path))
    return {(owner, part): (y, x) for (y, x, owner), (_, _, part) in pairs if owner.startswith("CPU")}


def jax_parts(struct):
    """By device, its part in numbers, as JAX says it."""
    shape = struct.shape
    placed = struct.sharding.devices_indices_map(shape)
    return {
        device.id: tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        for device, index in placed.items()
    }


def in_words(part, shape=(64, 32)):
    pairs = zip(part, shape, strict=True)
    return f"[{', '.join(':' if piece == (0, size) else f'{piece[0]}:{piece[1]}' for piece, size in pairs)}]"


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pictures_agree_with_jax(mesh, spec, tmp_path):
    struct = layout(mesh, spec)
    visualize_sharding(struct, name="w").save(tmp_path / "w.svg")
    drawn, places = {}, {}
    for (owner, part), place in svg_cells(tmp_path / "w.svg").items():
        for device in owner.removeprefix("CPU ").split(", "):
            pieces = zip(part.strip("[]").split(", "), struct.shape, strict=True)
            drawn[int(device)] = tuple((0, n) if p == ":" else tuple(map(int, p.split(":"))) for p, n in pieces)
            places[drawn[int(device)]] = place
    assert drawn == jax_parts(struct)
    # Rows run down the page and columns across it.
    for (first, (y, x)), (second, (other_y, other_x)) in itertools.permutations(places.items(), 2):
        assert (first[0] < second[0]) == (y < other_y)
        assert (first[1] < second[1]) == (x < other_x)


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


def test_picture_has_the_title(tmp_path):
    visualize_sharding(layout((4, 2), P("a")), name="$w$ <&>").save(tmp_path / "w.svg")
    texts = [text for _, _, text in read_svg(tmp_path / "w.svg")]
    assert texts[:3] == ["$w$ <&>", "(64, 32) float32", "P('a') on (a=4, b=2)"]


def test_png_opens_has_the_size_of_the_svg_and_differs_by_layout(tmp_path):
    pixels = {}
    for number, spec in enumerate(LAYOUTS):
        drawing = visualize_sharding(layout((4, 2), spec), name="w")
        drawing.save(tmp_path / f"{number}.png")
        drawing.save(str(tmp_path / f"{number}.SVG"))
        image = Image.open(tmp_path / f"{number}.png")
        svg = ET.parse(tmp_path / f"{number}.SVG").getroot()
        size = [float(svg.get(side).removesuffix("pt")) / 72 * 150 for side in ("width", "height")]
        assert image.size == pytest.approx(size, abs=1)  # whole pixels
        assert 200 < min(image.size) < max(image.size) < 2000
        num_shards = len(set(jax_parts(layout((4, 2), spec)).values()))
        counts = sorted(image.convert("RGB").getcolors(1 << 20), reverse=True)
        large = [colour for count, colour in counts if count > 2000]  # a cell; edges of letters have far fewer
        assert len(large) == num_shards + 1  # and the page
        pixels[image.tobytes()] = spec
    assert len(pixels) == len(LAYOUTS)


def test_saved_twice_is_the_same_file(tmp_path):
    drawing = visualize_sharding(layout((4, 2), P("a")))
    for suffix in ("svg", "png"):
        drawing.save(tmp_path / f"first.{suffix}")
        drawing.save(tmp_path / f"second.{suffix}")
        assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"second.{suffix}").read_bytes()
    assert drawing._repr_svg_() == (tmp_path / "first.svg").read_text()


def test_other_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the suffix must be \.svg or \.png, got '\.pdf' in 'w\.pdf'"):
        visualize_sharding(layout((4, 2), P())).save("w.pdf")


def test_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "w.png"
    file.write_bytes(b"old")
    monkeypatch.setattr("pathlib.Path.replace", lambda self, other: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        visualize_sharding(layout((4, 2), P())).save(file)
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("w.png", b"old")]


def test_matplotlib_is_not_imported_for_text():
    code = "import sys, jax, torch_shard as ts; print(ts.visualize_sharding(jax.numpy.ones(3)))"
    code += "; print('matplotlib' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "False"


# Modules, dicts, states


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.head(self.norm(x))


PLAN = ts.ShardingPlan(
    {
        "tokens.weight": P("model", None),
        "blocks.*.up.weight": P("model"),
        "blocks.*.up.bias": P("model"),
        "blocks.*.down.weight": P(None, "model"),
    },
    default=P(),
)
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


@pytest.fixture
def mesh():
    return ts.make_mesh(batch=4, model=2)


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
    step = ts.make_train_step(model, lambda m, x: m(x).square().mean(), optax.sgd(0.1), mesh=mesh, plan=PLAN)
    state = step.init(seed=0)
    assert "blocks.0.up.weight to blocks.2.up.weight" in repr(state.params)  # stacked
    wanted = TIED.replace("{tokens,head}.weight (tied)", "tokens.weight")
    drawn = str(visualize_sharding(state, name="Tied"))
    assert [line.split() for line in drawn.splitlines()] == [line.split() for line in wanted.splitlines()]
    step(state, torch.zeros(8, dtype=torch.int64))
    assert str(visualize_sharding(state, name="Tied")) == drawn
    assert visualize_sharding(state).heading == "TrainState: 18 arrays, 4 layouts"


def test_narrow_terminal_loses_no_names(mesh):
    console = Console(width=40, color_system=None)
    with console.capture() as capture:
        console.print(visualize_sharding(PLAN.resolve(Tied(), mesh), name="Tied"))
    assert "…" not in capture.get()


def test_picture_of_a_module_has_every_name_device_and_part(mesh, tmp_path):
    drawing = visualize_sharding(PLAN.resolve(Tied(), mesh), name="Tied")
    drawing.save(tmp_path / "tied.svg")
    texts = [text for _, _, text in read_svg(tmp_path / "tied.svg")]
    assert texts[0] == drawing.heading
    for grid in drawing.grids:
        said = [grid.spec, *(text for line in grid.lines for text in line)]
        assert set(said) | {text for row in grid.rows for cell in row for text in (cell.owner, cell.part)} <= set(texts)
    owners = [text for text in texts if text.startswith("CPU")]
    assert len(owners) == sum(len(row) for grid in drawing.grids for row in grid.rows) == 7


def test_panels_do_not_overlap_and_long_names_are_folded(tmp_path):
    mesh = ts.make_mesh(a=4, b=2)
    names = [letter * 30 for letter in "abcdefgh"]
    held = {f"{n}.weight": jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P())) for n in names}
    held |= {str(i): layout((4, 2), spec) for i, spec in enumerate(LAYOUTS)}
    visualize_sharding(held).save(tmp_path / "w.svg")
    texts = read_svg(tmp_path / "w.svg")
    assert max(len(text) for _, _, text in texts) <= 90
    assert all(any(name in text for _, _, text in texts) for name in names)
    cells = [(y, x) for y, x, text in texts if text.startswith("CPU")]
    # A cell is 0.6 inches high and at least 0.9 wide, in points.
    apart = (abs(y - v) > 42 or abs(x - u) > 64 for (y, x), (v, u) in itertools.combinations(cells, 2))
    assert all(apart)


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


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="ReLU has no entries, so there is nothing to draw"):
        visualize_sharding(nn.ReLU())


def test_struct_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"visualize_sharding: odd \(6,\) float32: .*evenly divide") as caught:
        visualize_sharding({"odd": layout((4, 2), P("a"), shape=(6,))})
    assert caught.value.__cause__ is not None


def test_same_parts_on_other_devices_are_another_layout():
    mesh = ts.make_mesh(a=4, b=2)
    turned = ts.make_mesh(devices=jax.devices()[::-1], a=4, b=2)
    held = {
        str(i): jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(m, P("a")))
        for i, m in enumerate((mesh, turned))
    }
    assert len(visualize_sharding(held).grids) == 2
    held = {str(i): layout((4, 2), spec) for i, spec in enumerate((P("a"), P("a", None), P(None, "a"), P("b")))}
    assert len(visualize_sharding(held).grids) == 3


def spell_out(text):
    """What a shell makes of braces."""
    pieces = re.split(r"\{(.*?)\}", text)
    options = [[piece] for piece in pieces]
    for i in range(1, len(pieces), 2):
        ends = pieces[i].split("..")
        options[i] = pieces[i].split(",") if len(ends) == 1 else [str(n) for n in range(int(ends[0]), int(ends[1]) + 1)]
    return ["".join(choice) for choice in itertools.product(*options)]


components = st.sampled_from(["a", "b", "weight", *map(str, range(12))])


@given(st.sets(st.lists(components, min_size=1, max_size=4).map(".".join)))
def test_folded_names_spell_out_to_the_same_names(names):
    said = [name for text in describe_names((name,) for name in names) for name in spell_out(text)]
    assert sorted(said) == sorted(names)


def test_nothing_is_placed_within_a_compiled_function() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        visualize_sharding(x)
        return x

    for fn in (ts.jax_jit(draw), lambda x: jax.jit(draw)(x.jax())):
        with pytest.raises(TypeError, match=r"within a compiled function, tensors have no place yet\. Draw what"):
            fn(torch.ones(2, device="jax"))
