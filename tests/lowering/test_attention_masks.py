"""Which keys a comparison of constants lets each query see: against the comparison itself."""

import operator
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from torch_shard._lowering.ops.attention_masks import interval_of

COMPARISONS = {"le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "eq": operator.eq}
NUMBERS = st.lists(st.integers(-3, 6), min_size=2, max_size=6)


def found(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The mask of the interval, of (rows, T, S)."""
    graph, values = Graph(), dict[Node, torch.Tensor]()
    for value in (left, right):
        node = graph.placeholder("x")
        node.meta["val"] = values[node] = value
    part = graph.call_function(getattr(torch.ops.aten, name).Tensor, tuple(values))
    part.meta["val"] = wanted = COMPARISONS[name](left, right)
    interval = interval_of(part, values.get, (wanted.shape[-2], wanted.shape[-1]))
    if interval is None:
        return None
    low, high = interval
    places = torch.arange(wanted.shape[-1])
    return (places >= low[..., None]) & (places < high[..., None])


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("keys_first", [True, False])
@given(keys=NUMBERS, queries=NUMBERS)
@settings(max_examples=25, deadline=None)
def test_an_interval_is_what_the_comparison_lets_through(
    name: str, keys_first: bool, keys: list[int], queries: list[int]
) -> None:
    k, q = torch.tensor(keys).sort().values[None, :], torch.tensor(queries)[:, None]
    sides = (k, q) if keys_first else (q, k)
    mask = found(name, *sides)
    assert mask is not None
    assert torch.equal(mask.expand(1, -1, -1)[0], COMPARISONS[name](*sides))


def test_keys_that_are_not_in_order_are_no_interval() -> None:
    assert found("le", torch.tensor([[1, 0, 2]]), torch.tensor([[0], [1]])) is None


def test_rows_that_are_not_compared_alike_are_left() -> None:
    keys, queries = torch.arange(4).expand(3, 1, 4) + torch.arange(3)[:, None, None], torch.arange(8).view(2, 1, 4, 1)
    assert found("le", keys, queries.expand(2, 3, 4, 1) + torch.arange(3)[:, None, None]) is None


@given(mask=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_mask_is_an_interval_where_no_row_has_a_hole(mask: list[list[bool]]) -> None:
    graph, value = Graph(), torch.tensor(mask)
    part = graph.call_function(torch.ops.aten.logical_not.default, (graph.placeholder("x"),))
    part.meta["val"] = value
    interval = interval_of(part, {part: value}.get, (len(mask), 4))
    runs = [re.findall("1+", "".join("01"[sees] for sees in row)) for row in mask]
    if any(len(run) != 1 for run in runs):
        assert interval is None
        return
    assert interval is not None
    places = torch.arange(4)
    assert torch.equal((places >= interval[0][..., None]) & (places < interval[1][..., None]), value[None])
