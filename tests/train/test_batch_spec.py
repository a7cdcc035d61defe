"""Leaves of a batch that are split in other ways than its rows, or not at all (`batch_spec` by name)."""

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import step_of

PLAN = ts.ShardingPlan({"0.weight": P("model")}, default=P())


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(seed):
    """As DETR has it: of each image another number of boxes."""
    generator = torch.Generator().manual_seed(seed)
    boxes = [torch.rand(n, 4, generator=generator) for n in (1, 3, 2, 5, 1, 4, 2, 3)]
    return {"images": torch.randn(8, 6, generator=generator), "targets": [{"boxes": each} for each in boxes]}


def loss_fn(net, batch):
    found = net(batch["images"])
    return torch.stack([
        (row - target["boxes"]).square().sum(1).min() for row, target in zip(found, batch["targets"], strict=True)
    ]).mean()  # fmt: skip


def make(spec, **options):
    return step_of(model(), loss_fn, plan=PLAN, batch_spec=spec, **options)


def test_ragged_targets_train_as_in_torch():
    options = {"plan": PLAN, "batch_spec": {"targets.**": P()}, "atol": 1e-6}
    step = agrees_with_torch(model(), loss_fn, list(map(batch, range(3))), **options)
    state = step.init(seed=0)
    for each in (step, make({"targets.*.boxes": P()})):
        placed = each.put(batch(0))
        assert placed.arrays[0].sharding.spec == P("batch")
        assert all(array.sharding.is_fully_replicated for array in placed.arrays[1:])
    assert float(step.evaluation()(state, batch(0))["loss"]) > 0
    step.prove(state, batch(1)).raise_if_different()


def test_without_it_the_error_names_the_leaves():
    step = make(None)
    words = r"""(?s)batch\['targets'\]\[0\]\['boxes'\] \(1, 4\).*batch_spec={"targets.0.boxes": P\(\)}.*targets.\*\*"""
    with pytest.raises(ValueError, match=words):
        step(step.init(seed=0), batch(0))


def test_a_name_that_finds_none_is_refused():
    step = make({"boxes.*": P()})
    with pytest.raises(ValueError, match=r"batch_spec has 'boxes\.\*', which is no leaf of the batch: it has images"):
        step(step.init(seed=0), batch(0))


@pytest.mark.parametrize(
    ("spec", "options", "error", "says"),
    [
        ({"targets.**": P()}, {"accumulate_steps": 2}, NotImplementedError, "batch_spec by name is for batches"),
        ({"targets.**": P()}, {"local_batches": True}, NotImplementedError, "batch_spec by name is for batches"),
        ({"targets.**": "batch"}, {}, TypeError, r"batch_spec\['targets\.\*\*'\] must be a P, got str"),
        ({"targets.**": P("rows")}, {}, ValueError, "batch_spec on mesh"),
    ],
)
def test_bad_specs_are_refused(spec, options, error, says):
    with pytest.raises(error, match=says):
        make(spec, **options)
