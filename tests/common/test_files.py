"""Files are written whole or not at all."""

import pytest

from torch_shard._common.printed import replacing


def test_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    file = tmp_path / "kept.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as partial:
        partial.write_text(f"new {1 / 0}")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("kept.txt", "old")]
