"""Logits of a loss as the model made them: before they were widened, cut and flattened for it.

A language model's are its largest tensor. As `cross_entropy(logits[:, :-1].flatten(0, 1).float(), ...)` has them they
are copied, in float32; rows that are cut off may as well count for nothing, and the loss computes in float32 anyway.
"""

import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, dtype_of, new_before, shape_of, target_of
from torch_shard._common.operator_families import RESHAPES
from torch_shard._common.overrides import rewrites

aten, ours = torch.ops.aten, torch.ops.torch_shard


def steps_of(logits: Node, *, reduced: bool) -> list[Node]:
    """The nodes that only widen, cut and flatten logits, last first; of a loss for each row, only those that widen."""
    steps, node = list[Node](), logits
    while _widens(node) or (reduced and len(shape_of(logits)) == 2 and (_flattens(node) or _cuts(node))):
        steps.append(node)
        node = args_of(node)[0]
    while steps and len(shape_of(logits)) == 2 and not _is_whole(steps, logits):
        steps.pop()
    return steps


def _is_whole(steps: list[Node], logits: Node) -> bool:
    """Tell whether rows are cut before they are flattened, once, so that their places are known."""
    flattened = [at for at, step in enumerate(steps) if _flattens(step)]
    cut = [at for at, step in enumerate(steps) if _cuts(step)]
    return len(flattened) <= 1 and (not cut or (bool(flattened) and min(cut) > flattened[0]))


def source_of(steps: list[Node], logits: Node) -> Node:
    """The logits before these steps."""
    return args_of(steps[-1])[0] if steps else logits


def rows_of(steps: list[Node]) -> list[int]:
    """The shape of the rows that are left after they are cut and before they are flattened; empty without that."""
    return next((list(shape_of(args_of(step)[0])[:-1]) for step in steps if _flattens(step)), [])


def along(steps: list[Node], found: Node, at: Node) -> Node:
    """A gradient of the logits, taken the way of the logits: what leads it back will meet what it came from."""
    for step in reversed(steps):
        found = new_before(at, target_of(step), (found, *args_of(step)[1:]), step.meta["val"])
        found.kwargs = step.kwargs
    return found


def _widens(node: Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    return dtype_of(node) is torch.float32 and dtype_of(args_of(node)[0]) in (torch.bfloat16, torch.float16)


def _flattens(node: Node) -> bool:
    return node.target in RESHAPES and len(shape_of(node)) == 2 and shape_of(node)[-1] == shape_of(args_of(node)[0])[-1]


def _cuts(node: Node) -> bool:
    """Tell whether a node leaves the last rows out, along a dim that is not that of the classes."""
    if node.target is not aten.slice.Tensor:
        return False
    given, rank = args_of(node), len(shape_of(node))
    _, dim, start, _, step = (*given, *(0, None, None, 1)[len(given) - 1 :])
    return dim % rank < rank - 1 and not start and step == 1


@rewrites(aten._to_copy.default)
def _narrow_again(node: Node) -> Node | None:
    """What was widened and is narrowed again is what it was."""
    source = args_of(node)[0]
    is_back = isinstance(source, Node) and _widens(source) and dtype_of(args_of(source)[0]) == dtype_of(node)
    return args_of(source)[0] if is_back else None


@rewrites(aten.slice_scatter.default)
def _whole_again(node: Node) -> Node | None:
    """Rows that are put back where they were cut off: the gradient has zeros there."""
    base, rows, *where = args_of(node)
    if not isinstance(rows, Node) or rows.target is not aten.slice.Tensor or base.target is not aten.full.default:
        return None
    whole = args_of(rows)[0]
    is_ours = whole.target is ours.cross_entropy_backward.default and args_of(base)[1] == 0
    return whole if is_ours and list(args_of(rows)[1:]) == where and shape_of(whole) == shape_of(node) else None
