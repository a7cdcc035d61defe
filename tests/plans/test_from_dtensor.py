"""Plans of DTensor, in and out: shards and outputs are those of torch.distributed itself."""

# ruff: noqa: E501

import logging

import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import torch_shard as ts
from tests.oracles.dtensor import make_model, parallelize, tokens
from tests.oracles.steps import step_of

MESH = ts.make_mesh(batch=4, model=2)

SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
EMBEDDING = {"embed": ColwiseParallel(output_layouts=Replicate()), "head": RowwiseParallel(input_layouts=Replicate())}
PREPARED = {
    "layers.0": PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        use_local_input=True,
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    ),
    "layers.0.norm": SequenceParallel(),
    "layers.0.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.0.down": RowwiseParallel(output_layouts=Shard(1)),
    "layers.1.up": PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
    ),
    "layers.1": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
}
SLOW = pytest.mark.slow


def places(plan):
    """Constraints by place, whatever globs say them."""
    return {str(c.place): c.spec for c in plan.resolve(make_model(), MESH).activations}


def specs(plan, model, mesh=MESH):
    return {name: tuple(sharding.spec) for name, sharding in plan.resolve(model, mesh).items()}


@pytest.mark.parametrize(
    "styles",
    [
        pytest.param(SEQUENCE, id="sequence"),
        pytest.param(EMBEDDING, id="embedding", marks=SLOW),
        pytest.param(PREPARED, id="prepared", marks=SLOW),
    ],
)
def test_shards_and_outputs_are_those_of_parallelize_module(styles, tmp_path):
    model, mesh = make_model(), ts.make_mesh(batch=1, model=2)
    plan = ts.plans.from_dtensor(model, mesh, styles)
    ranks = parallelize(styles, tmp_path)
    step = step_of(model, mesh=mesh, plan=plan)
    expected = model(tokens())
    state = step.init()
    for name, array in state.params.items():
        for shard in array.addressable_shards:
            theirs = ranks[list(mesh.devices.flat).index(shard.device)][name]
            np.testing.assert_array_equal(np.asarray(shard.data), theirs.numpy(), name)
    torch.testing.assert_close(ranks[0]["output"], expected)
    _, metrics = step(state, tokens())
    np.testing.assert_allclose(metrics["loss"], ranks[0]["output"].square().mean(), rtol=1e-6)  # sums in another order


def test_layouts_are_constraints_where_they_are_enforced():
    stream, whole, inner = P("batch", "model", None), P("batch", None, None), P("batch", None, "model")
    layers = {
        ":x": stream,
        "": whole,
        ".norm:input": stream,
        ".norm": stream,
        ".up:input": whole,
        ".up": inner,
        ".down:input": inner,
        ".down": stream,
    }
    styles = SEQUENCE | {
        "layers.*": PrepareModuleInputOutput(
            input_layouts=(Replicate(), None),
            desired_input_layouts=(Shard(1), None),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        )
    }
    plan = ts.plans.from_dtensor(make_model(), MESH, styles)
    expected = {f"layers.{n}{place}": spec for n in range(2) for place, spec in layers.items()}
    expected |= {"embed:input": P("batch", None), "embed": stream, "head:input": whole, "head": whole}
    assert places(plan) == expected
    assert plan.activations["layers.*.up"] == inner  # one rule for all layers
    assert plan.reasons["layers.*.up.weight"] == 'ColwiseParallel ("layers.*.up")'


@pytest.mark.parametrize(
    ("style", "options", "expected"),
    [
        (PrepareModuleInput(input_kwarg_layouts={"scale": Shard(0)}, desired_input_kwarg_layouts={"scale": Shard(-1)}), {}, {"layers.0:scale": P("batch", None, "model")}),
        (PrepareModuleInput(input_layouts=(None, Shard(0)), desired_input_layouts=(Shard(1), Shard(0))), {}, {"layers.0:scale": P(("batch", "model"), None, None)}),
        (PrepareModuleOutput(output_layouts=(Shard(0), None, Replicate()), desired_output_layouts=(Replicate(), Replicate(), Shard(2))), {}, {"layers.0:return.0": P("batch", None, None), "layers.0:return.2": P("batch", None, "model")}),
        (PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1)), {"ndim": 2}, {"layers.0": P("batch", "model")}),
        (PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1)), {"ndim": {"layers.*": 4}}, {"layers.0": P("batch", None, None, "model")}),
        (PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)), {"batch_spec": P(None, "batch")}, {"layers.0": P(None, ("batch", "model"), None)}),
    ],
)  # fmt: skip
def test_layouts_of_arguments_parts_and_ranks(style, options, expected):
    plan = ts.plans.from_dtensor(make_model(), MESH, {"layers.0": style}, **options)
    assert dict(plan.activations) == expected


class Rotated(nn.Module):
    """As attention of PyTorch's fsdp_tp_example.py: it takes a table of rotations, of rank 2, beside the stream."""

    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x, table):
        turned = torch.view_as_complex(self.wq(x).unflatten(-1, (-1, 2))) * table
        return self.wo(torch.view_as_real(turned).flatten(-2))


def test_a_whole_argument_of_another_rank_stays_as_it_is():
    torch.manual_seed(0)
    model = Rotated()
    table = torch.polar(torch.ones(6, 4), torch.arange(24.0).reshape(6, 4))  # 6 rows do not divide over batch=4
    styles = {"": PrepareModuleInput(
        input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate()),
    ), "wq": ColwiseParallel(), "wo": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    plan = ts.plans.from_dtensor(model, MESH, styles)
    assert plan.activations[":x"] == P("batch", None, None)
    assert ":table" not in plan.activations
    x = torch.randn(4, 6, 8)
    step = step_of(model, lambda m, x: m(x, table).square().mean(), plan=plan)
    wanted = model(x, table).square().mean().item()
    _, metrics = step(step.init(), x)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)  # sums in another order


def test_a_style_alone_is_for_the_model_itself():
    for styles in (ColwiseParallel(), {"": ColwiseParallel()}):
        plan = ts.plans.from_dtensor(nn.Linear(4, 8), MESH, styles, ndim=2)
        assert plan.rules == {"weight": P("model", None), "bias": P("model")}
        assert plan.activations == {":input": P("batch", None), "": P("batch", "model")}


def test_ties_have_the_split_of_the_name_that_a_style_splits():
    model = make_model()
    model.head.weight = model.embed.weight
    plan = ts.plans.from_dtensor(model, MESH, {"head": ColwiseParallel()})
    assert plan.rules["embed.weight"] == plan.rules["head.weight"] == P("model", None)


def test_storage_is_split_once_more():
    plan = ts.plans.from_dtensor(make_model(), MESH, SEQUENCE, fsdp="batch")
    assert plan.rules["layers.*.up.weight"] == P("model", "batch")
    assert plan.rules["embed.weight"] == P("model", "batch")


def test_what_does_nothing_or_stays_whole_is_listed(caplog):
    model = nn.ModuleDict({"a": nn.Linear(4, 7)})
    with caplog.at_level(logging.WARNING):
        plan = ts.plans.from_dtensor(
            model, MESH, {"a": ColwiseParallel(), "b": ColwiseParallel(), "a.c": ColwiseParallel()}
        )
    assert plan.rules == {"a.weight": P(), "a.bias": P()}
    assert "these keys match no module, and do nothing: b, a.c" in caplog.text
    assert (
        'a.weight (7, 4), 112 bytes, whole: ColwiseParallel ("a"): dim 0 = 7 is not a multiple of model=2'
        in caplog.text
    )
    with pytest.raises(
        ValueError, match=r'2 things cannot be read.\n\n  "b" matches no module.\n  "a.c" matches no module.'
    ):
        ts.plans.from_dtensor(model, MESH, {"b": ColwiseParallel(), "a.c": ColwiseParallel()}, strict=True)
    with pytest.raises(ValueError, match="2 entries do not divide over the mesh"):
        ts.plans.from_dtensor(model, MESH, {"a": ColwiseParallel()}, strict=True)


class Own(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


def test_all_that_cannot_be_read_is_said_together():
    model = make_model()
    model.head.weight = model.embed.weight
    styles = {
        "layers.0": ColwiseParallel(),
        "layers.1": Own(),
        "layers.1.up": ColwiseParallel(),
        "*.1.up": RowwiseParallel(),
        "embed": RowwiseParallel(output_layouts=Partial()),
        "head": RowwiseParallel(),
        "*.1.norm": PrepareModuleInput(
            input_layouts=(Shard(3), None, Shard(1)), desired_input_layouts=(Shard(3), None, Shard(1))
        ),
    }
    with pytest.raises(ValueError, match="10 things") as error:
        ts.plans.from_dtensor(model, MESH, styles, batch_spec=P("bach"), ndim={"nothing": 2, "embed": 0})
    lines = str(error.value).splitlines()
    assert lines[0] == "plans.from_dtensor: 10 things cannot be read."
    assert [line.strip() for line in lines[2:]] == [
        "ndim=0 must be a positive integer.",
        'ndim["nothing"] matches no module.',
        "batch_spec=P('bach') names \"bach\", which is no axis of the mesh.",
        "layers.0 ('layers.0'): ColwiseParallel is for nn.Linear and nn.Embedding, and this is a Block.",
        "layers.1 ('layers.1'): Own is a style of its own, and may do anything. Those with a meaning here are "
        "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, "
        "PrepareModuleInputOutput.",
        'layers.1.up: "layers.1.up" and "*.1.up" both split its parameters. Keep one.',
        "embed ('embed'): what it returns asks for P(sum), which is how values are before they are summed, and no way "
        "to be split.",
        "head.weight: it is tied to one of embed, which is split otherwise.",
        "layers.1.norm ('*.1.norm'): input asks for S(3), and ndim says that it has 3 dims.",
        "layers.1.norm ('*.1.norm'): its forward has no argument 2 by position, for which PrepareModuleInput has a "
        "layout.",
    ]
