"""Lines that say which attention has no kernel on the devices of a step, what it takes instead, and why."""

import collections
import operator
from collections.abc import Callable, Iterable

import jax
import torch
from torch.fx import GraphModule, Node

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.fx import args_of, aten_name, shape_of
from torch_shard._common.operator_families import COPIES, MATRIX_PRODUCTS, RESHAPES
from torch_shard._lowering.ops.attention import SHORTEST, WHY, limits
from torch_shard._lowering.ops.attention_kernels import KERNELS, undivided, why_no_kernel
from torch_shard._lowering.rows import RowSplit

_SHOWN = 4
_POINTWISE = frozenset(
    {"mul", "div", "add", "sub", "where", "masked_fill", "tanh", "_to_copy", "expand", "native_dropout"}
)


def report_attention(graphs: Iterable[tuple[str, GraphModule]], rows: RowSplit | None) -> list[str]:
    """Lines for the forward passes of these graphs; none where all long attention has its kernel, or there is none.

    Args:
        graphs: Of a program, and of its repeated layers as often as they run; each with the path of its module.
        rows: How the rows of the batch lie on the devices.
    """
    if rows is None or rows.platform not in KERNELS:
        return []
    paths: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, graph in graphs:
        for node in graph.graph.nodes:
            notes = node.meta.get("custom", {})
            if notes.get("pass") != "backward" and (found := _of_node(node, notes.get(WHY), rows)):
                paths[found][".".join(filter(None, (path, notes.get("module")))) or "the loss"] += 1
    return [f"{_listed(where)}: attention {what}" for what, where in paths.items()]


def _listed(where: collections.Counter[str]) -> str:
    shown = [f"{path} ({n} times)" if n > 1 else path for path, n in where.items()]
    return ", ".join(shown if len(shown) <= _SHOWN else [shown[0], "...", f"{shown[-1]} ({len(shown)} modules)"])


def _of_node(node: Node, why: str | None, rows: RowSplit) -> str:
    """What to say of a node, if it is attention; else empty."""
    if node.target is torch.ops.torch_shard.attention.default:
        return _of_ours(node, rows)
    if aten_name(node) not in ("_softmax", "_safe_softmax") or len(shape := shape_of(node)) < 3:
        return ""
    if min(shape[-2:]) < SHORTEST or (why is None and not _is_written_out(node)):
        return ""
    return f"keeps all weights, {shape}, and has no kernel: {why or _of_written(node)}."


def _of_ours(node: Node, rows: RowSplit) -> str:
    q, k, v, segments, _, band, _, dropout, cap, sinks = args_of(node)
    if shape_of(q)[2] < SHORTEST:
        return ""
    if dropout:
        return (
            f"runs in blocks of queries, without a kernel: it drops weights (dropout_p={dropout:g}), which kernels do "
            "not. Set its dropout to 0 (Hugging Face: attention_dropout, attention_probs_dropout_prob)."
        )
    structs = [jax.ShapeDtypeStruct(shape_of(x), jax_dtype(x.meta["val"].dtype)) for x in (q, k, v)]
    if why := why_no_kernel(rows.platform, structs, segments, limits(band), is_plain=not cap and not sinks):
        return f"runs in blocks of queries, without a kernel: {why}."
    if whole := undivided(rows, shape_of(q)):
        return f"has its kernel, but does not divide over the mesh ({whole}): devices compute the same."
    return ""


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
