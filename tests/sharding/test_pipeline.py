"""Which entries are those of all layers of a pipeline."""

import pytest

from torch_shard._sharding.pipeline import Pipeline, Stages

NAMES = ("block.2", "block.10", "block.1", "block.1-old", "block.1+new")


@pytest.mark.parametrize("names", [NAMES, NAMES[:3]])
def test_entries_of_all_layers_are_known_by_their_names(names: tuple[str, ...]) -> None:
    stages = Stages(Pipeline(), 1, names)
    for order in (names, names[::-1]):
        assert stages.has(tuple(f"{name}.weight" for name in order))
    assert not stages.has(tuple(f"{name}.weight" for name in names[1:]))
    assert not stages.has(tuple(f"{name}.weight" for name in (*names[1:], "head")))
