"""Masks by which a captured callable selects: which are one, which are constants, and what becomes of the rest."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx import Node
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.constants import traced_storages, writes, written_by
from torch_shard._capture.ragged import has_rule
from torch_shard._common.fx import is_random, tensors_in
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
        self._masks: list[_Mask] = []

    def unify(self, func: Operator, args: Sequence[Any]) -> tuple[Operator, Sequence[Any]]:
        """An operator and its arguments, with masks that an earlier one has taken where they are the same."""
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)
            return aten.index.Tensor, (x, list(self._places(mask)))
        if func is aten.nonzero.default:
            mask = self._first(args[0])
            return func, args if mask is None else (mask.tensor,)
        if func in _INDEXED:
            indices: list[torch.Tensor | None] = []
            for index in args[1]:
                indices += self._places(index)
            return func, (args[0], indices, *args[2:])
        return func, args

    def _places(self, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The indices for one index: as many as the dims of a mask, if its places are known."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.bool:
            return [index]
        mask = self._first(index)
        if mask is None:
            return [index]
        if mask.places is None:
            known_places = self._places_of(mask.tensor) if index.ndim else None
            mask.places = known_places or [mask.tensor]
        return mask.places

    def _first(self, mask: torch.Tensor) -> "_Mask | None":
        """The first of the masks so far that is the same as this one."""
        node = self._node_of(mask)
        if node is None:
            return None
        for known in self._masks:
            if is_same(known.node, node):
                return known
        new = _Mask(mask, node)
        self._masks.append(new)
        return new


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
    computed_twice, shared_storages = {a, b}, set[int]()
    while pairs:
        pair = pairs.pop()
        if pair in seen:
            continue
        seen.add(pair)

        first, second = pair
        is_one_attribute = first.op == second.op == "get_attr" and first.target == second.target
        if first is second or is_one_attribute:
            shared_storages |= traced_storages(second)
            continue

        is_one_function = first.op == "call_function" and first.target == second.target
        if not is_one_function or is_random(first) or writes(first):
            return False
        computed_twice |= {first, second}

        first_args, first_tree = torch_pytree.tree_flatten((first.args, first.kwargs))
        second_args, second_tree = torch_pytree.tree_flatten((second.args, second.kwargs))
        if first_tree != second_tree:
            return False
        for first_arg, second_arg in zip(first_args, second_args, strict=True):
            if isinstance(first_arg, Node) and isinstance(second_arg, Node):
                pairs.append((first_arg, second_arg))
            # By their texts, as 0.0 == -0.0, and 1 / x is another number of each.
            elif type(first_arg) is not type(second_arg) or repr(first_arg) != repr(second_arg):
                return False
    return not _is_written(computed_twice, {a, b}, shared_storages)


def _is_written(computed_twice: set[Node], results: set[Node], shared_storages: set[int]) -> bool:
    """Tell whether anything was written to what is computed twice, or to what it is computed of before it was."""
    storages = shared_storages.union(*map(traced_storages, computed_twice))
    result_storages = set[int]().union(*map(traced_storages, results))

    waiting, has_begun = set(results), False
    for node in next(iter(results)).graph.nodes:
        # Once both results are computed, what they were computed of may change.
        read_later = storages if waiting else result_storages
        if has_begun and not written_by(node).isdisjoint(read_later):
            return True
        has_begun = has_begun or node in computed_twice
        waiting.discard(node)
    return False


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    # PyTorch's own rule asks whether the tensor has any element, which nobody knows of a selection.
    dims = tuple(dim)
    largest = x.amax(dims, keepdim=True)
    largest = torch.where(largest.isinf(), 0, largest)
    total = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return total if keepdim else aten.squeeze.dims(total, dims)


def _native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # PyTorch's own rule is made of `prims`, for which there are no rules for selections.
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
    decompositions = {**decomposition_table, **core_aten_decompositions(), **_OURS}
    table: dict[Any, Callable[..., PyTree]] = {}
    for op, rule in decompositions.items():
        if not has_rule(op):
            table[op] = functools.partial(_if_selected, rule)
    return table


def _if_selected(rule: Callable[..., PyTree], *args: Any, **kwargs: Any) -> PyTree:
    for tensor in tensors_in((args, kwargs)):
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            return rule(*args, **kwargs)
    return NotImplemented
