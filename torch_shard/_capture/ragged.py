"""Selections by a mask, of which nobody knows how many elements they have: rewritten as whole tensors beside the mask.

PyTorch's tracer writes `x[mask].mean()` down with a size that is a symbol. Here each such tensor has all the places
that the mask has, in their order, and what stands in the places that it leaves out means nothing: operators element by
element and row by row work on it as it is, and those that join rows leave these places out. So the result is that of
the selection to the last operator, also where the mask selects nothing. What cannot be done so is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torch_shard._common.fx import args_of, aten_name, is_random

_T = torch.Tensor
Rule = Callable[["WithMasks", Node, tuple, dict], Any]
"""What an operator does: given the run, its node, and the values of its arguments."""


def is_ragged(graph: GraphModule) -> bool:
    """Tell whether the size of anything in a graph depends on values."""
    return any(unknown_sizes(node) for node in graph.graph.nodes)


class UnknownSizeError(Exception):
    """An operator needs to know how many elements a mask has selected.

    Attributes:
        place: The user's line that selects them.
    """

    place: str = "(no line of user code)"


PLACE = "selected_at"
"""Where a node notes the user's line, if it selects elements by their values."""


class Count:
    """A size that depends on values: how many places it has, and how many of them count."""

    def __init__(self, places: int | None, number: _T) -> None:
        self.places, self.number = places, number


class WithMasks(Interpreter):
    """Runs a graph with whole tensors and masks in place of selections."""

    def __init__(self, graph: GraphModule, rule_of: Callable[[Any], Rule | None]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._rule_of = rule_of
        self._masks: dict[object, _T] = {}
        self._selected_by: dict[object, Node | tuple[object, ...]] = {}

    def run_node(self, n: Node) -> Any:
        """The value of a node: a tensor with all places, or a `Count`."""
        if not any(map(unknown_sizes, (n, *n.all_input_nodes))):
            return super().run_node(n)
        rule = self._rule_of(n.target) if n.op == "call_function" and not is_random(n) else None
        try:
            if rule is None:
                raise UnknownSizeError("a result of the function" if n.op == "output" else f"{n.target}")
            with self._set_current_node(n):
                return rule(self, n, *self.fetch_args_kwargs_from_env(n))
        except UnknownSizeError as error:
            error.place = _place(n)
            raise

    def learn(self, size: Any, mask: _T, by: Node | tuple[object, ...]) -> None:
        """Note what an unknown size counts: the places of a mask, or of several one after the other."""
        symbol = size.node.expr
        if not symbol.is_symbol and not isinstance(by, tuple):
            raise UnknownSizeError(f"a size {size}")
        if size.node.shape_env.deferred_runtime_asserts or self._selected_by.setdefault(symbol, by) != by:
            raise UnknownSizeError("what has as many elements only for some values")  # which PyTorch would check then
        self._masks.setdefault(symbol, mask)

    def is_selected_by(self, size: Any, mask: Node) -> bool:
        """Tell whether a size counts the places of a mask, or of what it is broadcast to."""
        found = self._selected_by.get(size.node.expr)
        while isinstance(found, Node) and found is not mask and aten_name(found) == "expand":
            found = args_of(found)[0]
        return found is mask

    def mask(self, size: Any) -> _T:
        """Which places of a dim of this size count."""
        expr = size.node.expr
        times, part = (1, expr) if expr in self._masks else expr.primitive()
        if part not in self._masks or int(times) != times:
            raise UnknownSizeError(f"a size {size}")
        return self._masks[part] if times == 1 else self._masks[part].repeat_interleave(int(times))

    def parts(self, size: Any) -> list[tuple[Any, int]]:
        """What was put together to a dim: the size of each part, and the number of its places."""
        found = self._selected_by.get(size.node.expr)
        parts = found if isinstance(found, tuple) else ()
        return [(part, part if isinstance(part, int) else len(self._masks[part])) for part in parts]

    def count(self, size: Any) -> Count:
        """A size as a number."""
        mask = self.mask(size)
        return Count(len(mask), mask.sum())

    def number(self, size: Any) -> Any:
        """A size, as a tensor where it depends on values."""
        return size if isinstance(size, int) else self.count(size).number

    def filled(self, node: Node, dims: Sequence[int] | None = None, fill: Any = 0) -> _T:
        """The value of a node with a number where a place of these dims, or of any, does not count."""
        value, shape = self.env[node], node.meta["val"].shape
        for dim in range(value.ndim) if dims is None else [d % value.ndim for d in dims]:
            if isinstance(shape[dim], torch.SymInt):
                mask = self.mask(shape[dim])
                value = torch.where(mask.view(-1, *[1] * (value.ndim - dim - 1)), value, fill)
        return value


def _place(node: Node) -> str:
    """The user's line that made the selection that a node works on."""
    todo, seen = [node], set()
    while todo:
        if PLACE in (found := todo.pop(0)).meta:
            return found.meta[PLACE]
        todo += [source for source in found.all_input_nodes if unknown_sizes(source) and source not in seen]
        seen.update(todo)
    return UnknownSizeError.place


def unknown_sizes(node: Node) -> list[object]:
    """The sizes of what a node stands for that depend on values."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    found = [v for v in values if isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))]
    return [*found, *(s for v in values if isinstance(v, _T) for s in v.shape if isinstance(s, torch.SymInt))]
