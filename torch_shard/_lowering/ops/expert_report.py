"""Lines of a step's report: how tokens and experts over the axes of the batch come together."""

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from torch_shard._common.fx import args_of
from torch_shard._lowering.ops.expert_dispatch import Sizes, find_exchange
from torch_shard._lowering.ops.experts import Places
from torch_shard._lowering.rows import RowSplit

_UNKNOWN = (
    "tokens are sent to gated experts of transformers alone (SiLU, GELU, or the clamped gate of gpt-oss), without "
    'hooks and with experts_implementation="grouped_mm", which is the default.'
)


def report_experts(graphs: Iterable[tuple[str, GraphModule]], rows: RowSplit | None) -> list[str]:
    """Lines that say where tokens go to experts over the axes of the batch, or these are gathered, by which bytes."""
    if rows is None:
        return []
    found, is_any = dict[str, list[str]](), False
    for path, graph in graphs:
        for node in graph.graph.nodes:
            if node.target is torch.ops.torch_shard.experts.default:
                is_any = True
                module = node.meta.get("custom", {}).get("module")
                if line := _moves(node, rows):
                    found.setdefault(line, []).append(".".join(filter(None, (path, module))) or "the loss")
    if not is_any and (over := set(rows.experts) & set(rows.data_axes)):
        return [f"Experts over {', '.join(sorted(over))} are computed as the model writes them: {_UNKNOWN}"]
    return [f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {line}" for line, paths in found.items()]


def _moves(node: Node, rows: RowSplit) -> str:
    _, ids, _, matrices, *_ = args_of(node)
    sizes = Sizes.of(ids.meta["val"], [matrix.meta["val"] for matrix in matrices])
    places = Places.of(rows, sizes)
    exchange = find_exchange(rows, places.rows, sizes)
    if exchange is None:
        return ""
    given = exchange.bytes_of_tokens(sizes), exchange.room_of_tokens(sizes), exchange.bytes_of_experts(sizes)
    tokens, room, experts = (f"{num / 2**20:.3g} MiB" for num in given)
    axes = ", ".join(f"{axis}={exchange.axes[axis]}" for axis in exchange.via)
    if places.exchange is None:
        return (
            f"experts over {axes} are gathered, {experts} a step and device; to send them their tokens would be "
            f"{tokens}, and take room for {room}."
        )
    return f"tokens are sent to experts over {axes} and back, {tokens} a step and device; to gather these is {experts}."
