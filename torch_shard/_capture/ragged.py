"""Selections by a mask, of which nobody knows how many elements they have: rewritten as whole tensors beside the mask.

PyTorch's tracer writes `x[mask].mean()` down with a size that is a symbol. Here each such tensor has all the places
that the mask has, in their order, and what stands in the places that it leaves out means nothing: operators element by
element and row by row work on it as it is, and those that join rows leave these places out. So the result is that of
the selection to the last operator, also where the mask selects nothing. What cannot be done so is refused.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torch_shard._common.fx import args_of, aten_name, is_random

aten = torch.ops.aten

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

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._masks: dict[object, _T] = {}
        self._selected_by: dict[object, Node | tuple[object, ...]] = {}

    def run_node(self, n: Node) -> Any:
        """The value of a node: a tensor with all places, or a `Count`."""
        if not any(map(unknown_sizes, (n, *n.all_input_nodes))):
            return super().run_node(n)

        # What a random operator draws depends on how many elements there are, so it cannot run on all places.
        is_known = n.op == "call_function" and not is_random(n)
        rule = _rule_of(n.target) if is_known else None
        try:
            if rule is None:
                raise UnknownSizeError("a result of the function" if n.op == "output" else f"{n.target}")
            with self._set_current_node(n):
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                return rule(self, n, args, kwargs)
        except UnknownSizeError as error:
            error.place = _place(n)
            raise

    def learn(self, size: Any, mask: _T, by: Node | tuple[object, ...]) -> None:
        """Note what an unknown size counts: the places of a mask, or of several one after the other."""
        symbol = size.node.expr
        if not symbol.is_symbol and not isinstance(by, tuple):
            raise UnknownSizeError(f"a size {size}")

        # Two selections were taken to be of one size (`x[a] + y[b]`). PyTorch would check that when the program runs,
        # which ours cannot: it has no sizes then.
        is_assumed_equal = self._selected_by.setdefault(symbol, by) != by
        if size.node.shape_env.deferred_runtime_asserts or is_assumed_equal:
            raise UnknownSizeError("what has as many elements only for some values")
        self._masks.setdefault(symbol, mask)

    def is_selected_by(self, size: Any, mask: Node) -> bool:
        """Tell whether a size counts the places of a mask, or of what it is broadcast to."""
        selector = self._selected_by.get(size.node.expr)
        while isinstance(selector, Node) and selector is not mask and aten_name(selector) == "expand":
            selector = args_of(selector)[0]
        return selector is mask

    def mask(self, size: Any) -> _T:
        """Which places of a dim of this size count."""
        expr = size.node.expr
        if expr in self._masks:
            return self._masks[expr]

        # A view may merge the selected dim with one of a known size after it: `times` places for each of the mask's.
        times, symbol = expr.primitive()
        if symbol not in self._masks or int(times) != times:
            raise UnknownSizeError(f"a size {size}")
        mask = self._masks[symbol]
        return mask if times == 1 else mask.repeat_interleave(int(times))

    def parts(self, size: Any) -> list[tuple[Any, int]]:
        """What was put together to a dim: the size of each part, and the number of its places."""
        selector = self._selected_by.get(size.node.expr)
        if not isinstance(selector, tuple):
            return []
        return [(part, part if isinstance(part, int) else len(self._masks[part])) for part in selector]

    def count(self, size: Any) -> Count:
        """A size as a number."""
        mask = self.mask(size)
        return Count(len(mask), mask.sum())

    def number(self, size: Any) -> Any:
        """A size, as a tensor where it depends on values."""
        return size if isinstance(size, int) else self.count(size).number

    def filled(self, node: Node, dims: Sequence[int] | None = None, fill: Any = 0) -> _T:
        """The value of a node with a number where a place of these dims, or of any, does not count."""
        value, sizes = self.env[node], _sizes(node)
        positions = range(value.ndim) if dims is None else [dim % value.ndim for dim in dims]
        for dim in positions:
            if isinstance(sizes[dim], torch.SymInt):
                dims_after = [1] * (value.ndim - dim - 1)
                mask = self.mask(sizes[dim]).view(-1, *dims_after)
                value = torch.where(mask, value, fill)
        return value


def _place(node: Node) -> str:
    """The user's line that made the selection that a node works on."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop(0)
        if PLACE in current.meta:
            return current.meta[PLACE]
        for source in current.all_input_nodes:
            if unknown_sizes(source) and source not in seen:
                todo.append(source)
        seen.update(todo)
    return UnknownSizeError.place


def unknown_sizes(node: Node) -> list[object]:
    """The sizes of what a node stands for that depend on values."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]

    unknown: list[object] = []
    for each in values:
        if isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            unknown.append(each)
        elif isinstance(each, _T):
            unknown += [size for size in each.shape if isinstance(size, torch.SymInt)]
    return unknown


# ---- what each operator does to selections ----

_MASKS = (torch.bool, torch.uint8)


def has_rule(target: object) -> bool:
    """Tell whether an operator can be run on selections."""
    return _rule_of(target) is not None


def _rule_of(target: Any) -> Rule | None:
    if not isinstance(target, torch._ops.OpOverload):
        return _OF_PYTHON.get(getattr(target, "__name__", ""))
    if target.namespace != "aten":
        return None
    if target._opname in _RULES:
        return _RULES[target._opname]
    return _elementwise if torch.Tag.pointwise in target.tags else None


def _sizes(node: Node) -> Any:
    """The shape of what a node stands for, in which unknown sizes are symbols."""
    return node.meta["val"].shape


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def _ragged_dims(node: Any) -> list[int]:
    if not _is_ragged(node):
        return []
    return [dim for dim, size in enumerate(_sizes(node)) if isinstance(size, torch.SymInt)]


def _is_ragged(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), _T) and bool(unknown_sizes(node))


def _places(value: Any) -> Any:
    """Sizes as numbers of places."""
    if isinstance(value, Count):
        if value.places is None:
            raise UnknownSizeError("a size that is computed")
        return value.places
    if isinstance(value, (list, tuple)):
        return type(value)(map(_places, value))
    return value


def _elementwise(run, node, args, kwargs):
    """As it is; the numbers of elements among the arguments are tensors."""
    if not any(isinstance(arg, Count) for arg in (*args, *kwargs.values())):
        return node.target(*args, **kwargs)

    args = [arg.number if isinstance(arg, Count) else arg for arg in args]
    kwargs = {name: arg.number if isinstance(arg, Count) else arg for name, arg in kwargs.items()}
    # The overload for numbers of Python does not take tensors.
    return node.target.overloadpacket(*args, **kwargs)


def _sized(run, node, args, kwargs):
    """What is given sizes, as it is with all places."""
    return node.target(*map(_places, args), **kwargs)


def _along(position: int, default: Any) -> Rule:
    """As it is, if the dims of which an argument speaks have known sizes."""

    def rule(run, node, args, kwargs):
        dims = args[position] if len(args) > position else kwargs.get("dim", default)
        _require_known(args_of(node)[0], dims)
        return _sized(run, node, args, kwargs)

    return rule


def _require_known(source: Any, dims: Any) -> None:
    """Refuse dims of unknown sizes among these of a node, or of each of several.

    Args:
        source: The node, or several.
        dims: One or more dims; None or nothing for all.
    """
    sources = source if isinstance(source, (list, tuple)) else [source]
    for each in sources:
        if not _is_ragged(each):
            continue
        rank = len(_sizes(each))
        if dims is None or dims == []:
            spoken_of = set(range(rank))
        elif isinstance(dims, int):
            spoken_of = {dims % rank}
        else:
            spoken_of = {dim % rank for dim in dims}
        if spoken_of.intersection(_ragged_dims(each)):
            raise UnknownSizeError("along the selected elements")


def _view(run, node, args, kwargs):
    before, after = _sizes(args_of(node)[0]), _sizes(node)

    # Row-major order stays what it is where as many elements come before the unknown dim as before.
    sizes_before = [size for size in map(str, before) if size != "1"]
    sizes_after = [size for size in map(str, after) if size != "1"]
    if sizes_before != sizes_after:
        dim_before, dim_after = _only_ragged(before), _only_ragged(after)
        if math.prod(before[:dim_before]) != math.prod(after[:dim_after]):
            raise UnknownSizeError("a view that cuts the selected elements")

    return args[0].reshape([size if isinstance(size, int) else len(run.mask(size)) for size in after])


def _only_ragged(shape: Sequence[Any]) -> int:
    dims = [dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    if len(dims) != 1:
        raise UnknownSizeError("a view of two selections")
    return dims[0]


Dims = Callable[[tuple], Sequence[int] | None] | None
"""The dims of an argument along which an operator joins elements, given all arguments; None for whichever dim."""


def _filled(dims: Mapping[int, Dims], *, fill: Any = 0, known: bool = False) -> Rule:
    """As it is, with a number that changes nothing where places of some arguments do not count.

    Args:
        dims: Which arguments, and along which dims they are filled.
        fill: The number.
        known: Whether the dim that the second argument says must have a known size in the first.
    """

    def rule(run, node, args, kwargs):
        if known:
            _require_known(args_of(node)[0], args[1])
        filled = list(args)
        for position, dims_of in dims.items():
            joined = None if dims_of is None else dims_of(args)
            filled[position] = run.filled(args_of(node)[position], joined, fill)
        return node.target(*filled, **kwargs)

    return rule


def _reduced(args: tuple) -> list[int] | None:
    dims = args[1] if len(args) > 1 else None
    if isinstance(dims, int):
        return [dims]
    return dims or None


def _mean(run, node, args, kwargs):
    """The sum by the number of elements: of none, 0 / 0."""
    source = args_of(node)[0]
    sizes, dims = _sizes(source), _reduced(args)
    if dims is None:
        dims = list(range(len(sizes)))

    keepdim = len(args) > 2 and args[2]
    total = torch.sum(run.filled(source, dims).to(_wide(args[0])), dims, keepdim)
    number = math.prod(run.number(sizes[dim]) for dim in dims)
    return (total / number).to(_dtype(node))


def _wide(value: _T) -> torch.dtype:
    """What PyTorch adds up in."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def _norm(run, node, args, kwargs):
    dims = args[2] if len(args) > 2 else None
    # Zeros beside the elements change nothing where the order is positive and finite. Of a negative order they would be
    # the smallest.
    if len(args) > 1 and not 0 < args[1] < math.inf:
        _require_known(args_of(node)[0], dims)
    return _filled({0: lambda _: dims})(run, node, args, kwargs)


def _by_dim(indices: Sequence[Node | None]) -> list[tuple[int, Node]]:
    """The indices that there are, with their dims."""
    return [(dim, index) for dim, index in enumerate(indices) if index is not None]


def _has_mask(indices: list[tuple[int, Node]]) -> bool:
    return any(_dtype(index) in _MASKS for _, index in indices)


def _index(run, node, args, kwargs):
    source, indices = args_of(node)
    indices_by_dim = _by_dim(indices)
    if not _has_mask(indices_by_dim):
        _require_known(source, [dim for dim, _ in indices_by_dim])
        return aten.index(args[0], [None if index is None else run.filled(index) for index in indices])

    if len(indices_by_dim) != 1:
        raise UnknownSizeError("a mask beside other indices")
    dim, mask = indices_by_dim[0]
    run.learn(_sizes(node)[dim], run.filled(mask).bool().flatten(), mask)
    last_dim = dim + run.env[mask].ndim - 1
    # A copy: `x[mask]` is one, and what is written to it must not reach `x`.
    return run.env[source].clone().flatten(dim, last_dim)


def _nonzero(run, node, args, kwargs):
    (source,) = args_of(node)
    mask = run.filled(source) != 0
    run.learn(_sizes(node)[0], mask.flatten(), source)
    places = [_positions(run, size) for size in _sizes(source)]
    if not places:
        return torch.zeros(1, 0, dtype=torch.int64)
    grid = torch.meshgrid(*places, indexing="ij")
    return torch.stack([place.flatten() for place in grid], 1)


def _positions(run: WithMasks, size: Any) -> _T:
    """The positions of elements along a dim."""
    if isinstance(size, int):
        return torch.arange(size)
    return run.mask(size).cumsum(0) - 1


def _arange(run, node, args, kwargs):
    if (len(args) > 1 and args[0] != 0) or len(args) > 2:
        raise UnknownSizeError("arange with a start or a step")
    return _positions(run, _sizes(node)[0]).to(_dtype(node))


def _index_put(run, node, args, kwargs):
    source, indices, values = args_of(node)[:3]
    accumulate = bool(args[3:]) and args[3]
    indices_by_dim = _by_dim(indices)
    if _has_mask(indices_by_dim):
        new = _put_back(run, (source, values), indices_by_dim, accumulate)
    else:
        _require_known(source, [dim for dim, _ in indices_by_dim])
        new = _put_rows(run, (source, values), indices, accumulate)
    return args[0].copy_(new) if aten_name(node).endswith("_") else new


def _put_back(run: WithMasks, nodes: tuple[Node, Node], indices: list[tuple[int, Node]], accumulate: bool) -> _T:
    """What was selected goes back to the places of the mask."""
    source, values = nodes
    dim, by = indices[0]
    old, mask, new = run.env[source], run.env[by], run.env[values]

    # Values may have fewer dims than what they are written to: they are broadcast from the last one on.
    selected_dim = dim - (old.ndim - mask.ndim + 1 - new.ndim)
    if len(indices) > 1 or not _belongs(run, values, selected_dim, by):
        raise UnknownSizeError("a write at places of a mask of what another has selected")
    if _is_ragged(values):
        new = new.reshape(*new.shape[:selected_dim], *mask.shape, *new.shape[selected_dim + 1 :])

    dims_after = [1] * (old.ndim - dim - mask.ndim)
    mask = mask.view(*mask.shape, *dims_after)
    return torch.where(mask, old + new if accumulate else new.to(old.dtype), old)


def _belongs(run: WithMasks, values: Node, dim: int, by: Node) -> bool:
    """Tell whether values have one element for each place of the mask, or are the same for all."""
    if not _is_ragged(values):
        return values.meta["val"].ndim == 0
    return _ragged_dims(values) == [dim] and run.is_selected_by(_sizes(values)[dim], by)


def _put_rows(run: WithMasks, nodes: tuple[Node, Node], indices: Sequence[Any], accumulate: bool) -> _T:
    source, values = nodes
    old = run.env[source]
    first = next(dim for dim, index in enumerate(indices) if index is not None)
    size = old.shape[first]

    # Places that do not count write to one row more, which is then cut off.
    longer = torch.cat([old, old.narrow(first, 0, 1)], first)
    rows = run.filled(indices[first], fill=size)
    targets = [None if index is None else run.filled(index) for index in indices]
    # An index from the end is one from the end of the rows as they were.
    targets[first] = torch.where(rows < 0, rows + size, rows)
    return aten.index_put(longer, targets, run.filled(values), accumulate).narrow(first, 0, size)


def _masked_scatter(run, node, args, kwargs):
    _, by, values = args_of(node)
    if not _is_ragged(values) or not run.is_selected_by(_sizes(values)[0], by):
        raise UnknownSizeError("masked_scatter of what another mask has selected")
    return torch.where(args[1], args[2].reshape(args[0].shape), args[0])


def _gather(run, node, args, kwargs):
    source, dim, index = args_of(node)[:3]
    dim = dim % max(1, args[0].ndim)
    _require_known(source, [dim])
    other_dims = [ragged_dim for ragged_dim in _ragged_dims(index) if ragged_dim != dim]
    if other_dims != _ragged_dims(source):
        raise UnknownSizeError("an index of another size")
    # What does not count is filled with 0, which is an index of any tensor.
    return torch.gather(args[0], dim, run.filled(index))


def _embedding_backward(run, node, args, kwargs):
    if args[4]:
        raise UnknownSizeError("an embedding whose gradient is scaled by frequency")
    return _filled({0: None, 1: None})(run, node, args, kwargs)


def _scatter(run, node, args, kwargs):
    target = node.target
    source, dim, index = args_of(node)[:3]
    if _is_ragged(source):  # each row into its own
        _require_known(source, [dim])
        _require_known(index, [dim])
        if _ragged_dims(source) != _ragged_dims(index):
            raise UnknownSizeError("an index of another size")
        return target(args[0], dim, run.filled(index), *args[3:], **kwargs)

    # Places that do not count write to one row more, which is then cut off.
    size = args[0].shape[dim]
    longer = torch.cat([args[0], args[0].narrow(dim, 0, 1)], dim)
    new = target(longer, dim, run.filled(index, fill=size), *args[3:], **kwargs).narrow(dim, 0, size)
    return args[0].copy_(new) if aten_name(node).endswith("_") else new


def _cat(run, node, args, kwargs):
    parts, dim = args_of(node)[0], (*args_of(node)[1:], 0)[0]
    sizes = [_sizes(part)[dim] for part in parts]
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return _sized(run, node, args, kwargs)

    whole = _sizes(node)[dim]
    if whole.node.expr.primitive()[0] != 1:  # a size of 2 * n might also be rows in pairs
        raise UnknownSizeError("the same selection twice")

    masks = [torch.ones(size, dtype=torch.bool) if isinstance(size, int) else run.mask(size) for size in sizes]
    order = tuple(_expression(size) for size in sizes)
    run.learn(whole, torch.cat(masks), order)
    return torch.cat(args[0], dim)


def _slice(run, node, args, kwargs):
    """Along what was put together, whole parts of it: so the gradient goes back."""
    source = args_of(node)[0]
    defaults = (0, 0, None, 1)[len(args) - 1 :]
    dim, start, end, step = (*args_of(node)[1:], *defaults)
    if dim % args[0].ndim not in _ragged_dims(source):
        return _sized(run, node, args, kwargs)

    # Where each part ends: as a formula of sizes, by which the bounds are found, and as a number of places.
    ends, places = [0], [0]
    for size, num_places in run.parts(_sizes(source)[dim]):
        ends.append(ends[-1] + size)
        places.append(places[-1] + num_places)

    first, last = _expression(start), _expression(end)
    if first not in ends or last not in ends or step != 1:
        raise UnknownSizeError("along the selected elements")
    low, high = places[ends.index(first)], places[ends.index(last)]
    return args[0].narrow(dim, low, high - low)


def _expression(bound: Any) -> Any:
    """A size as a formula that can be compared."""
    size = bound.meta["val"] if isinstance(bound, Node) else bound
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _sym_size(run, node, args, kwargs):
    return run.count(_sizes(args_of(node)[0])[args[1]])


def _sym_numel(run, node, args, kwargs):
    sizes = _sizes(args_of(node)[0])
    number = math.prod(run.number(size) for size in sizes)
    return Count(args[0].numel(), number)  # pyright: ignore[reportArgumentType]


def _sym_float(run, node, args, kwargs):
    return Count(None, args[0].number.double())


def _get_item(run, node, args, kwargs):
    return args[0][args[1]]


def _arithmetic(run, node, args, kwargs):
    """Arithmetic of Python on numbers of elements."""
    target = node.target
    number = target(*(arg.number if isinstance(arg, Count) else arg for arg in args))
    # Only a product of sizes is a number of places again, as of a view.
    places = target(*map(_places, args)) if target is operator.mul else None
    return Count(places, number)


def _number(run, node, args, kwargs):
    """`torch.tensor(len(selected))` and its like."""
    value = args[-1]
    if not isinstance(value, Count):
        return _sized(run, node, args, kwargs)
    shape = _places(args[0]) if aten_name(node) == "full" else ()
    return value.number.to(_dtype(node)).expand(shape).clone()


def _nothing(*_: object) -> None:
    """What PyTorch notes about sizes."""


_RULES: dict[str, Rule] = {}
"""By the name of an operator of ATen."""


def _rule(names: str, rule: Rule) -> None:
    _RULES.update(dict.fromkeys(names.split(), rule))


_rule("detach alias _to_copy masked_fill masked_fill_ softplus_backward", _elementwise)
_rule("copy_ fill_ zero_ lift_fresh_copy ones_like zeros_like full_like", _elementwise)
_rule("expand unsqueeze transpose permute t new_zeros new_ones zeros", _sized)
_rule("ones empty new_empty empty_like stack", _sized)
_rule("view _unsafe_view reshape", _view)

# Where an operator says along which dims it works, and along which it does if it does not say.
_rule("_softmax _log_softmax cumsum flip select unbind", _along(1, 0))
_rule("amax amin max min argmax argmin prod squeeze", _along(1, None))
_rule("split split_with_sizes select_backward slice_backward", _along(2, 0))
_rule("_softmax_backward_data _log_softmax_backward_data", _along(2, None))
_rule("sort", _along(1, -1))
_rule("topk", _along(2, -1))

_rule("sum any", _filled({0: _reduced}))
_rule("all", _filled({0: _reduced}, fill=True))
_rule("mean", _mean)
_rule("linalg_vector_norm", _norm)

# Zeros on both sides, as 0 times what means nothing (inf, NaN) may be no number.
_rule("mm bmm addmm", _filled({-2: lambda _: [-1], -1: lambda _: [-2]}))
_rule("dot mv", _filled({0: lambda _: [-1], 1: lambda _: [0]}))

_rule("index", _index)
_rule("nonzero", _nonzero)
_rule("arange", _arange)
_rule("index_put index_put_ _unsafe_index_put", _index_put)
_rule("masked_scatter", _masked_scatter)
_rule("gather", _gather)
_rule("embedding", _filled({1: None}))
_rule("embedding_dense_backward", _embedding_backward)
_rule("index_select", _filled({2: None}, known=True))
_rule("index_add index_add_", _filled({2: None, 3: lambda args: [args[1]]}, known=True))
_rule("scatter scatter_add scatter_add_ scatter_reduce scatter_reduce_", _scatter)
_rule("cat", _cat)
_rule("slice", _slice)
_rule("sym_size", _sym_size)
_rule("sym_numel", _sym_numel)
_rule("full scalar_tensor", _number)
_rule("sym_constrain_range_for_size sym_constrain_range _assert_scalar", _nothing)

_OF_PYTHON: dict[str, Rule] = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "truediv": _arithmetic,
    "neg": _arithmetic,
    "sym_float": _sym_float,
    "getitem": _get_item,
}
"""By the name of a function of Python."""
