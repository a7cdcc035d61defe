"""Shardings as SVG, read back from the files."""

import itertools
import xml.etree.ElementTree as ET

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.tables.drawn import LAYOUTS, MESHES, PLAN, Tied, jax_parts, layout
from torch_shard._inspect.drawing import visualize_sharding
from torch_shard._inspect.grid import CELL_HEIGHT, MIN_CELL_WIDTH


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


def test_a_picture_is_for_light_and_dark_pages_and_the_same_each_time(tmp_path):
    drawing = visualize_sharding(layout((4, 2), P("a")))
    drawing.save(str(tmp_path / "w.SVG"))
    assert drawing._repr_svg_() == (tmp_path / "w.SVG").read_text() == drawing._repr_svg_()
    assert "prefers-color-scheme:dark" in drawing._repr_svg_()


def test_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "w.svg"
    file.write_bytes(b"old")
    monkeypatch.setattr("pathlib.Path.replace", lambda self, other: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        visualize_sharding(layout((4, 2), P())).save(file)
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("w.svg", b"old")]


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
    apart = (
        abs(y - v) > 0.99 * CELL_HEIGHT or abs(x - u) > 0.99 * MIN_CELL_WIDTH
        for (y, x), (v, u) in itertools.combinations(cells, 2)
    )
    assert all(apart)
