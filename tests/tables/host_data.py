"""A step and the rows that each of several processes gives it or reads, and what each checks."""

import contextlib
import json
import logging

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import torch_shard as ts
from torch_shard._fit.dataset import order_of

ROWS, FEATURES = 16, 4

STOPS = 3, 7, 9
"""Batches after which a run goes on with another number of processes; two make an epoch."""

X = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))


def loss_fn(model, batch):
    """Weighs rows by a number of the whole batch, and gives back what it saw."""
    return model(batch["x"]).square().sum() * batch["scale"], {"x": batch["x"]}


def batch_of(x, num=ROWS):
    """These rows of a batch of so many."""
    return {"x": x, "scale": 1 / num}


def mean(model, x):
    return model(x).square().mean()


def make_step(mesh, loss_fn=loss_fn, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    plan = ts.ShardingPlan({"0.weight": P("model"), "2.weight": P(None, "model")}, default=P())
    return ts.make_train_step(model, loss_fn, optax.adam(0.1), mesh=mesh, plan=plan, **options)


def make_meshes(devices):
    """Of several processes: `batch` across them, with rows in order and not, and `model` across them."""
    num = len(devices)
    yield ts.make_mesh(devices, batch=num // 2, model=2)
    yield ts.make_mesh([*devices[::2], *devices[1::2]], batch=num, model=1)
    yield ts.make_mesh(devices, batch=num // 4, model=4)


def own_rows(mesh, rows):
    """The rows that lie on the devices of this process, by JAX's own account."""
    indices = NamedSharding(mesh, P("batch")).addressable_devices_indices_map((len(rows),)).values()
    spans = sorted({index[0].indices(len(rows))[:2] for index in indices})
    return torch.cat([rows[first:last] for first, last in spans])


def shards(tree):
    """What lies on the devices of this process."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return [np.asarray(shard.data) for array in arrays for shard in array.addressable_shards]


def values(state):
    """The parameters, whole."""
    everywhere = NamedSharding(next(iter(state.params.values())).sharding.mesh, P())
    spread = jax.jit(lambda tree: tree, out_shardings=everywhere)(dict(state.params))
    return {name: np.asarray(array) for name, array in spread.items()}


@contextlib.contextmanager
def refused(*words):
    """An error that says all of these."""
    with pytest.raises((ValueError, TypeError)) as found:
        yield
    text = "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])
    assert all(word in text for word in words), text


@contextlib.contextmanager
def logged(*words):
    """A warning that says all of these."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("torch_shard")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert any(all(word in text for word in words) for text in records), records


def train(mesh, rows, **options):
    """The values after a step, and what the loss saw."""
    step = make_step(mesh, **options)
    state, metrics = step(step.init(), step.put(batch_of(rows)))
    return step, state, np.asarray(metrics["x"])


def check_local_batches(expected):
    """A process's own rows give what the whole batch gives, bit for bit, and what one process expects of it."""
    for number, mesh in enumerate(make_meshes(jax.devices())):
        options = {"accumulate_steps": 2 - number // 2}
        step, state, seen = train(mesh, own_rows(mesh, X), local_batches=True, **options)
        _, known, wanted = train(mesh, X, **options)
        np.testing.assert_array_equal(seen, wanted)
        for mine, theirs in zip(shards(state), shards(known), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for name, value in values(state).items():  # sums of another order
            np.testing.assert_allclose(value, expected[number][name], rtol=1e-4, atol=1e-6)
        if number == 2:  # with parameters across processes
            step.prove(state, batch_of(own_rows(mesh, X))).raise_if_different()


def check_last_batch():
    """Rows that do not divide over the mesh are evaluated whole on each device, and not trained on."""
    _, mesh, *_ = make_meshes(jax.devices())
    count, index = ts.data_shard(mesh)
    step = make_step(mesh, local_batches=True)
    state = step.init()
    rows = X[: 3 * count]
    metrics = step.evaluation()(state, batch_of(rows[3 * index : 3 * index + 3], len(rows)))
    np.testing.assert_array_equal(np.asarray(metrics["x"]), rows)
    wanted = make_step(mesh).evaluation()(state, batch_of(rows, len(rows)))
    np.testing.assert_array_equal(np.asarray(metrics["loss"]), np.asarray(wanted["loss"]))
    with refused(f"batch['x'] ({3 * count}, 4): dim 0 = {3 * count} is not a multiple", "Shapes are of the whole"):
        step(state, batch_of(rows[3 * index : 3 * index + 3], len(rows)))
    lowered = step.lower(step.structs, batch_of(torch.empty(ROWS // count, FEATURES, device="meta")))
    assert f"{ROWS}x{FEATURES}xf32" in lowered.as_text()


def check_mistakes(rank):
    """Each is an error in every process, or a warning where it might be meant."""
    mesh = next(make_meshes(jax.devices()))
    count, _ = ts.data_shard(mesh)
    step = make_step(mesh, local_batches=True)
    state = step.init()
    with refused("as many as the others", f"batch['x']: ({4 * count}, 4) float32 in process 0, ({4 * count + 4}, 4)"):
        step(state, batch_of(torch.zeros(4 * (count + min(rank, 1)), 4)))
    with refused("a number in a batch is of the whole batch", "batch['scale']: 1.0 in process 0, 2.0 in process 1"):
        step(state, {"x": X, "scale": 1.0 + min(rank, 1)})
    with refused("the numbers of rows differ", "batch['w'] (2,): 2 rows"):
        step(state, {"x": X, "w": torch.ones(2), "scale": 1.0})
    with refused("make_train_step: batch['x']: it lies on devices of several processes"):
        step(state, {"x": jax.device_put(X.numpy(), NamedSharding(mesh, P())), "scale": 1.0})
    with logged("every process gave the same rows", f"{count} times"):
        step.put(batch_of(X[:8]))
    *_, shared = make_meshes(jax.devices())
    with refused("hold the same rows must give the same ones", "batch['x']: other values in process 0"):
        make_step(shared, local_batches=True).put(batch_of(X[:8] + rank))


def check_shards(rank):
    """Distinct shards of the batch are counted, not processes; those that overlap are refused."""
    devices = jax.devices()
    num, processes = len(devices), jax.process_count()
    found = [ts.data_shard(mesh) for mesh in make_meshes(devices)]
    assert found == [(processes, rank), (processes, rank), (processes // 2, rank // 2)]  # of two devices each
    mesh = ts.make_mesh(devices, batch=2, model=num // 2)
    assert ts.data_shard(mesh, P("model")) == (max(1, processes // 2), rank % max(1, processes // 2))
    assert ts.data_shard(mesh, P(("batch", "model"))) == (processes, rank)
    assert ts.data_shard(mesh, P()) == (1, 0)
    odd = ts.make_mesh(devices[: num - 1], batch=num - 1, model=1)
    with refused("data_shard: two processes must have the same rows", f"process {processes - 1}: {num - 2}"):
        ts.data_shard(odd)
    with refused("make_train_step: two processes must have the same rows"):
        make_step(odd, local_batches=True)
    alone = ts.make_mesh([d for d in devices if d.process_index == 0], batch=2, model=1)
    if rank:
        with refused(f"mesh (batch=2, model=1) has no device of process {rank}"):
            ts.data_shard(alone)
    else:
        assert ts.data_shard(alone) == (1, 0)


class Noted(Dataset):
    """Rows with noise; notes which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.read.append(index)
        return X[index] + 0.1 * torch.rand(())


def fit_dataset(mesh, dataset, directory, steps):
    step = make_step(mesh, mean)
    with ts.Checkpointer(directory, every=100) as checkpointer:
        return ts.fit(step, None, dataset, batch_size=8, steps=steps, checkpointer=checkpointer, progress=False)


def check_dataset(rank, directory):
    """Goes on where another number of processes was, and reads each row once, or where another reads it too."""
    devices, dataset = jax.devices(), Noted()
    fit_dataset(ts.make_mesh(batch=len(devices), model=1), dataset, directory / "checkpoints", STOPS[1])
    (directory / f"read{rank}").write_text(json.dumps(dataset.read))
    shared, wanted = Noted(), Noted()
    *_, mesh = make_meshes(devices)
    ts.fit(make_step(mesh, mean), None, shared, batch_size=8, steps=2, progress=False)
    count, index = ts.data_shard(mesh)
    order = order_of(ts.Rows(wanted, batch_size=8), 0, 0).view(2, count, -1)
    assert shared.read == order[:, index].flatten().tolist()


def check_evaluation(rank, directory):
    """The mean over all rows of a dataset, of which the last ones do not divide over the mesh."""
    mesh = ts.make_mesh(batch=len(jax.devices()), model=1)
    step, rows = make_step(mesh, mean), Subset(X, range(13))
    state = ts.fit(step, None, X, batch_size=8, steps=1, eval_loader=rows, log=directory / "log", progress=False)
    wanted = step.evaluation()(state, X[:13])["loss"]
    if rank == 0:
        lines = (directory / "log" / "metrics.jsonl").read_text().splitlines()
        (found,) = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "eval"]
        np.testing.assert_allclose(found, float(wanted), rtol=1e-5)  # means of batches, averaged


def check_samplers(rank):
    """A `DistributedSampler` by `data_shard` gives rows of one batch; by the number of processes it is refused."""
    mesh = ts.make_mesh(batch=len(jax.devices()) // 2, model=2)
    count, index = ts.data_shard(mesh)

    def loader(rank, num=count):
        return DataLoader(X, batch_size=8 // count, sampler=DistributedSampler(X, num_replicas=num, rank=rank))

    whole = [torch.cat(parts) for parts in zip(*map(loader, range(count)), strict=True)]
    local = ts.fit(make_step(mesh, mean, local_batches=True), None, loader(index), steps=2, progress=False)
    known = ts.fit(make_step(mesh, mean), None, whole, steps=2, progress=False)
    for mine, theirs in zip(shards(local), shards(known), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with refused("fit: the DistributedSampler of loader has num_replicas=", "but without local_batches"):
        ts.fit(make_step(mesh, mean), None, loader(index), steps=1)
    across = ts.make_mesh(batch=1, model=len(jax.devices()))
    with refused(f"num_replicas={count}, rank={index}, but data_shard(mesh) is (1, 0)"):
        ts.fit(make_step(across, mean, local_batches=True), None, loader(index), steps=1)
    with refused(
        f"len(dataset) differs between process 0 and 1 ({ROWS} and {ROWS - 4})", "Each process gives the whole"
    ):
        ts.fit(make_step(mesh, mean), None, X[: ROWS - 4 * min(rank, 1)], batch_size=8, steps=1)
