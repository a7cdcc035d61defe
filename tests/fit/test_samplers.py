"""Samplers that shard the data otherwise than the mesh shards the batch."""

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.tables.host_data import make_step
from tests.tables.runs import DATA
from torch_shard._device import HostRows
from torch_shard._fit.data import check_samplers

MESH = ts.make_mesh(batch=4, model=2)


def sharded(num, rank, *, kind=DistributedSampler):
    return DataLoader(DATA, batch_size=8, sampler=kind(DATA, num_replicas=num, rank=rank))


class Other:
    """Of another library, with the names that it has from torch's."""

    def __init__(self, data, num_replicas, rank):
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


class BatchSamplerShard(BatchSampler):
    """As accelerate has it."""

    num_processes, process_index = 2, 1


@pytest.fixture
def second_of_two(monkeypatch):
    monkeypatch.setattr(HostRows, "of", classmethod(lambda cls, layout: cls(2, {0: (0,), 1: (0,), 2: (1,)}, 2, "")))


@pytest.mark.parametrize("kind", [DistributedSampler, Other])
def test_shards_are_not_whole_batches(kind):
    step = make_step(MESH)
    with refuses(f"fit: the {kind.__name__} of loader has num_replicas=2, rank=1, .* but without local_batches"):
        ts.fit(step, None, sharded(2, 1, kind=kind), steps=1)
    with refuses(r"of eval_loader has num_replicas=2.* or give fit the dataset itself, .*batch_size=\.\.\.\)\."):
        ts.fit(step, None, [DATA[:8]], steps=1, eval_loader=sharded(2, 0, kind=kind))
    check_samplers("loader", sharded(1, 0, kind=kind), step)  # has all rows
    for loader in ([DATA[:8]], DataLoader(DATA), lambda position: [DATA]):
        check_samplers("loader", loader, step)


def test_shards_of_other_libraries():
    inner = BatchSamplerShard(range(44), 8, drop_last=True)
    with refuses("the BatchSamplerShard of loader has num_processes=2, process_index=1"):
        check_samplers("loader", DataLoader(DATA, batch_sampler=inner), make_step(MESH))


def test_shards_of_rows_must_be_those_of_the_mesh(second_of_two):
    """Three processes, of which the last one has rows of its own."""
    step = make_step(MESH, local_batches=True)
    check_samplers("loader", sharded(2, 1), step)
    for num, rank in ((3, 2), (2, 0), (1, 0)):
        with refuses(f"num_replicas={num}, rank={rank}, but data_shard.mesh. is .2, 1., as devices"):
            check_samplers("loader", sharded(num, rank), step)


def test_one_process_has_no_shards():
    with refuses("num_replicas=2, rank=1, but data_shard.mesh. is .1, 0., as devices"):
        ts.fit(make_step(MESH, local_batches=True), None, sharded(2, 1), steps=1)
