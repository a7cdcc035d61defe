"""Lines that say which attention has no kernel on the devices of a step, what it takes instead, and why."""

import collections
import operator
from collections.abc import Callable, Iterable

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.fx import (
    COPIES,
    MATRIX_PRODUCTS,
    RESHAPES,
    args_of,
    aten_name,
    forward_nodes,
    notes_of,
    shape_of,
)
from torch_shard._lowering.constraints import SEQUENCE, dim_of
from torch_shard._lowering.ops.attention import SHORTEST, WHY, limits
from torch_shard._lowering.ops.attention_balance import why_unbalanced
from torch_shard._lowering.ops.attention_kernels import KERNELS, undivided, why_no_kernel, why_no_kernel_in_context
from torch_shard._lowering.rows import RowSplit

_SHOWN = 4
_SOFTMAX = ("_softmax", "_safe_softmax")
_POINTWISE = frozenset(
    {"mul", "div", "add", "sub", "where", "masked_fill", "tanh", "_to_copy", "expand", "native_dropout"}
)


def report_attention(graphs: Iterable[tuple[str, GraphModule]], rows: RowSplit) -> list[str]:
    """Lines for the forward passes of these graphs; none where all long attention has its kernel, or there is none."""
    if rows.platform not in KERNELS:
        return []
    own = _said(graphs, lambda node: _of_node(node, rows))
    return [f"{where}: attention {what}" for what, where in own.items()]


def report_context(graphs: Iterable[tuple[str, GraphModule]], rows: RowSplit) -> list[str]:
    """Lines that say how the sequence is split, and which attention does not get its keys as the plan has it."""
    if rows.context is None:
        return []
    axis, mode, graphs = rows.context.axis, rows.context.mode, list(graphs)
    own = _said(graphs, lambda node: _balance_of(node, rows, mode))
    lines = [
        f"The sequence is split over {axis}={rows.mesh.shape[axis]}, in order. Attention finds its keys by "
        f"context_mode={mode!r}.",
        *(f"{where}: under its causal mask {what}" for what, where in own.items()),
    ]
    if mode == "gather":
        return [
            *lines,
            *(f"{path}: attention is written out: it keeps all weights." for path in find_written_out(graphs)),
        ]
    gathering = (
        f"{path}: attention gathers all keys and values, in a form that keeps all weights: {notes_of(node)[WHY]}."
        for path, node in forward_nodes(graphs)
        if WHY in notes_of(node) and aten_name(node) in _SOFTMAX
    )
    return [*lines, *dict.fromkeys(gathering)]


def _balance_of(node: Node, rows: RowSplit, mode: str) -> str:
    """What devices do under a causal mask to compute as much, or why nothing; empty for other attention."""
    if (
        node.target is not torch.ops.torch_shard.attention.default
        or limits(args_of(node)[5])[1] != 0
        or mode == "heads"
    ):
        return ""
    assert rows.context is not None
    lengths, num = _lengths(node), rows.mesh.shape[rows.context.axis]
    has_kernel = rows.platform in KERNELS and not _why_no_kernel(node, rows)
    if why := why_unbalanced(mode, lengths, limits(args_of(node)[5]), num, has_kernel=has_kernel):
        return f"devices keep the queries that they have: {why}."
    what = "queries" if mode == "gather" else "queries, keys and values"
    return f"devices exchange half of their {what}, and so compute as much."


def find_written_out(graphs: Iterable[tuple[str, GraphModule]]) -> list[str]:
    """The modules that write attention out over a sequence that is split: the compiler gathers its keys."""
    return list(dict.fromkeys(path for path, node in forward_nodes(graphs) if _mixes_a_split_sequence(node)))


def _mixes_a_split_sequence(node: Node) -> bool:
    shape = shape_of(node) if aten_name(node) in _SOFTMAX else ()
    is_of_sequence = len(shape) >= 3 and dim_of(node, SEQUENCE) == len(shape) - 2 and shape[-2] == shape[-1]
    return is_of_sequence and WHY not in notes_of(node) and _is_written_out(node)


def _said(graphs: Iterable[tuple[str, GraphModule]], say: Callable[[Node], str]) -> dict[str, str]:
    """What is said of nodes of the forward passes, and of which modules."""
    paths: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, node in forward_nodes(graphs):
        if found := say(node):
            paths[found][path] += 1
    return {what: _listed(where) for what, where in paths.items()}


def _listed(where: collections.Counter[str]) -> str:
    shown = [f"{path} ({n} times)" if n > 1 else path for path, n in where.items()]
    return ", ".join(shown if len(shown) <= _SHOWN else [shown[0], "...", f"{shown[-1]} ({len(shown)} modules)"])


def _of_node(node: Node, rows: RowSplit) -> str:
    """What to say of a node, if it is attention; else empty."""
    why = notes_of(node).get(WHY)
    if node.target is torch.ops.torch_shard.attention.default:
        return _of_ours(node, rows)
    if aten_name(node) not in _SOFTMAX or len(shape := shape_of(node)) < 3:
        return ""
    if min(shape[-2:]) < SHORTEST or (why is None and not _is_written_out(node)):
        return ""
    return f"keeps all weights, {shape}, and has no kernel: {why or _of_written(node)}."


def _of_ours(node: Node, rows: RowSplit) -> str:
    q = args_of(node)[0]
    if shape_of(q)[2] < SHORTEST:
        return ""
    if why := _why_no_kernel(node, rows):
        return f"runs in blocks of queries, without a kernel: {why}."
    if rows.context is None and (whole := undivided(rows, shape_of(q))):
        return f"has its kernel, but does not divide over the mesh ({whole}): devices compute the same."
    return ""


def _why_no_kernel(node: Node, rows: RowSplit) -> str:
    q, k, v, segments, _, band, _, dropout, cap, sinks, bias = args_of(node)
    if dropout:
        return (
            f"it drops weights (dropout_p={dropout:g}), which kernels do not. Set its dropout to 0 (Hugging Face: "
            "attention_dropout, attention_probs_dropout_prob)"
        )
    if bias:
        return notes_of(node)[WHY]
    structs = [jax.ShapeDtypeStruct(shape_of(x), jax_dtype(x.meta["val"].dtype)) for x in (q, k, v)]
    why = why_no_kernel(rows.platform, structs, segments, limits(band), is_plain=not cap and not sinks)
    if why or rows.context is None:
        return why
    num = rows.mesh.shape[rows.context.axis]
    return why_no_kernel_in_context(rows.platform, rows.context.mode, num, _lengths(node), limits(band))


def _lengths(node: Node) -> tuple[int, int]:
    q, k = args_of(node)[:2]
    return shape_of(q)[2], shape_of(k)[2]


def _is_written_out(node: Node) -> bool:
    """Tell whether a softmax is of a product, and goes into one."""
    return any(aten_name(source) in MATRIX_PRODUCTS for source in _before(node)) and any(
        aten_name(user) in MATRIX_PRODUCTS for user in _after(node)
    )


def _of_written(node: Node) -> str:
    if any(aten_name(source) == "tanh" for source in _before(node)):
        return "it is written out, with a soft cap of the scores, in a form that is not known"
    return (
        "it is written out as softmax and products. Use torch.nn.functional.scaled_dot_product_attention ("
        'Hugging Face: attn_implementation="sdpa"; nn.MultiheadAttention: need_weights=False)'
    )


def _before(node: Node) -> set[Node]:
    """What a node is computed from, elementwise, and where that begins."""
    return _reached(node, lambda source: source.all_input_nodes)


def _after(node: Node) -> set[Node]:
    """What is computed from a node, elementwise, and where that ends."""
    return _reached(node, lambda user: list(user.users))


def _reached(node: Node, following: Callable[[Node], list[Node]]) -> set[Node]:
    waiting, found = following(node), set[Node]()
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += following(each) if _is_elementwise(each) else []
    return found


def _is_elementwise(node: Node) -> bool:
    return aten_name(node) in _POINTWISE | COPIES or node.target in (*RESHAPES, operator.getitem)
