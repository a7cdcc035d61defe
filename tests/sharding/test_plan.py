import copy
import dataclasses
import pickle
import re
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard._sharding.mesh import make_mesh
from torch_shard._sharding.plan import ShardingPlan

BATCH, MODEL = P("batch"), P("model")

either_source = pytest.mark.parametrize("get_source", [lambda net: net, lambda net: net.state_dict()])


class TiedNet(torch.nn.Module):
    """A tie of parameters (embed, head) and of buffers (seen), a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 8)
        self.block = torch.nn.Linear(8, 32)
        self.head = torch.nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.block.register_buffer("seen", self.seen)
        self.register_buffer("cache", torch.zeros(16, 2), persistent=False)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(batch=4, model=2)


def get_matches(rule, names) -> set[str]:
    """The names that `rule` matches, seen from outside."""
    shapes = dict.fromkeys(names, (4,))
    resolved = ShardingPlan({rule: BATCH}, default=P()).resolve(shapes, make_mesh(batch=4))
    return {name for name in names if resolved[name].spec == BATCH}


def refuse(rules, source, mesh, default=None) -> str:
    """The message of the ValueError with which a plan must refuse `source`."""
    with pytest.raises(ValueError, match=r"^ShardingPlan: ") as caught:
        ShardingPlan(rules, default=default).resolve(source, mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rule", "names", "others"),
    [
        ("a.b", ["a.b"], ["a.b.c", "x.a.b", "axb", "a"]),
        ("layers.*.q*.weight", ["layers.0.q.weight", "layers.11.qkv.weight"], ["layers.0.1.q.weight"]),
        ("a[0].*+", ["a[0].b+"], ["a0.b+", "a[0].bb"]),
        (re.compile(r"layers\.\d+\.w"), ["layers.3.w"], ["layers.3.w.x", "x.layers.3.w", "layers.a.w"]),
    ],
    ids=str,
)
def test_a_rule_matches_whole_names(rule, names, others):
    assert get_matches(rule, names + others) == set(names)


def glob_oracle(pattern: list[str], name: list[str]) -> bool:
    """Match segment by segment; Python's fnmatch does the text of one, where there is no dot to cross."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(glob_oracle(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and glob_oracle(pattern[1:], name[1:])


names = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4)

globs = st.lists(st.sampled_from(["**", "*", "a*", "*b", "*a*", "a", "ab"]), min_size=1, max_size=5)


@given(globs, st.lists(names, min_size=5, max_size=20))
def test_globs_agree_with_an_oracle(pattern, candidates):
    rule, expected = ".".join(pattern), {".".join(name) for name in candidates if glob_oracle(pattern, name)}
    # Only a rule that matches something may be resolved, so the name that all stars match empty is there.
    witness = ".".join(part.replace("*", "") or "x" for part in pattern)
    assert get_matches(rule, [witness, *map(".".join, candidates)]) == expected | {witness}


@given(names.map(".".join), st.permutations(["**", "*.**", re.compile("[ab.]+"), "exact"]))
def test_an_exact_name_beats_every_pattern_in_any_order(name, keys):
    rules = dict((name, MODEL) if key == "exact" else (key, BATCH) for key in keys)
    resolved = ShardingPlan(rules).resolve({name: (8,), "c": (8,)}, make_mesh(batch=4, model=2))
    assert (resolved[name].spec, resolved["c"].spec) == (MODEL, BATCH)


def test_patterns_may_agree_and_trailing_nones_do_not_matter(mesh):
    rules = {"**.w": P("model"), "a.*": P("model", None), re.compile("a.+"): MODEL}
    assert ShardingPlan(rules).resolve({"a.w": (8, 8)}, mesh)["a.w"].spec == MODEL


def test_patterns_that_differ_are_an_error_naming_both(mesh):
    message = refuse({"**.w": P("model"), "a.*": P(None, "model")}, {"a.w": (8, 8), "b.w": (8, 8)}, mesh)
    assert message == (
        "ShardingPlan: 1 parameter cannot be split as asked on mesh (batch=4, model=2).\n\n"
        """  a.w (8, 8): rule "**.w": P('model') and rule "a.*": P(None, 'model') give it different specs. """
        'Add a rule for "a.w" itself, or narrow the patterns.'
    )


def test_a_rule_that_matches_nothing_is_an_error_with_the_closest_name(mesh):
    rules = {"haed.weight": P(), "layer.*.bias": P(), re.compile("head.wait"): P()}
    message = refuse(rules, {"head.weight": (8,), "layers.0.bias": (8,)}, mesh, default=P())
    assert message == (
        "ShardingPlan: 3 rules match nothing.\n\n"
        '  rule "haed.weight" matches no name. The closest name is "head.weight".\n'
        '  rule "layer.*.bias" matches no name. The closest name is "layers.0.bias".\n'
        """  rule re.compile('head.wait') matches no name. The closest name is "head.weight"."""
    )
    assert refuse({"a": P()}, {}, mesh).endswith('1 rule matches nothing.\n\n  rule "a" matches no name.')


def test_a_pattern_whose_names_all_have_exact_rules_has_matched(mesh):
    assert ShardingPlan({"a": MODEL, "*": BATCH}).resolve({"a": (8,)}, mesh)["a"].spec == MODEL


def test_a_name_without_a_rule_is_an_error_unless_there_is_a_default(mesh):
    shapes = {"a": (8,), "b": (8,), "scalar": ()}
    message = refuse({"a": MODEL}, shapes, mesh)
    assert "ShardingPlan: 2 parameters cannot be split as asked" in message
    assert 'b (8,): no rule matches it. Add one, such as "b": P(), or give the plan default=P().' in message
    assert "scalar (): no rule matches it." in message
    resolved = ShardingPlan({"a": MODEL}, default=P()).resolve(shapes, mesh)
    assert resolved == {name: NamedSharding(mesh, MODEL if name == "a" else P()) for name in shapes}


def test_all_offenders_come_in_one_error_each_with_shape_rule_and_remedy(mesh):
    head, bias = "lm_head.weight", "layers.0.qkv.bias"
    rules = {
        head: P("model", None),
        bias: P("modle"),
        "*.u": P("btch"),
        "gone": P(),
        "y": P("model", "model"),
    }
    shapes = {head: (50257, 768), bias: (2304,), "x.u": (8,), "other": (7,), "y": (2,)}
    assert refuse(rules, shapes, mesh, default=BATCH) == (
        "ShardingPlan: 5 parameters cannot be split as asked on mesh (batch=4, model=2) "
        "and 1 rule matches nothing.\n\n"
        "  lm_head.weight (50257, 768): dim 0 = 50257 is not a multiple of model=2 "
        """(rule "lm_head.weight": P('model', None)). """
        "Use P(None, 'model'), pad dim 0 to 50258, or replicate it with P().\n"
        "  layers.0.qkv.bias (2304,): P('modle') names an axis that the mesh lacks. "
        "Did you mean 'model'?\n"
        """  x.u (8,): P('btch') names an axis that the mesh lacks (rule "*.u": P('btch')). """
        "Did you mean 'batch'?\n"
        "  other (7,): dim 0 = 7 is not a multiple of batch=4 (rule default: P('batch')). "
        "Pad dim 0 to 8, or replicate it with P().\n"
        "  y (2,): P('model', 'model') names 'model' more than once. Keep one: an axis splits one dim.\n"
        "  y (2,): P('model', 'model') is longer than the rank, 2 > 1. Use P('model').\n"
        """  rule "gone" matches no name. The closest name is "other"."""
    )


def test_of_many_wrong_rules_the_first_have_hints(mesh):
    shapes = {f"layers.{i}.attention.{part}.weight": (8, 8) for i in range(25) for part in "qkvo"}
    message = refuse({f"model.{name}": P() for name in shapes}, shapes, mesh, default=P())
    assert (message.count("matches no name."), message.count("The closest name is")) == (100, 20)


@pytest.mark.parametrize(
    ("rules", "default", "error", "message"),
    [
        ({re.compile(b"a"): P()}, None, TypeError, "a name, a glob or a compiled regex, got Pattern."),
        ({"a": None, "b": 1}, None, TypeError, '2 rules cannot be read.\n\n  rule "a": expected a'),
        ({}, "x", TypeError, "rule default: expected a PartitionSpec, got 'x'. To replicate, say P()."),
        ({"a": P(reduced={"x"})}, None, TypeError, "asks for a reduction. Name axes only by the dims"),
        ({"a.**b": P()}, None, ValueError, 'rule "a.**b": ** stands for whole segments. Use * within one.'),
        ({"***": P(), "a**.b": P()}, None, ValueError, "ShardingPlan: 2 rules cannot be read."),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_read_says_why(rules, default, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ShardingPlan(rules, default=default)


def test_a_plan_is_a_value(mesh):
    rules = {"a.*": P("model", None), re.compile("b"): P(("batch", "model"))}
    plan = ShardingPlan(rules, default=P())
    assert repr(plan) == (
        "ShardingPlan({'a.*': P('model', None), re.compile('b'): P(('batch', 'model'))}, default=P())"
    )
    assert repr(ShardingPlan({})) == "ShardingPlan({})"
    for same in (eval(repr(plan)), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert same == plan
        assert hash(same) == hash(plan)
    assert plan != ShardingPlan(rules)
    assert plan != ShardingPlan({**rules, "a.*": P()}, default=P())
    rules["c"] = P()
    assert "c" not in plan.rules
    with pytest.raises(TypeError, match="does not support item assignment"):
        plan.rules["c"] = P()
    with pytest.raises(dataclasses.FrozenInstanceError, match="default"):
        plan.default = None


def test_a_module_gives_parameters_then_buffers_also_on_meta(mesh):
    plan = ShardingPlan({"**.bias": MODEL, "block.weight": P(None, "model"), "cache": BATCH}, default=P())
    with torch.device("meta"):
        on_meta = plan.resolve(TiedNet(), mesh)
    assert " ".join(on_meta) == "embed.weight block.weight block.bias head.weight seen cache block.seen"
    assert on_meta == plan.resolve(TiedNet(), mesh)
    assert (on_meta["block.bias"].spec, on_meta["cache"].spec) == (MODEL, BATCH)
    message = refuse({"**.weight": P(), "**.bias": P(), "cache": P()}, TiedNet(), mesh)
    assert "seen (): no rule matches it." in message


def test_every_kind_of_shape_resolves_alike(mesh):
    plan = ShardingPlan({"a": P("batch", "model")})
    sources = [torch.zeros(8, 4), torch.zeros(8, 4, device="meta"), np.zeros((8, 4)), jax.numpy.zeros((8, 4))]
    for value in [*sources, jax.ShapeDtypeStruct((8, 4), "bfloat16"), (8, 4), [8, 4], torch.Size((8, 4))]:
        resolved = plan.resolve({"a": value}, mesh)
        assert resolved == {"a": NamedSharding(mesh, P("batch", "model"))}
        assert resolved.entries["a"].local_shape == (2, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": 3, "b": (8,), "c": {}}, "2 values cannot be read.\n\n  a: int has no shape. Give a"),
        ({"a": (8, -1)}, "a: tuple has no shape. Give a tensor, an array or a shape tuple."),
        (torch.nn.LazyLinear(4), "weight: a lazy parameter has no shape yet. Call the module"),
    ],
    ids=str,
)
def test_a_source_without_names_or_shapes_is_refused(source, message, mesh):
    with pytest.raises(TypeError, match=re.escape(message)):
        ShardingPlan({}, default=P()).resolve(source, mesh)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@either_source
def test_a_rule_for_one_name_of_a_tie_counts_for_all(name, get_source, mesh):
    resolved = ShardingPlan({name: P("model", None)}, default=P()).resolve(get_source(TiedNet()), mesh)
    assert resolved["embed.weight"] == resolved["head.weight"] == NamedSharding(mesh, P("model", None))
    assert resolved.entries["head.weight"].tied_to == "embed.weight"
    assert resolved.entries["head.weight"].rule == f'"{name}"'


@either_source
def test_names_of_a_tie_with_different_specs_are_an_error_naming_both(get_source, mesh):
    rules = {"embed.weight": P("model", None), "head.*": P(None, "model")}
    message = refuse(rules, get_source(TiedNet()), mesh, default=P())
    assert message.startswith("ShardingPlan: 1 parameter cannot be split as asked")
    assert message.endswith(
        "embed.weight (64, 8): it is tied to head.weight, and rule \"embed.weight\": P('model', None) and "
        "rule \"head.*\": P(None, 'model') give it different specs. "
        "Give both names one spec, or only one a rule."
    )


def test_a_tie_that_cannot_be_split_is_reported_once_by_the_name_that_has_the_rule(mesh):
    message = refuse({"head.weight": P("modle")}, TiedNet(), mesh, default=P())
    assert message.startswith("ShardingPlan: 1 parameter ")
    assert "\n  head.weight (64, 8): P('modle') names an axis that the mesh lacks. Did you mean" in message


def test_equal_shapes_arrays_and_views_of_one_storage_are_no_tie(mesh):
    array, rows = jax.numpy.zeros((8,)), torch.zeros(2, 8)
    for a, b in [((8,), (8,)), (array, array), (rows[0], rows[1])]:
        resolved = ShardingPlan({"a": MODEL}, default=P()).resolve({"a": a, "b": b}, mesh)
        assert (resolved["a"].spec, resolved["b"].spec) == (MODEL, P())


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)], ids=str)
def test_local_shapes_and_bytes_are_what_jax_puts_on_each_device(sizes):
    mesh = make_mesh(batch=sizes[0], model=sizes[1])
    arrays = {"a": np.ones((64, 8), "float32"), "b": np.ones((32,), "int16"), "c": np.ones((3, 5), "int8")}
    plan = ShardingPlan({"a": P("model", "batch"), "b": P(("batch", "model"))}, default=P())
    resolved = plan.resolve(arrays, mesh)
    placed = jax.device_put(arrays, dict(resolved))
    for device in mesh.devices.flat:
        shards = {name: next(s for s in x.addressable_shards if s.device == device) for name, x in placed.items()}
        assert {name: shard.data.shape for name, shard in shards.items()} == {
            name: entry.local_shape for name, entry in resolved.entries.items()
        }
        assert sum(shard.data.nbytes for shard in shards.values()) == resolved.num_bytes_per_device
    assert resolved.num_bytes == sum(array.nbytes for array in arrays.values())
    assert resolved.fraction_replicated == 15 / resolved.num_bytes


def test_bytes_count_a_tie_once():
    weight = torch.zeros(8, 4)
    entries = {"a": weight, "b": weight, "c": torch.zeros(2)}
    resolved = ShardingPlan({"a": P("batch"), "c": P()}).resolve(entries, make_mesh(batch=4))
    assert (resolved.num_bytes, resolved.num_bytes_per_device, resolved.fraction_replicated) == (
        136,
        40,
        8 / 136,
    )
    assert ShardingPlan({}).resolve({}, make_mesh(batch=4)).fraction_replicated == 0


def read_rows(table: str) -> dict[str, list[str]]:
    rows = (re.split(r"\s*[│┃]\s*", line)[1:-1] for line in table.splitlines())
    return {row[0]: row[1:] for row in rows if row}


def test_a_resolved_plan_prints_as_a_table_with_nothing_cut():
    long = "layers." * 40 + "weight"
    bfloat16 = jax.ShapeDtypeStruct((8, 500), "bfloat16")
    shapes = {long: bfloat16, "b": torch.zeros(3, 5), "c": np.zeros(2, "int8")}
    rules = {re.compile("[l][a-z.]*"): P(("batch", "model"), None), "c": P("model")}
    table = str(ShardingPlan(rules, default=P()).resolve(shapes, make_mesh(batch=4, model=2)))
    rule = "re.compile('[l][a-z.]*')"  # no rich markup, so the brackets stay
    assert read_rows(table) == {
        "name": ["shape", "dtype", "rule", "spec", "local shape", "bytes per device"],
        long: ["(8, 500)", "bfloat16", rule, "P(('batch', 'model'), None)", "(1, 500)", "1.0 kB"],
        "b": ["(3, 5)", "float32", "default", "P()", "(3, 5)", "60 bytes"],
        "c": ["(2,)", "int8", '"c"', "P('model')", "(1,)", "1 byte"],
    }
    assert table.splitlines()[0].strip() == "ShardingPlan on mesh (batch=4, model=2)"
    assert table.splitlines()[-1].strip() == "total 8.1 kB, per device 1.1 kB, replicated 0.7%"


def test_the_table_says_where_a_tie_lies_and_admits_unknown_bytes():
    weight = torch.zeros(8)
    plan = ShardingPlan({"a": P("batch"), "c": P()})
    resolved = plan.resolve({"a": weight, "b": weight, "c": (8,)}, make_mesh(batch=4))
    rows = read_rows(str(resolved))
    assert rows["b"] == ["(8,)", "float32", '"a"', "P('batch')", "(2,)", "in a"]
    assert rows["c"] == ["(8,)", "-", '"c"', "P()", "(8,)", "-"]
    assert (resolved.num_bytes, resolved.num_bytes_per_device, resolved.fraction_replicated) == (None,) * 3
    assert str(resolved).splitlines()[-1].strip() == "total -, per device -, replicated -"


def test_a_resolved_plan_is_a_mapping_that_cannot_change():
    mesh = make_mesh(batch=4, model=2)
    resolved = ShardingPlan({"a": P("model")}).resolve({"a": (8,)}, mesh)
    assert dict(resolved) == {"a": NamedSharding(mesh, P("model"))}
    assert repr(resolved) == "ResolvedPlan(num_names=1, mesh=(batch=4, model=2))"
    with pytest.raises(TypeError, match="does not support item assignment"):
        resolved["a"] = None
    with pytest.raises(TypeError, match="does not support item assignment"):
        resolved.entries["a"] = None


EDITED = {"layers.0.weight": (8, 8), "layers.1.weight": (8, 8), "head.weight": (8, 8)}


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        ({"head.weight": P()}, [P("model"), P("model"), P()]),
        ({"layers.*.weight": P("batch")}, [P("batch"), P("batch"), P(None, "model")]),
        ({"**": P()}, [P(), P(), P()]),
        (ShardingPlan({"layers.0.weight": P()}, default=P("batch")), [P(), P("model"), P(None, "model")]),
    ],
)
def test_an_edit_counts_before_what_it_edits(edit, wanted):
    plan = ShardingPlan({"layers.*.weight": P("model"), "head.weight": P(None, "model")}) | edit
    resolved = plan.resolve(EDITED, make_mesh(batch=4, model=2))
    assert [resolved[name].spec for name in EDITED] == wanted


def test_edits_of_edits_count_in_their_order_and_survive_a_pickle():
    base = ShardingPlan({"**": P("model")}, reasons={"**": "first"})
    whole = base | {"layers.**": P("batch")} | (ShardingPlan({"**": P()}) | {"layers.0.*": P("batch", "model")})
    for plan in (whole, pickle.loads(pickle.dumps(whole))):
        resolved = plan.resolve(EDITED, make_mesh(batch=4, model=2))
        assert [resolved[name].spec for name in EDITED] == [P("batch", "model"), P(), P()]


def test_edits_of_activations_count_before_what_they_edit():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plan = ShardingPlan({}, default=P(), activations={"*": P("batch"), "1": P("batch", "model")})
    edited = plan | ShardingPlan({}, activations={"**": P()})
    found = edited.resolve(model, make_mesh(batch=4, model=2)).activations
    assert {str(asked.place): asked.spec for asked in found} == {"0": P(), "1": P()}


def test_an_edit_is_a_plan_or_rules():
    with pytest.raises(TypeError, match="unsupported operand"):
        ShardingPlan({}) | "head"
    with pytest.raises(TypeError, match="expected a PartitionSpec"):
        ShardingPlan({}) | {"head.weight": "model"}


def test_reasons_are_shown_where_a_plan_has_them():
    plan = ShardingPlan({"layers.*.weight": P("model")}, default=P(), reasons={"layers.*.weight": "by hand"})
    resolved = plan.resolve(EDITED, make_mesh(batch=4, model=2))
    assert resolved.entries["layers.0.weight"].reason == "by hand"
    assert "by hand" in str(resolved)
    assert "by hand" in str(plan)
    assert "by hand" not in str((plan | {"layers.*.weight": P()}).resolve(EDITED, make_mesh(batch=4, model=2)))


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
def test_a_plan_may_be_a_function_of_model_and_mesh(sizes: tuple[int, int], tmp_path: Path) -> None:
    """One line serves all meshes: the plan is what the function makes for the mesh that is given."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    model, mesh = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        ts.make_mesh(batch=sizes[0], model=sizes[1]),
    )
    plan = ts.plans.fsdp_tp(model, mesh)
    options = {"mesh": mesh, "plan": ts.plans.fsdp_tp}
    specs = {name: sharding.spec for name, sharding in plan.resolve(model, mesh).items()}

    train = ts.make_train_step(model, loss_fn, optax.sgd(0.1), **options)
    for step in (train, ts.make_eval_step(model, loss_fn, **options), ts.make_apply(model, **options)):
        assert {name: sharding.spec for name, sharding in step.plan.items()} == specs

    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for placed in (
        ts.load_torch(tmp_path / "weights.pt", copy.deepcopy(model), mesh, ts.plans.fsdp_tp),
        ts.place(copy.deepcopy(model), mesh, ts.plans.fsdp_tp),
    ):
        assert {name: p.jax().sharding.spec for name, p in placed.named_parameters()} == specs
