"""Masks by which a captured callable selects: which are one, which are constants, and what becomes of the rest."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx import Node
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.constants import tensors_in, traced_storages, writes, written_by
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
    """

    def __init__(
        self,
        node_of: Callable[[torch.Tensor], Node | None],
        places_of: Callable[[torch.Tensor], Sequence[torch.Tensor] | None],
    ) -> None:
        self._node_of, self._places_of = node_of, places_of
        self._found: list[_Mask] = []

    def unify(self, func: Operator, args: Sequence[Any]) -> tuple[Operator, Sequence[Any]]:
        """An operator and its arguments, with masks that an earlier one has taken where they are the same."""
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)
            return aten.index.Tensor, (x, list(self._places(mask)))
        if func is aten.nonzero.default:
            mask = self._first(args[0])
            return func, args if mask is None else (mask.tensor,)
        if func in _INDEXED:
            return func, (args[0], [i for index in args[1] for i in self._places(index)], *args[2:])
        return func, args

    def _places(self, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The indices for one index: as many as the dims of a mask, if its places are known."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.bool:
            return [index]
        mask = self._first(index)
        if mask is None:
            return [index]
        if mask.places is None:
            mask.places = (self._places_of(mask.tensor) if index.ndim else None) or [mask.tensor]
        return mask.places

    def _first(self, mask: torch.Tensor) -> "_Mask | None":
        if (node := self._node_of(mask)) is None:
            return None
        found = next((known for known in self._found if is_same(known.node, node)), None)
        if found is None:
            self._found.append(found := _Mask(mask, node))
        return found


@dataclasses.dataclass
class _Mask:
    """A mask that something has been selected by, and the indices by which it is selected."""

    tensor: torch.Tensor
    node: Node
    places: Sequence[torch.Tensor | None] | None = None


def is_same(a: Node, b: Node) -> bool:
    """Tell whether what two nodes stand for has the same values now: they compute the same of the same.

    Nothing may have been written to what is computed twice, nor, between the two, to what both are computed of.
    """
    pairs, seen = [(a, b)], set[tuple[Any, Any]]()
    twice, shared = {a, b}, set[int]()
    while pairs:
        pair = pairs.pop()
        if pair in seen:
            continue
        seen.add(pair)
        first, second = pair
        if first is second or (first.op == second.op == "get_attr" and first.target == second.target):
            shared |= traced_storages(second)
            continue
        if first.op != "call_function" or first.target != second.target or is_random(first) or writes(first):
            return False
        twice |= {first, second}
        ours, ours_tree = torch_pytree.tree_flatten((first.args, first.kwargs))
        theirs, theirs_tree = torch_pytree.tree_flatten((second.args, second.kwargs))
        if ours_tree != theirs_tree:
            return False
        for ours_of, theirs_of in zip(ours, theirs, strict=True):
            if isinstance(ours_of, Node) and isinstance(theirs_of, Node):
                pairs.append((ours_of, theirs_of))
            elif type(ours_of) is not type(theirs_of) or repr(ours_of) != repr(theirs_of):  # 0.0 is not -0.0
                return False
    return not _written(twice, {a, b}, shared)


def _written(twice: set[Node], last: set[Node], shared: set[int]) -> bool:
    """Tell whether anything was written to what is computed twice, or to what it is computed of before it was."""
    used, own = (set[int]().union(*map(traced_storages, nodes)) for nodes in (twice, last))
    left, begun = set(last), False
    for node in next(iter(last)).graph.nodes:
        if begun and not written_by(node).isdisjoint(used | shared if left else own):
            return True
        begun = begun or node in twice
        left.discard(node)
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
    tensors = tensors_in((args, kwargs))
    if not any(isinstance(size, torch.SymInt) for t in tensors for size in t.shape):
        return NotImplemented
    return rule(*args, **kwargs)
