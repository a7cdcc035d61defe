"""Masks by which a captured callable selects: which are one, which are constants, and what becomes of the rest."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx import Node
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.constants import traced_storages, writes
from torch_shard._capture.ragged_rules import has_rule
from torch_shard._common.fx import is_random
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

SELECTIONS = frozenset({aten.index.Tensor, aten.nonzero.default})
"""Operators whose result may have as many elements as a mask says."""

_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)


class Masks:
    """The masks of the trace under way.

    `x[labels > 0]` beside `y[labels > 0]` selects by two masks, of which nobody but the graph can tell that they are
    one.

    Args:
        node_of: The node of a traced tensor.
        places_of: The indices of the places of a mask, if they can be computed now.
    """

    def __init__(
        self,
        node_of: Callable[[torch.Tensor], Node | None],
        places_of: Callable[[torch.Tensor], Sequence[torch.Tensor] | None],
    ) -> None:
        self._node_of, self._places_of = node_of, places_of
        self._found: list[tuple[Node, torch.Tensor]] = []
        self._known: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor] | None]] = {}

    def unify(self, func: Operator, args: Sequence[Any]) -> tuple[Operator, Sequence[Any]]:
        """An operator and its arguments, with masks that an earlier one has taken where they are the same."""
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)
            return aten.index.Tensor, (x, list(self._places(mask)))
        if func is aten.nonzero.default:
            return func, (self._first(args[0]),)
        if func in _INDEXED:
            return func, (args[0], [i for index in args[1] for i in self._places(index)], *args[2:])
        return func, args

    def _places(self, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The indices for one index: as many as the dims of a mask, if its places are known."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.bool:
            return [index]
        mask = self._first(index)
        if id(mask) not in self._known:
            self._known[id(mask)] = mask, self._places_of(mask) if mask.ndim else None
        return self._known[id(mask)][1] or [mask]

    def _first(self, mask: torch.Tensor) -> torch.Tensor:
        node = self._node_of(mask)
        if node is None:
            return mask
        for earlier, tensor in self._found:
            if _is_same(node, earlier) and not _written_since(earlier, node):
                return tensor
        self._found.append((node, mask))
        return mask


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two nodes compute the same of the same."""
    if a is b or not isinstance(a, Node):
        return a is b or (type(a) is type(b) and a == b)
    if isinstance(b, Node) and a.op == b.op == "get_attr":
        return a.target == b.target
    if not isinstance(b, Node) or a.op != "call_function" or a.target != b.target or is_random(a) or writes(a):
        return False
    ours, ours_tree = torch_pytree.tree_flatten((a.args, a.kwargs))
    theirs, theirs_tree = torch_pytree.tree_flatten((b.args, b.kwargs))
    return ours_tree == theirs_tree and all(map(_is_same, ours, theirs))


def _written_since(earlier: Node, later: Node) -> bool:
    """Tell whether anything that the earlier of two nodes is made of has been written to before the later one."""
    storages, stack, seen = set(), [earlier], set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            storages |= traced_storages(node)
            stack += node.all_input_nodes
    node = earlier
    while node is not later:
        node = node.next
        if writes(node) and any(traced_storages(source) & storages for source in node.all_input_nodes):
            return True
    return False


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """PyTorch's own asks whether there is anything."""
    dims = tuple(dim)
    largest = x.amax(dims, keepdim=True)
    largest = torch.where(largest.isinf(), 0, largest)
    total = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return total if keepdim else aten.squeeze.dims(total, dims)


def _native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's own is made of another kind of operators."""
    dims = list(range(x.ndim - len(shape), x.ndim))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(dims, keepdim=True)
    scale = ((wide - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, scale


_OURS = {aten.logsumexp.default: _logsumexp, aten.native_layer_norm.default: _native_layer_norm}


@functools.cache
def rules_for_selections() -> dict[Operator, Callable[..., PyTree]]:
    """PyTorch's decompositions of what has no rule for selections, for these alone."""
    known = {**decomposition_table, **core_aten_decompositions(), **_OURS}
    return {op: functools.partial(_if_selected, rule) for op, rule in known.items() if not has_rule(op)}  # pyright: ignore


def _if_selected(rule: Callable[..., PyTree], *args: Any, **kwargs: Any) -> PyTree:
    tensors = [t for t in torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not any(isinstance(size, torch.SymInt) for t in tensors for size in t.shape):
        return NotImplemented
    return rule(*args, **kwargs)
