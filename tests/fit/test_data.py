"""Batches from any position of any loader, and loaders that do not do."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import torch_shard as ts
from tests.tables.runs import DATA, loader, run
from torch_shard._fit.data import Batches


def test_every_epoch_sees_every_row_in_another_order():
    batches = DataLoader(torch.arange(40), batch_size=8, shuffle=True)
    drawn = list(itertools.islice(Batches(batches, seed=0).starting_at(0), 10))
    first, second = torch.cat(drawn[:5]), torch.cat(drawn[5:])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(40))
    assert first.tolist() != second.tolist()
    other = torch.cat(list(itertools.islice(Batches(batches, seed=1).starting_at(0), 5)))
    assert other.tolist() != first.tolist()


def test_samplers_are_told_the_epoch():
    sampler = torch.utils.data.DistributedSampler(range(40), num_replicas=1, rank=0, shuffle=True)
    batches = DataLoader(torch.arange(40), batch_size=8, sampler=sampler)
    list(itertools.islice(Batches(batches, seed=0).starting_at(5), 6))
    assert sampler.epoch == 2


def test_no_batch_is_drawn_past_the_end(step):
    drawn = []

    def batches(position):
        for number in itertools.count(position):
            drawn.append(number)
            yield DATA[:8]

    ts.fit(step, None, batches, steps=3, prefetch=2, progress=False)
    assert drawn == [0, 1, 2]


def test_loader_that_raises_loses_nothing(step, tmp_path):
    def batches(position):
        for n in range(position, 20):
            if n == 5:
                raise OSError("the disk with the data is gone")
            yield DATA[:8]

    with pytest.raises(OSError, match="the disk with the data is gone") as found:
        run(step, batches, tmp_path)
    assert "after 5 of 12 batches" in "".join(found.value.__notes__)
    assert ts.Checkpointer(tmp_path / "checkpoints").steps() == [3, 5]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (iter([DATA[:8]] * 3), "the loader ended before the run did"),
        (lambda position: [DATA[:8]] * 2, "the loader ended before the run did"),
    ],
    ids=["iterator", "function"],
)
def test_loader_that_does_not_do(batches, message, step):
    with pytest.raises(ValueError, match=message):
        ts.fit(step, None, batches, steps=6, progress=False)


def test_iterator_cannot_be_resumed(step):
    state = ts.fit(step, None, loader(), steps=2, progress=False)
    with pytest.raises(ValueError, match="the state has seen 2 batches, and an iterator cannot be brought to where"):
        ts.fit(step, state, iter(loader()), steps=4, progress=False)
