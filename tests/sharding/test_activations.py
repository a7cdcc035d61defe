"""Rules for what modules take and return: which places they mean, and what is wrong with them, all in one error."""

import copy
import pickle
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

SPEC, OTHER = P("batch", "model"), P("batch")


class Attention(nn.Module):
    def forward(self, hidden: Any, mask: Any = None, **others: Any) -> Any:
        return hidden, mask


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.up = Attention(), nn.Linear(4, 4)


def build() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(4, 4)})


def resolve(activations: dict[str, P], model: nn.Module | None = None) -> ts.ShardingPlan | Any:
    plan = ts.ShardingPlan({}, default=P(), activations=activations)
    return plan.resolve(model or build(), ts.make_mesh(batch=4, model=2))


def places(activations: dict[str, P], model: nn.Module | None = None) -> dict[str, P]:
    return {str(asked.place): asked.spec for asked in resolve(activations, model).activations}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.0:return.1", ["layers.0:return.1"]),
        ("head:input", ["head:input"]),
        ("**.attn:mask.a.0", ["layers.0.attn:mask.a.0", "layers.1.attn:mask.a.0"]),
        ("layers.*.attn:cache", ["layers.0.attn:cache", "layers.1.attn:cache"]),  # **others may have it
        ("", [""]),
    ],
)
def test_a_rule_names_what_modules_take_and_return(rule: str, expected: list[str]) -> None:
    assert places({rule: SPEC}) == dict.fromkeys(expected, SPEC)


def test_an_exact_name_beats_a_glob() -> None:
    assert places({"layers.*": SPEC, "layers.1": OTHER}) == {"layers.0": SPEC, "layers.1": OTHER}


def test_a_module_under_two_names_is_one_place() -> None:
    model = build()
    model["tail"] = model["head"]  # pyright: ignore[reportIndexIssue]
    assert places({"tail": SPEC}, model) == {"head": SPEC}
    assert places({"*": SPEC}, model) == {"layers": SPEC, "head": SPEC}


def test_all_that_is_wrong_is_one_error() -> None:
    wrong = {
        "laiers.*": SPEC,
        "head:x": SPEC,
        "layers.0.up": P("modle"),
        "layers.*.up:input": P("batch"),
        "layers.1.*:input": P("model"),
    }
    with pytest.raises(ValueError, match=r"^ShardingPlan: 4 rules of activations cannot be followed\.") as caught:
        resolve(wrong)
    assert str(caught.value).splitlines()[2:] == [
        '  activations rule "laiers.*" matches no module. The closest name is "layers.1".',
        "  activations rule \"layers.0.up\": P('modle') names an axis that the mesh lacks. Did you mean 'model'?",
        '  activations rule "head:x": forward of head (Linear) has no argument x; it takes input.',
        "  activations rules \"layers.*.up:input\": P('batch') and \"layers.1.*:input\": P('model') give "
        'layers.1.up:input different specs. Add a rule for "layers.1.up:input" itself.',
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], r"ShardingPlan: activations must map names to specs, got list\."),
        ({1: SPEC}, r"activations rule 1: a rule is a name or a glob of modules, got int\."),
        ({"head": "model"}, r"activations rule \"head\": expected a PartitionSpec, got 'model'\."),
        ({"head:": SPEC}, r"activations rule \"head:\": after the name of a module come a colon and"),
        ({"head:return..0": SPEC}, "after the name of a module come a colon and"),
        ({"head:0": SPEC}, "after the name of a module come a colon and"),
    ],
)
def test_a_rule_that_cannot_be_read(rules: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ts.ShardingPlan({}, default=P(), activations=rules)


def test_a_plan_is_a_value_with_its_activations() -> None:
    plan = ts.ShardingPlan({}, default=P(), activations={"head": SPEC})
    assert plan == pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan)
    assert plan != ts.ShardingPlan({}, default=P())
    assert len({plan, copy.copy(plan), ts.ShardingPlan({}, default=P())}) == 2
    assert repr(plan) == "ShardingPlan({}, default=P(), activations={'head': P('batch', 'model')})"
    assert '"head"' in str(plan.resolve(build(), ts.make_mesh(batch=4, model=2)))
