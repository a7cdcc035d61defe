"""Closed-over tensors of 64-bit floating point, of which JAX keeps 32 bits: where that loses digits."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_shard._capture import Captured
from torch_shard._common.dtypes import has_x64
from torch_shard._common.fx import COPIES, DIM_VIEWS, operator_name, shape_of
from torch_shard._lowering.interpreter import place_of

logger = logging.getLogger(__name__)

WIDE = (torch.float64, torch.complex128)

_MOVES = (
    COPIES | DIM_VIEWS | {"view", "_unsafe_view", "reshape"} | {"index", "index_select", "gather", "embedding", "flip"}
)
"""Operators whose results are values that they were given: rounding before them is rounding after them."""

_LAYER = "layer"


def warn_of_rounding(
    graph: Captured[Any], inner: Callable[[], Iterable[GraphModule]], what: str, explained: Callable[[], Captured[Any]]
) -> None:
    """Warn of closed-over tensors that lose digits; what is converted to 32 bits before any arithmetic does not."""
    if has_x64() or not _arithmetic(graph, inner()):
        return

    lines: dict[str, None] = {}
    for source, place in _arithmetic(explained(), inner()):
        lines[f"\n  {source.meta['val'].dtype} {shape_of(source)}: {place}"] = None
    logger.warning(
        "%s computes with closed-over tensors of 64-bit floating point, of which JAX keeps 32 bits: values are rounded "
        "before they are used. Differences of large numbers lose digits. Write tensor.float() where it is used, or "
        "jax.config.update('jax_enable_x64', True) at the start.%s",
        what,
        "".join(lines),
    )


def _arithmetic(graph: Captured[Any], inner: Iterable[GraphModule]) -> list[tuple[Node, str]]:
    """The wide tensors that are closed over and computed with, and the place of that."""
    inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    # What is closed over are the last inputs; of the graph of a layer, each input may be.
    sources = inputs[len(inputs) - len(graph.closure) :]
    for module in inner:
        sources += [node for node in module.graph.nodes if node.op == "placeholder"]

    places: list[tuple[Node, str]] = []
    for source in filter(_is_wide, sources):
        for user in _computing(source)[:1]:
            places.append((source, place_of(user)))
    return places


def _computing(source: Node) -> list[Node]:
    """The first nodes that do more with a wide tensor than to move its values and to round them."""
    computing: list[Node] = []
    for user in source.users:
        name = operator_name(user)
        if name in _MOVES or (name == "_to_copy" and _is_wide(user)):
            computing += _computing(user)
        elif user.op != "output" and name not in ("_to_copy", _LAYER):
            computing.append(user)
    return computing


def _is_wide(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in WIDE
