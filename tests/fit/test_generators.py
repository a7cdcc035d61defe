"""Random numbers of an epoch: the same whatever was drawn before, from wherever a loader draws them."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.tables.runs import LOADERS
from torch_shard._fit.data import Batches, reseed


class OwnNumbers(Dataset):
    """Augments with generators of its own, and with one of the module."""

    def __init__(self):
        self.numpy, self.python, self.old = np.random.default_rng(0), random.Random(0), np.random.RandomState(0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index + self.numpy.random() + self.python.random() + self.old.rand() + from_the_module()


FROM_THE_MODULE = np.random.default_rng(0)


def from_the_module():
    return FROM_THE_MODULE.random()


class Shuffled:
    """Not a DataLoader; shuffles with a generator of its own."""

    def __init__(self):
        self.order = np.random.default_rng(0)

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(self.order.permutation(40).reshape(5, 8))


def noisy_collate():
    noise = torch.Generator().manual_seed(0)
    return lambda rows: torch.tensor(rows) + torch.rand((), generator=noise)


HOLDERS = {
    "loader": Shuffled,
    "dataset": lambda: DataLoader(OwnNumbers(), batch_size=8, shuffle=True),
    "part of it": lambda: DataLoader(torch.utils.data.Subset(OwnNumbers(), range(40)), batch_size=8),
    "closure": lambda: DataLoader(range(40), batch_size=8, collate_fn=noisy_collate()),
    "persistent workers": lambda: DataLoader(
        range(40), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize("kind", HOLDERS)
def test_generators_that_a_loader_holds_begin_anew_with_each_epoch(kind):
    whole = list(itertools.islice(Batches(HOLDERS[kind](), seed=0).starting_at(0), 13))
    assert not np.array_equal(whole[0], whole[5])
    same = HOLDERS[kind]()
    for start, stop in ((0, 7), (7, 13)):  # the same object twice, and a new one as in another process
        for held in (same, HOLDERS[kind]()):
            found = itertools.islice(Batches(held, seed=0).starting_at(start), stop - start)
            np.testing.assert_array_equal(list(found), whole[start:stop])


def test_numbers_of_a_held_generator_are_left_as_they_were():
    held = Shuffled()
    wanted = np.random.default_rng(0).random(3)
    list(itertools.islice(Batches(held, seed=0).starting_at(0), 7))
    np.testing.assert_array_equal(held.order.random(3), wanted)


def test_rows_draw_other_numbers_from_each_generator():
    """A generator of the dataset's own and the global one were seeded alike: noise and choice were one number."""
    held = torch.Generator(), torch.Generator()
    with torch.random.fork_rng():
        reseed(held, 0, 0, 3)
        assert len({float(torch.rand((), generator=each)) for each in (None, *held)}) == 3


def test_batches_in_the_order_of_chance_are_told_of(caplog):
    Batches(DataLoader(range(8), num_workers=1, in_order=False), seed=0)
    assert "in_order=False, so chance decides the order" in caplog.text


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "augmented"])
def test_loops_of_ones_own_see_the_same_numbers_afterwards(kind):
    """The generators of the process are left as they were."""
    batches = LOADERS[kind]()
    torch.manual_seed(0)
    random.seed(0)
    wanted = torch.rand(3), random.random(), np.random.get_state()[2]
    torch.manual_seed(0)
    random.seed(0)
    list(itertools.islice(Batches(batches, seed=0).starting_at(3), 9))
    found = torch.rand(3), random.random(), np.random.get_state()[2]
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]
