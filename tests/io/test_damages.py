"""Whatever happens to the files of a checkpoint, a restore is right, or refused in our words."""

import json
import logging

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import chosen
from tests.tables.damages import DAMAGES, FORGED_JSON, copy, files_of, forged_heads, write_json
from torch_shard._io import find_damage, inventory
from torch_shard._io.integrity import seal

NEWEST = "step_00000002"

# Where orbax cannot read one array, it closes the loop in which it still reads others, and asyncio says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Tried:
    """A directory with the checkpoints of steps 1 and 2, of a step that is as small as can be, and copies to damage."""

    def __init__(self, root):
        mesh, plan = ts.make_mesh(batch=1), ts.ShardingPlan({}, default=P())
        self.step = ts.make_train_step(
            nn.Linear(2, 2), lambda m, x: m(x).square().mean(), optax.sgd(0.1, momentum=0.9), mesh=mesh, plan=plan
        )
        self.whole, self.copy, self.values = root / "whole", root / "copy", {}
        state = self.step.init(seed=0)
        with ts.Checkpointer(self.whole, asynchronous=False) as checkpointer:
            for number in (1, 2):
                state, _ = self.step(state, torch.full((4, 2), float(number)))
                checkpointer.save(state, metrics={"loss": 1.0})
                self.values[number] = list(map(np.asarray, jax.tree.leaves((state.params, state.opt_state))))
        self.files = files_of(self.whole / NEWEST)

    def refresh(self):
        copy(self.whole, self.copy)
        return self.copy / NEWEST

    def faults(self):
        """What is wrong with what the two ways to restore give: nothing, if it is right or refused in our words."""
        return [fault for wanted in (2, None) if (fault := self._fault(wanted))]

    def _fault(self, wanted):
        try:
            state = ts.Checkpointer(self.copy).restore(self.step, step=wanted)
        except (ValueError, FileNotFoundError) as error:
            text = str(error)
            says = "restore(..., step=1)" in text or "does not fit the model" in text or "of steps [1, 2]" in text
            is_ours = text.startswith("Checkpointer") and str(self.copy) in text and says
            return None if is_ours else f"restore(step={wanted}): {error!r}"
        except Exception as error:
            return f"restore(step={wanted}): {error!r}"
        found = jax.tree.leaves((state.params, state.opt_state))
        same = all(map(np.array_equal, found, self.values[int(state.step)]))
        return None if same else f"restore(step={wanted}) gives other values"


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    logging.disable(logging.WARNING)  # that one is passed over
    yield Tried(tmp_path_factory.mktemp("damages"))
    logging.disable(logging.NOTSET)


def _of_each_name(files):
    """One file of each name, of those that orbax numbers one."""
    return {name.rpartition("/")[2] if "/d/" not in name else "d": name for name in files}.values()


@pytest.mark.parametrize(
    "damage", chosen(DAMAGES, ["missing", "cut", "bit flipped", "directory", "link to itself", "pipe"])
)
def test_a_damaged_file(tried, damage):
    faults = []
    for name in _of_each_name(tried.files):
        DAMAGES[damage](tried.refresh() / name)
        faults += [f"{name}: {fault}" for fault in tried.faults()]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("damage", chosen(["missing", "cut", "zip"], ["missing"]))
def test_a_damaged_file_with_a_checksum_of_its_own(tried, damage):
    """What a program that writes other files than we do might leave behind: orbax itself is to notice."""
    faults = []
    for name in _of_each_name(tried.files):
        folder = tried.refresh()
        DAMAGES[damage](folder / name)
        if name != "checksums.json":
            seal(folder)
        faults += [f"{name}: {fault}" for fault in tried.faults()]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ["checksums.json", "state.json"])
def test_forged_json(tried, name):
    for what, text in FORGED_JSON.items():
        folder = tried.refresh()
        (folder / name).write_text(text)
        if name == "state.json":
            seal(folder)
            with pytest.raises(
                ValueError, match=r"is not a checkpoint of this version of torch_shard: state\.json: cannot"
            ):
                inventory(folder)
        else:
            (said,) = find_damage(folder)
            assert said.startswith("checksums.json: cannot be read"), what
        assert not tried.faults(), what


def test_forged_descriptions(tried):
    head = json.loads((tried.whole / NEWEST / "state.json").read_text())
    for what, forged in forged_heads(head):
        folder = tried.refresh()
        write_json(folder / "state.json", forged)
        seal(folder)
        assert not tried.faults(), what


def test_forged_checksums(tried):
    """Of a file that is there, and of what is none in the folder."""
    found = json.loads((tried.whole / NEWEST / "checksums.json").read_text())
    forged = [{**found, "state.json": sums} for sums in (None, "x", [1], ["a", "b"], {})]
    forged += [{**found, name: [1, 2]} for name in ("../../x", "/etc/passwd", "", "a\0b", "x" * 300)]
    for sums in forged:
        write_json(tried.refresh() / "checksums.json", sums)
        assert not tried.faults(), sums


@pytest.mark.parametrize("what", ["a file", "a loop", "a link to nothing", "empty", "unsealed", "without arrays"])
def test_a_damaged_folder(tried, what):
    folder = tried.refresh()
    moved = folder.rename(folder.with_name("moved"))
    if what == "a file":
        folder.write_text("x")
    elif what in ("a loop", "a link to nothing"):
        folder.symlink_to(folder.name if what == "a loop" else "nowhere")
    elif what == "empty":
        folder.mkdir()
    else:
        moved.rename(folder)
        if what == "unsealed":
            (folder / "checksums.json").unlink()
        else:
            (folder / "d").rename(folder / "other")
            seal(folder)
    assert not tried.faults()


def test_the_words(tried):
    state = tried.refresh() / "state.json"
    for change, said in ((lambda: state.write_text("[]"), r"2 bytes, must have \d+"), (state.unlink, "missing")):
        change()
        with pytest.raises(ValueError, match=rf"step_00000002 is damaged: state.json: {said}\. Step 1 is whole"):
            ts.Checkpointer(tried.copy).restore(tried.step, step=2)
    assert int(ts.Checkpointer(tried.copy).restore(tried.step).step) == 1
