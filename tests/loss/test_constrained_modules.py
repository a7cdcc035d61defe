"""What modules take and return, split as a plan asks: forward and backward, in loops, and no number changes."""

import dataclasses
import re
from typing import Any, NamedTuple

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import sgd_step
from tests.tables.cases import make_mesh

ROWS, LENGTH, WIDTH = 8, 6, 16
SPEC = P("batch", "model", None)


class Pair(NamedTuple):
    stream: torch.Tensor
    seen: dict[str, torch.Tensor]


@dataclasses.dataclass
class Scales:
    first: torch.Tensor
    unused: None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor, *, scales: Scales | None = None, **others: torch.Tensor) -> Pair:
        inner = F.gelu(self.up(self.norm(x) + others["shift"]))
        return Pair(x + self.down(inner) * (1 if scales is None else scales.first), {"inner": inner})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scales=Scales(x.sigmoid()), shift=x.mean(1, keepdim=True)).stream
        return self.head(x)


PLACES = {
    "blocks.*:return.stream": SPEC,
    "blocks.*:return.seen.inner": P("batch", None, "model"),
    "blocks.*:scales.first": SPEC,
    "blocks.*:shift": P("batch", None, P.UNCONSTRAINED),
    "blocks.*.up:input": P("batch"),
    "head:input": SPEC,
}


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def make_step(activations: dict[str, P], **options: Any) -> ts.TrainStep:
    torch.manual_seed(0)
    rules = {"**.up.weight": P("model", "batch"), "**.down.weight": P("batch", "model")}
    plan = ts.ShardingPlan(rules, default=P(), activations=activations)
    return sgd_step(Net(), mean_square, (4, 2), plan=plan, **options)


def inputs(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def test_no_number_changes() -> None:
    step = make_step(PLACES, remat="block", accumulate_steps=2)
    step.prove(step.init(), inputs(16)).raise_if_different()  # against eager torch
    assert step.programs[0].loops


def constraints(step: ts.TrainStep) -> list[str]:
    text = step.lower(step.structs, inputs()).as_text()
    return re.findall(r"sdy\.sharding_constraint .*?<@mesh\w*, (\[.*?\])>", text)


def test_a_tensor_and_its_gradient_are_split() -> None:
    """Once in the loop forward and, of the gradient, once backward, where `block` makes inputs of products again."""
    # What nobody uses is split nowhere, and what else the program has is not split so.
    counts = {"blocks.*.up:input": 3, "blocks.*:scales.first": 3, "head:input": 2, "blocks.*:return.seen.inner": 0}
    for place, count in counts.items():
        found = constraints(make_step({place: SPEC}, remat="block", split_activations=False))
        assert found.count('[{"batch"}, {"model"}, {}]') == count, place


def test_the_gradient_of_a_row_layer_is_gathered_once() -> None:
    """For both products of its backward pass, where its matrix is split over the axis of the sequence."""
    row_layer, whole_matrix = (make_step({place: SPEC}, split_activations=False) for place in ("blocks.*.down", "stem"))
    for step, num in ((row_layer, 1), (whole_matrix, 0)):
        found = constraints(step)
        assert found.count('[{"batch"}, {"model"}, {}]') == 2
        assert found.count('[{"batch"}, {}, {}]') == num
    row_layer.prove(row_layer.init(), inputs(16)).raise_if_different()


def test_what_does_not_fit_is_one_error_before_anything_runs() -> None:
    wrong = {
        "blocks.0:return": SPEC,
        "blocks.0:return.seen.outer": SPEC,
        "blocks.0:shift": P("batch", "model"),
        "blocks.1.up": P(None, "batch"),
        "blocks.2.up": P(None, None, None, "model"),
    }
    step = make_step(wrong)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^make_train_step: activations cannot be split as asked") as caught:
        step(step.init(), inputs())
    text = str(caught.value)
    for line in (
        "blocks.0: found Pair, which is not a tensor. Name one of its tensors by the way to it, "
        'as in "blocks.0:return.0".',
        "blocks.0:return.seen.outer: dict has no part 'outer'.",
        "blocks.0:shift (8, 1, 16): dim 1 = 1 is not a multiple of model=2",
        "blocks.1.up (8, 6, 24): dim 1 = 6 is not a multiple of batch=4",
        "blocks.2.up (8, 6, 24): P(None, None, None, 'model') is longer than the rank, 4 > 3",
    ):
        assert f"  {line}" in text, text
    assert all(torch.equal(before[name], value.cpu()) for name, value in step.model.state_dict().items())
    assert all("forward" not in vars(module) for module in step.model.modules())


def test_axes_that_move_are_refused_on_three_axes() -> None:
    mesh = ts.make_mesh(batch=2, model=2, extra=2)
    asked = {"0": P(None, "model", "extra"), "1": P("batch", ("model", "extra"))}
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))

    def make(activations: dict[str, P]) -> ts.TrainStep:
        plan = ts.ShardingPlan({}, default=P(), activations=activations)
        return ts.make_train_step(model, mean_square, optax.sgd(0.1), mesh=mesh, plan=plan)

    with pytest.raises(NotImplementedError, match="Give each axis one dim") as caught:
        make(asked)
    assert (
        "axis \"extra\" is in dim 2 of 0 P(None, 'model', 'extra') and 1 of 1 P('batch', ('model', 'extra'))."
        in str(caught.value)
    )
    for fine in ({"0": asked["0"], "1": P("batch", "model")}, {"0": P(None, "model"), "1": P(None, None, "model")}):
        make(fine)


def test_a_rule_that_meets_nothing_is_an_error_in_training_alone() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2).requires_grad_(False)

    plan = ts.ShardingPlan({}, default=P(), activations={"spare": P()})
    options: dict[str, Any] = {"mesh": make_mesh((4, 2)), "plan": plan}
    model = Spare()
    with torch.no_grad():
        wanted = mean_square(model, inputs())
    step = ts.make_train_step(model, mean_square, optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="rule 'spare': none of its modules ran, or none had a tensor there"):
        step(step.init(), inputs())
    evaluate = ts.make_eval_step(model, mean_square, **options)
    found = evaluate(step.init(), inputs())["loss"]
    torch.testing.assert_close(torch.tensor(float(found)), wanted, rtol=1e-5, atol=0)


def test_a_forward_that_calls_that_of_its_base_class_is_one_module() -> None:
    class Base(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    class Own(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    torch.manual_seed(0)
    model = nn.Sequential(Own(WIDTH, WIDTH), Base(WIDTH, 4))
    plan = ts.ShardingPlan({}, default=P(), activations={"0:x": SPEC, "0": SPEC, "1:input": SPEC})
    step = sgd_step(model, mean_square, (4, 2), plan=plan)
    step.prove(step.init(), inputs()).raise_if_different()
