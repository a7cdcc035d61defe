"""Few rules say what many decisions said."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.tables.cases import make_mesh
from torch_shard._plans.decisions import Decision, add_axis, plan_of, with_globs

SPECS = [P(), P("batch"), P("model"), P(None, "model"), P("batch", "model")]
WORDS = st.sampled_from(["0", "1", "2", "10", "a", "b", "layers", "w"])
NAMES = st.lists(st.lists(WORDS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True)


class Holder(torch.nn.Module):
    """Entries of these names."""

    def __init__(self, names: list[tuple[str, ...]]) -> None:
        super().__init__()
        for path in names:
            module = self
            for word in path:
                if word not in module._modules:
                    module.add_module(word, torch.nn.Module())
                module = module._modules[word]
            module.weight = torch.nn.Parameter(torch.zeros(8, 8))


@given(NAMES, st.data())
def test_a_plan_says_what_was_decided(names, data) -> None:
    model, mesh = Holder(names), make_mesh((4, 2))
    decisions = {
        name: Decision(data.draw(st.sampled_from(SPECS)), data.draw(st.sampled_from(["one", "other"])))
        for name, _ in model.named_parameters()
    }
    resolved = plan_of(model, decisions).resolve(model, mesh)
    assert {n: resolved[n].spec for n in decisions} == {n: d.spec for n, d in decisions.items()}
    assert {n: e.reason for n, e in resolved.entries.items()} == {n: d.reason for n, d in decisions.items()}


def test_layers_that_are_alike_take_one_rule() -> None:
    values = {f"layers.{n}.w": 0 for n in range(12)} | {"head.w": 1, "blocks.0.w": 2, "blocks.1.w": 3}
    assert with_globs(values, values) == {"layers.*.w": 0, "head.w": 1, "blocks.0.w": 2, "blocks.1.w": 3}
    assert "layers.*.w" not in with_globs(values, [*values, "layers.12.w"])


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=3),
    st.sampled_from([P(), P("model"), P(None, "model")]),
    st.sampled_from(["batch", ("batch",)]),
)
def test_an_axis_is_added_where_a_dim_divides(shape, spec, axes) -> None:
    mesh = make_mesh((4, 2))
    spec = P(*spec[: len(shape)])
    found = add_axis(spec, shape, axes, mesh)
    sizes = [mesh.shape["model"] if part == "model" else 1 for part in (*spec, *[None] * len(shape))][: len(shape)]
    fits = [size % (4 * held) == 0 for size, held in zip(shape, sizes, strict=True)]
    assert (found is not None) == any(fits)
    if found is not None:
        parts = [part if isinstance(part, tuple) else (part,) for part in found]
        assert sum("batch" in part for part in parts) == 1
        assert [("model" in part) for part in parts[: len(spec)]] == [part == "model" for part in spec]
