"""What each operator does to selections by a mask, which are whole tensors beside the mask: a `Rule` for each."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_shard._capture.ragged import Count, Rule, UnknownSizeError, WithMasks, unknown_sizes
from torch_shard._common.fx import args_of, aten_name

aten = torch.ops.aten

_T = torch.Tensor

_MASKS = (torch.bool, torch.uint8)


def with_masks(graph: GraphModule) -> WithMasks:
    """What runs a graph with whole tensors and masks in place of selections."""
    return WithMasks(graph, _rule_of)


def has_rule(target: object) -> bool:
    """Tell whether an operator can be run on selections."""
    return _rule_of(target) is not None


def _rule_of(target: Any) -> Rule | None:
    if not isinstance(target, torch._ops.OpOverload):
        return _OF_PYTHON.get(getattr(target, "__name__", ""))
    if target.namespace != "aten":
        return None
    return _RULES.get(target._opname) or (_elementwise if torch.Tag.pointwise in target.tags else None)


def _ragged_dims(node: Any) -> list[int]:
    return [d for d, s in enumerate(node.meta["val"].shape) if isinstance(s, torch.SymInt)] if _is_ragged(node) else []


def _is_ragged(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), _T) and bool(unknown_sizes(node))


def _places(value: Any) -> Any:
    """Sizes as numbers of places."""
    if isinstance(value, Count):
        if value.places is None:
            raise UnknownSizeError("a size that is computed")
        return value.places
    return type(value)(map(_places, value)) if isinstance(value, (list, tuple)) else value


def _elementwise(run, node, args, kwargs):
    """As it is; the numbers of elements among the arguments are tensors."""
    target = node.target
    if any(isinstance(a, Count) for a in (*args, *kwargs.values())):
        args = tuple(a.number if isinstance(a, Count) else a for a in args)
        kwargs = {k: a.number if isinstance(a, Count) else a for k, a in kwargs.items()}
        return target.overloadpacket(*args, **kwargs)
    return target(*args, **kwargs)


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
    for each in source if isinstance(source, (list, tuple)) else [source]:
        if not _is_ragged(each):
            continue
        rank = each.meta["val"].ndim
        spoken = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        if set(_ragged_dims(each)) & {d % rank for d in spoken}:
            raise UnknownSizeError("along the selected elements")


def _view(run, node, args, kwargs):
    """Row-major order stays what it is where as many elements come before the unknown dim as before."""
    before, after = args_of(node)[0].meta["val"].shape, node.meta["val"].shape
    if [s for s in map(str, before) if s != "1"] != [s for s in map(str, after) if s != "1"]:
        first, second = (_only_ragged(shape) for shape in (before, after))
        if math.prod(before[:first]) != math.prod(after[:second]):
            raise UnknownSizeError("a view that cuts the selected elements")
    return args[0].reshape([s if isinstance(s, int) else len(run.mask(s)) for s in after])


def _only_ragged(shape: Sequence[Any]) -> int:
    found = [d for d, s in enumerate(shape) if isinstance(s, torch.SymInt)]
    if len(found) != 1:
        raise UnknownSizeError("a view of two selections")
    return found[0]


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
        given = list(args)
        for position, along in dims.items():
            given[position] = run.filled(args_of(node)[position], along and along(args), fill)
        return node.target(*given, **kwargs)

    return rule


def _reduced(args: tuple) -> list[int] | None:
    dims = args[1] if len(args) > 1 else None
    return [dims] if isinstance(dims, int) else (dims or None)


def _mean(run, node, args, kwargs):
    """The sum by the number of elements: of none, 0 / 0."""
    source = args_of(node)[0]
    shape, dims = source.meta["val"].shape, _reduced(args)
    dims = list(range(len(shape))) if dims is None else dims
    total = torch.sum(run.filled(source, dims).to(_wide(args[0])), dims, len(args) > 2 and args[2])
    number = math.prod(run.number(shape[dim]) for dim in dims)
    return (total / number).to(node.meta["val"].dtype)


def _wide(value: _T) -> torch.dtype:
    """What PyTorch adds up in."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def _norm(run, node, args, kwargs):
    dims = args[2] if len(args) > 2 else None
    if len(args) > 1 and not 0 < args[1] < math.inf:
        _require_known(args_of(node)[0], dims)
    return _filled({0: lambda _: dims})(run, node, args, kwargs)


def _index(run, node, args, kwargs):
    source, indices = args_of(node)
    where = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype in _MASKS for _, index in where):
        if len(where) != 1:
            raise UnknownSizeError("a mask beside other indices")
        dim, by = where[0]
        run.learn(node.meta["val"].shape[dim], run.filled(by).bool().flatten(), by)
        return run.env[source].clone().flatten(dim, dim + run.env[by].ndim - 1)
    _require_known(source, [dim for dim, _ in where])
    return aten.index(args[0], [None if index is None else run.filled(index) for index in indices])


def _nonzero(run, node, args, kwargs):
    (by,) = args_of(node)
    mask = run.filled(by) != 0
    run.learn(node.meta["val"].shape[0], mask.flatten(), by)
    places = [_positions(run, size) for size in by.meta["val"].shape]
    grid = torch.meshgrid(*places, indexing="ij") if places else []
    return torch.stack([place.flatten() for place in grid], 1) if grid else torch.zeros(1, 0, dtype=torch.int64)


def _positions(run: WithMasks, size: Any) -> _T:
    """The positions of elements along a dim."""
    return torch.arange(size) if isinstance(size, int) else run.mask(size).cumsum(0) - 1


def _arange(run, node, args, kwargs):
    if (len(args) > 1 and args[0] != 0) or len(args) > 2:
        raise UnknownSizeError("arange with a start or a step")
    return _positions(run, node.meta["val"].shape[0]).to(node.meta["val"].dtype)


def _index_put(run, node, args, kwargs):
    source, indices, values = args_of(node)[:3]
    accumulate = bool(args[3:]) and args[3]
    where = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype in _MASKS for _, index in where):
        new = _put_back(run, (source, values), where, accumulate)
    else:
        _require_known(source, [dim for dim, _ in where])
        new = _put_rows(run, (source, values), indices, accumulate)
    return args[0].copy_(new) if aten_name(node).endswith("_") else new


def _put_back(run: WithMasks, nodes: tuple[Node, Node], where: list[tuple[int, Node]], accumulate: bool) -> _T:
    """What was selected goes back to the places of the mask."""
    source, values = nodes
    dim, by = where[0]
    old, mask, new = run.env[source], run.env[by], run.env[values]
    at = dim - (old.ndim - mask.ndim + 1 - new.ndim)
    if len(where) > 1 or not _belongs(run, values, at, by):
        raise UnknownSizeError("a write at places of a mask of what another has selected")
    if _is_ragged(values):
        new = new.reshape(*new.shape[:at], *mask.shape, *new.shape[at + 1 :])
    mask = mask.view(*mask.shape, *[1] * (old.ndim - dim - mask.ndim))
    return torch.where(mask, old + new if accumulate else new.to(old.dtype), old)


def _belongs(run: WithMasks, values: Node, at: int, by: Node) -> bool:
    """Tell whether values have one element for each place of the mask, or are the same for all."""
    if not _is_ragged(values):
        return values.meta["val"].ndim == 0
    return _ragged_dims(values) == [at] and run.is_selected_by(values.meta["val"].shape[at], by)


def _put_rows(run: WithMasks, nodes: tuple[Node, Node], indices: Sequence[Any], accumulate: bool) -> _T:
    """Places that do not count write to one row more, which is then cut off."""
    source, values = nodes
    old = run.env[source]
    first = next(dim for dim, index in enumerate(indices) if index is not None)
    size = old.shape[first]
    wide = torch.cat([old, old.narrow(first, 0, 1)], first)
    found = [None if index is None else run.filled(index) for index in indices]
    rows = run.filled(indices[first], fill=size)
    found[first] = torch.where(rows < 0, rows + size, rows)
    return aten.index_put(wide, found, run.filled(values), accumulate).narrow(first, 0, size)


def _masked_scatter(run, node, args, kwargs):
    _, by, values = args_of(node)
    if not _is_ragged(values) or not run.is_selected_by(values.meta["val"].shape[0], by):
        raise UnknownSizeError("masked_scatter of what another mask has selected")
    return torch.where(args[1], args[2].reshape(args[0].shape), args[0])


def _gather(run, node, args, kwargs):
    """An index that does not count is 0, so that it is one."""
    source, dim, index = args_of(node)[:3]
    dim = dim % max(1, args[0].ndim)
    _require_known(source, [dim])
    if [d for d in _ragged_dims(index) if d != dim] != _ragged_dims(source):
        raise UnknownSizeError("an index of another size")
    return torch.gather(args[0], dim, run.filled(index))


def _embedding_backward(run, node, args, kwargs):
    if args[4]:
        raise UnknownSizeError("an embedding whose gradient is scaled by frequency")
    return _filled({0: None, 1: None})(run, node, args, kwargs)


def _scatter(run, node, args, kwargs):
    """Places that do not count write to one row more, which is then cut off."""
    target = node.target
    source, dim, index = args_of(node)[:3]
    if _is_ragged(source):  # each row into its own
        _require_known(source, [dim])
        _require_known(index, [dim])
        if _ragged_dims(source) != _ragged_dims(index):
            raise UnknownSizeError("an index of another size")
        return target(args[0], dim, run.filled(index), *args[3:], **kwargs)
    size = args[0].shape[dim]
    wide = torch.cat([args[0], args[0].narrow(dim, 0, 1)], dim)
    new = target(wide, dim, run.filled(index, fill=size), *args[3:], **kwargs).narrow(dim, 0, size)
    return args[0].copy_(new) if aten_name(node).endswith("_") else new


def _cat(run, node, args, kwargs):
    parts, dim = args_of(node)[0], (*args_of(node)[1:], 0)[0]
    sizes = [part.meta["val"].shape[dim] for part in parts]
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return _sized(run, node, args, kwargs)
    masks = [torch.ones(s, dtype=torch.bool) if isinstance(s, int) else run.mask(s) for s in sizes]
    order = tuple(s if isinstance(s, int) else s.node.expr for s in sizes)
    whole = node.meta["val"].shape[dim]
    if whole.node.expr.primitive()[0] != 1:  # which might also be rows in pairs
        raise UnknownSizeError("the same selection twice")
    run.learn(whole, torch.cat(masks), order)
    return torch.cat(args[0], dim)


def _slice(run, node, args, kwargs):
    """Along what was put together, whole parts of it: so the gradient goes back."""
    source = args_of(node)[0]
    dim, start, end, step = (*args_of(node)[1:], *(0, 0, None, 1)[len(args) - 1 :])
    if dim % args[0].ndim not in _ragged_dims(source):
        return _sized(run, node, args, kwargs)
    parts = run.parts(source.meta["val"].shape[dim])
    ends, places = [0], [0]
    for part, length in parts:
        ends, places = [*ends, ends[-1] + part], [*places, places[-1] + length]
    first, last = (_expression(bound) for bound in (start, end))
    if first not in ends or last not in ends or step != 1:
        raise UnknownSizeError("along the selected elements")
    low, high = places[ends.index(first)], places[ends.index(last)]
    return args[0].narrow(dim, low, high - low)


def _expression(bound: Any) -> Any:
    size = bound.meta["val"] if isinstance(bound, Node) else bound
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _sym_numel(run, node, args, kwargs):
    shape = args_of(node)[0].meta["val"].shape
    return Count(args[0].numel(), math.prod(run.number(size) for size in shape))  # pyright: ignore


def _arithmetic(run, node, args, kwargs):
    """Arithmetic of Python on numbers of elements."""
    target = node.target
    number = target(*(a.number if isinstance(a, Count) else a for a in args))
    return Count(target(*map(_places, args)) if target is operator.mul else None, number)


def _number(run, node, args, kwargs):
    """`torch.tensor(len(selected))` and its like."""
    value = args[-1]
    if not isinstance(value, Count):
        return _sized(run, node, args, kwargs)
    shape = _places(args[0]) if aten_name(node) == "full" else ()
    return value.number.to(node.meta["val"].dtype).expand(shape).clone()


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("detach", "alias", "_to_copy", "masked_fill", "masked_fill_", "softplus_backward"), _elementwise),
    **dict.fromkeys(
        ("copy_", "fill_", "zero_", "lift_fresh_copy", "ones_like", "zeros_like", "full_like"), _elementwise
    ),
    **dict.fromkeys(("expand", "unsqueeze", "transpose", "permute", "t", "new_zeros", "new_ones", "zeros"), _sized),
    **dict.fromkeys(("ones", "empty", "new_empty", "empty_like", "stack"), _sized),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    # where an operator says along which dims it works, and along which it does if it does not say
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "flip", "select", "unbind"), _along(1, 0)),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "prod", "squeeze"), _along(1, None)),
    **dict.fromkeys(("split", "split_with_sizes", "select_backward", "slice_backward"), _along(2, 0)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along(2, None)),
    "sort": _along(1, -1),
    "topk": _along(2, -1),
    **dict.fromkeys(("sum", "any"), _filled({0: _reduced})),
    "all": _filled({0: _reduced}, fill=True),
    "mean": _mean,
    "linalg_vector_norm": _norm,
    # zeros on both sides, as a number times what means nothing may be no number
    **dict.fromkeys(("mm", "bmm", "addmm"), _filled({-2: lambda _: [-1], -1: lambda _: [-2]})),
    **dict.fromkeys(("dot", "mv"), _filled({0: lambda _: [-1], 1: lambda _: [0]})),
    "index": _index,
    "nonzero": _nonzero,
    "arange": _arange,
    **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put"), _index_put),
    "masked_scatter": _masked_scatter,
    "gather": _gather,
    "embedding": _filled({1: None}),
    "embedding_dense_backward": _embedding_backward,
    "index_select": _filled({2: None}, known=True),
    **dict.fromkeys(("index_add", "index_add_"), _filled({2: None, 3: lambda args: [args[1]]}, known=True)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), _scatter),
    "cat": _cat,
    "slice": _slice,
    "sym_size": lambda run, node, args, _: run.count(args_of(node)[0].meta["val"].shape[args[1]]),
    "sym_numel": _sym_numel,
    **dict.fromkeys(("full", "scalar_tensor"), _number),
    # what PyTorch notes about sizes
    **dict.fromkeys(("sym_constrain_range_for_size", "sym_constrain_range", "_assert_scalar"), lambda *_: None),
}

_OF_PYTHON: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "truediv", "neg"), _arithmetic),
    "sym_float": lambda run, node, args, kwargs: Count(None, args[0].number.double()),
    "getitem": lambda run, node, args, kwargs: args[0][args[1]],
}
