"""Activations stay split as the batch is, where weights are split over its axes too: shapes in the compiled program."""

import re

import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import mean_square, step_of
from tests.train.test_pipeline import Block

WIDTH, ROWS, LENGTH = 16, 32, 24


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(WIDTH) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Flatten(0, 1), nn.Linear(WIDTH, 8))


PLAN = ts.ShardingPlan({"*.up.weight": P("model", "batch"), "*.down.weight": P("batch", "model")}, default=P())


def test_constraints_are_on_the_rows_of_every_product_also_in_loops_and_no_device_has_all_rows() -> None:
    step = step_of(build(), plan=PLAN)
    lowered = step.lower(step.structs, torch.empty(ROWS, LENGTH, WIDTH))
    compiled = lowered.compile().as_text() or ""
    assert re.search(rf"f32\[{ROWS // 4},{LENGTH},", compiled)
    assert not re.search(rf"f32\[{ROWS},{LENGTH},", compiled)
    text = lowered.as_text()
    found = re.findall(r'sharding_constraint.*?\[\{"batch"\}(?:, \{\?\})+\]', text)
    bodies = [loop.num_iterations for loop in step.programs[0].loops]
    assert bodies == [3, 3]
    assert len(found) >= 8  # each layer's two products and its sum, forward and backward, and the last layer


def test_where_weights_are_not_split_over_the_batch_nothing_is_constrained() -> None:
    tensor_parallel = ts.ShardingPlan({"*.up.weight": P("model"), "*.down.weight": P(None, "model")}, default=P())
    for plan, on in ((tensor_parallel, True), (PLAN, False)):
        step = step_of(build(), plan=plan, split_activations=on)
        text = step.lower(step.structs, torch.empty(ROWS, LENGTH, WIDTH)).as_text()
        assert '[{"batch"}, {?}' not in text


def test_no_number_changes() -> None:
    options = {"plan": PLAN, "remat": "block", "accumulate_steps": 2}
    close = {"rtol": 2e-5, "atol": 2e-6}  # sums of some hundred terms in float32
    agrees_with_torch(build(), mean_square, [torch.randn(ROWS, LENGTH, WIDTH)], **options, **close)
