"""Shardings as SVG and PNG, read back from the files."""

import itertools
import xml.etree.ElementTree as ET

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

import torch_shard as ts
from tests.tables.drawn import LAYOUTS, MESHES, PLAN, Tied, jax_parts, layout
from torch_shard._inspect.drawing import visualize_sharding


def read_svg(path):
    """The texts of a picture with where they stand, (y, x, text)."""
    found = ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    return [(float(text.get("y")), float(text.get("x")), "".join(text.itertext())) for text in found]


def svg_cells(path):
    """The cells of a picture: (y, x) of each by its devices and its part."""
    pairs = itertools.pairwise(read_svg(path))
    return {(owner, part): (y, x) for (y, x, owner), (_, _, part) in pairs if owner.startswith("CPU")}


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


def test_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "w.png"
    file.write_bytes(b"old")
    monkeypatch.setattr("pathlib.Path.replace", lambda self, other: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        visualize_sharding(layout((4, 2), P())).save(file)
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("w.png", b"old")]


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
