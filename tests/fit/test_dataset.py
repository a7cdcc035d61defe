"""Rows of a dataset: in one order for any number of processes, from any position, each read where it is needed."""

import itertools
import random

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import Dataset, Subset, default_collate

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.runs import DATA, ROWS, run, values
from torch_shard._device import HostRows
from torch_shard._fit.dataset import EvaluationRows, Rows, TrainingRows, _reader, order_of

SIZE = 8  # five batches of an epoch, and one that has four rows and four of the first


class Noisy(Dataset):
    """Each row is its index, and what all kinds of generators draw for it."""

    def __init__(self):
        self.rng, self.generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.read = []

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.read.append(index)
        drawn = [
            random.random(),
            np.random.rand(),
            self.rng.random(),
            torch.rand(()),
            torch.rand((), generator=self.generator),
        ]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Many(Dataset):
    """Reads many rows at once."""

    def __len__(self):
        return ROWS

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


def test_rows_of_tokenizers_train_with_the_collator_that_the_error_names():
    rows = [{"input_ids": [n, n + 1, n + 2], "label": n % 2} for n in range(16)]
    model, seen = torch.nn.Embedding(32, 2), []

    def loss_fn(model, batch):
        seen.append(batch["input_ids"].shape)
        return torch.nn.functional.cross_entropy(model(batch["input_ids"]).mean(1), batch["labels"])

    step = step_of(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = ts.Rows(rows, batch_size=8, collate_fn=transformers.default_data_collator)
    ts.fit(step, None, rows, steps=2, progress=False)
    assert {tuple(shape) for shape in seen} == {(8, 3)}
    pairs = [[torch.tensor(float(n)), n] for n in range(16)]  # a list of parts, as torch takes it
    batch = next(iter(_reader(Rows(pairs, batch_size=4), [[(0, 0), (0, 5)]], seed=0)))
    assert [part.tolist() for part in batch] == [[0.0, 5.0], [0, 5]]


@pytest.fixture
def processes(monkeypatch):
    """Lets a step believe that it has so many processes, and is in one of them."""

    def pretend(num, process, share=1):
        blocks = {
            p: tuple(range(p // share * 4 * share // num, (p // share + 1) * 4 * share // num)) for p in range(num)
        }
        monkeypatch.setattr(HostRows, "of", classmethod(lambda cls, layout: cls(4, blocks, process, "(batch=4)")))

    return pretend


def batches(rows, step, *, position=0, num=7, seed=0):
    return [given.batch for given in itertools.islice(TrainingRows(rows, step, seed=seed)(position), num)]


def test_an_epoch_has_each_row_and_another_order_than_the_next(step):
    rows = Rows(Noisy(), batch_size=4)
    first, second = (torch.cat(batches(rows, step, position=p, num=11))[:, 0] for p in (0, 11))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(ROWS))
    assert first.tolist() != second.tolist() != list(range(ROWS))
    assert first.tolist() != torch.cat(batches(rows, step, num=11, seed=1))[:, 0].tolist()
    in_order = Rows(Noisy(), batch_size=4, shuffle=False)
    assert torch.cat(batches(in_order, step, num=12))[:, 0].tolist() == [*range(ROWS), *range(4)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_of_an_epoch_is_filled_up_or_dropped(drop_last, step):
    rows = Rows(Noisy(), batch_size=SIZE, drop_last=drop_last)
    drawn = torch.cat(batches(rows, step, num=6))[:, 0].long()
    first, second = order_of(rows, 0, 0), order_of(rows, 0, 1)
    wanted = [*first[:40], *second[:8]] if drop_last else [*first, *first[:4]]
    assert drawn.tolist() == [int(index) for index in wanted]


@pytest.mark.parametrize(
    "dataset", [Noisy, Many, lambda: Subset(Noisy(), list(range(1, ROWS)))], ids=["noisy", "many", "subset"]
)
@pytest.mark.parametrize(("num", "share"), [(2, 1), (4, 2)], ids=str)
def test_processes_together_read_what_one_reads(dataset, num, share, processes, step):
    """The same rows, with the same random numbers, from any position on; processes that share rows read the same."""
    for position in (0, 5, 13):
        processes(1, 0)
        whole = batches(Rows(dataset(), batch_size=SIZE), step, position=position)
        parts = []
        for process in range(num):
            processes(num, process, share)
            parts.append(batches(Rows(dataset(), batch_size=SIZE), step, position=position))
        for number, batch in enumerate(whole):
            found = [part[number] for part in parts]
            assert torch.equal(torch.cat(found[::share]), batch)
            assert all(torch.equal(found[p], found[p // share * share]) for p in range(num))


def test_no_row_is_read_twice_or_for_others(processes, step):
    read = []
    for process in range(2):
        processes(2, process)
        dataset = Noisy()
        batches(Rows(dataset, batch_size=4), step, num=11)
        read += dataset.read
        assert len(dataset.read) == ROWS // 2
    assert sorted(read) == list(range(ROWS))


def test_workers_draw_the_same(step):
    datasets = Noisy(), Noisy()
    for dataset in datasets:
        dataset.generator = None  # torch's own cannot be given to a worker
    here, there = (
        batches(Rows(dataset, batch_size=SIZE, num_workers=n), step, num=3) for n, dataset in enumerate(datasets)
    )
    assert all(map(torch.equal, here, there))
    assert datasets[1].read == []


def test_global_generators_are_left_alone(step):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    ts.fit(step, None, Subset(Floats(), range(32)), batch_size=SIZE, steps=2, eval_loader=Floats(), progress=False)
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert torch.equal(states[2], torch.get_rng_state())


class Floats(Noisy):
    def __getitem__(self, index):
        return DATA[index] + super().__getitem__(index)[1:2].float()


def test_fit_takes_a_dataset_and_goes_on_where_it_was(step, tmp_path):
    whole = run(step, Floats(), tmp_path / "whole", batch_size=SIZE)
    run(step, Floats(), tmp_path / "parts", steps=7, batch_size=SIZE)
    again = run(step, Floats(), tmp_path / "parts", batch_size=SIZE)
    rows = Rows(Floats(), batch_size=SIZE)
    by_hand = run(step, lambda position: iter(batches(rows, step, num=12)), tmp_path / "hand")
    for name, value in values(whole).items():
        np.testing.assert_array_equal(values(again)[name], value)
        np.testing.assert_array_equal(values(by_hand)[name], value)


def test_rows_are_made_a_batch_by_the_given_function(step):
    def collate(rows):
        return default_collate(rows) + 1

    (batch,) = batches(Rows(DATA, batch_size=SIZE, shuffle=False, collate_fn=collate), step, num=1)
    assert torch.equal(batch, DATA[:SIZE] + 1)


@pytest.mark.parametrize(("num", "process"), [(1, 0), (2, 1)])
def test_an_evaluation_reads_each_row_once(num, process, processes, step):
    """Batches that do not divide over the mesh are read whole by each process."""
    processes(num, process)
    dataset = Noisy()
    found = list(EvaluationRows(Rows(dataset, batch_size=10, shuffle=False), step))
    assert [given.local for given in found] == [False] * 4 + [True]
    assert dataset.read == [*range(40), *range(40 + 2 * process, 40 + (process + 1) * 4 // num)]
    found = list(EvaluationRows(Rows(dataset, batch_size=10, shuffle=False, drop_last=True), step))
    assert len(found) == 4


def test_the_mean_of_an_evaluation_is_that_of_all_rows(step, tmp_path):
    state = run(step, DATA, tmp_path, steps=1, batch_size=SIZE, eval_loader=ts.Rows(DATA, batch_size=16))
    model = step.export(state).eval()
    (record,) = [r for r in ts._fit.read_metrics(tmp_path / "log" / "metrics.jsonl") if r["kind"] == "eval"]
    assert record["loss"] == pytest.approx(model(DATA).square().mean().item(), rel=1e-5)
