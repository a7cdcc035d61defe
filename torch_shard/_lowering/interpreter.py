"""An ATen graph as a function of JAX arrays: each node by its lowering, each result checked against the fake one."""

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as torch_pytree

from torch_shard._common.dtypes import jax_dtype, numbers_of, torch_dtype
from torch_shard._common.fx import args_of, fill_in, notes_of, outputs_of, sources_of, target_of
from torch_shard._common.random import Key, fold_axes
from torch_shard._common.types import Operator, PyTree
from torch_shard._lowering.constraints import RESULT, constraints_of, laid
from torch_shard._lowering.ops import LOWERINGS, ON_MESH, RANDOM, STORAGE_KWARGS, find_lowering, refuse_generator
from torch_shard._lowering.rows import RowSplit

Lowered = Callable[..., list[PyTree]]

Place = int | jax.Array | None
"""Place of an operator in the stream of random numbers; None if it draws none, or is given the key of its place."""


def missing_lowerings(nodes: Iterable[Node]) -> list[Node]:
    """Nodes without a lowering, the first of each operator."""
    found: dict[object, Node] = {}
    for node in nodes:
        target = target_of(node)
        if node.op == "call_function" and node.target is not operator.getitem and find_lowering(target) is None:
            found.setdefault(target, node)
    return list(found.values())


def lower(graph: GraphModule) -> Lowered:
    """The function `(key, *arrays, place=0, split=None) -> list of arrays` that `graph` means.

    Args:
        graph: Functional, with lowerings for all its operators (see `missing_lowerings`).

    Returns:
        A function to be traced by JAX. `key` is a random key, or None where the graph draws no random numbers; `place`
        is where the graph begins in the stream of random numbers, int32 scalar. `split` is how the rows of the batch
        lie on the mesh of a step.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    steps = [(node, sources_of(node), operation(node), node.meta.get("random_place")) for node in nodes]
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs, keys_at = outputs_of(graph.graph), _keys_of(nodes)

    def run(
        key: jax.Array | None, *arrays: jax.Array, place: int | jax.Array = 0, split: RowSplit | None = None
    ) -> list[PyTree]:
        values: dict[Node, PyTree] = dict(zip(inputs, arrays, strict=True))
        for node, array in values.items():
            assert _fits(node, array), (node, array.dtype, node.meta["val"])
        with matmul_precision():
            keys = keys_at(key, place)
            for node, sources, operate, own_place in steps:
                at = None if own_place is None or node in keys else place + own_place
                values[node] = operate(keys.get(node, key), at, [values[source] for source in sources], split)
        return [values[node] for node in outputs]

    return run


def _keys_of(nodes: Sequence[Node]) -> Callable[[Key, int | jax.Array], dict[Node, jax.Array]]:
    """The keys of nodes that draw, by one call of threefry: XLA:TPU takes long to compile a call for each.

    Nodes whose key differs along named axes fold it on their own.
    """
    drawing = [node for node in nodes if "random_place" in node.meta and not node.meta["random_axes"]]
    places = np.array([node.meta["random_place"] for node in drawing], np.int32)

    def keys_at(key: Key, start: int | jax.Array) -> dict[Node, jax.Array]:
        if key is None or len(drawing) < 2:
            return {}
        folded = jax.vmap(jax.random.fold_in, (None, 0))(key, start + places)
        return {node: folded[number] for number, node in enumerate(drawing)}

    return keys_at


def draws_random(graph: GraphModule) -> bool:
    """Tell whether the graph needs a random key."""
    return any("random_place" in node.meta for node in graph.graph.nodes)


Operate = Callable[..., PyTree]
"""`(random key, place in its stream, values of the sources, how rows lie) -> value`."""


def operation(node: Node) -> Operate:
    """The function of a node."""
    if node.target is operator.getitem:
        index = args_of(node)[1]
        return lambda key, place, values, split=None: values[0][index]
    target, own, fake = target_of(node), own_of(node), node.meta.get("val")
    lowering = find_lowering(target)
    assert lowering is not None, target
    if own is None:
        refuse_generator(target, dict(node.kwargs))
    if target in _STRIDED:
        _refuse_strides(node)
    kept = {name: value for name, value in node.kwargs.items() if own or name not in STORAGE_KWARGS}
    static_args, kwargs = torch_pytree.tree_map_only(torch.dtype, _narrow, (tuple(node.args), kept))
    exact, drawn, scope = exact_integers(target, fake), _draws(node), _scope_of(node)

    def operate(key: Key, place: Place, values: Sequence[PyTree], split: RowSplit | None = None) -> PyTree:
        constraints = constraints_of(node, split)
        values = [laid(value, constraints.get(at, ()), split) for at, value in enumerate(values)]
        given = map(exact, values)
        args, named = fill_in((static_args, kwargs), lambda _: next(given))
        on_mesh = {"split": split} if target in ON_MESH else {}
        with jax.named_scope(scope):
            value = lowering(*drawn(key, place), *args, **named, **on_mesh)
            if own is not None:
                own.check(fake, value)
            return laid(conform(target, fake, value, node=node), constraints.get(RESULT, ()), split)

    return operate


def _draws(node: Node) -> Callable[[Key, Place], tuple[jax.Array, ...]]:
    """What gives a node its random key, first of its arguments, if it draws."""
    target, axes = target_of(node), node.meta.get("random_axes", ())

    def drawn(key: Key, place: Place) -> tuple[jax.Array, ...]:
        if target not in RANDOM:
            return ()
        assert key is not None, target
        return (key if place is None else jax.random.fold_in(fold_axes(key, axes), place),)

    return drawn


def _scope_of(node: Node) -> str:
    notes = notes_of(node)
    return "/".join(filter(None, (notes.get("pass"), notes.get("module"), target_of(node)._opname)))


def _fits(node: Node, array: jax.Array) -> bool:
    fake = node.meta.get("val")
    return not isinstance(fake, torch.Tensor) or array.dtype == jax_dtype(fake.dtype)


_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def _refuse_strides(node: Node) -> None:
    """Refuse to follow strides through memory that only PyTorch has: JAX arrays hold their own elements, in order."""
    source = args_of(node)[0].meta["val"]
    if not source.is_contiguous() or source.storage_offset():
        raise NotImplementedError(
            f"{node.target} reads the memory behind a view ({place_of(node)}), and JAX arrays have no memory behind "
            "them. Call .contiguous().clone() on the view first, or index it."
        )


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of what JAX will hold: torchax's lowerings warn when asked for 64 bits with x64 off."""
    return torch_dtype(jax_dtype(dtype))


def exact_integers(target: object, fake: PyTree) -> Callable[[PyTree], PyTree]:
    """What makes floating-point numbers of operands where PyTorch computes in those.

    Of integers, torchax would make float32 where that is float64. Of NaN times False, JAX would make 0.
    """
    dtype = jax_dtype(fake.dtype) if isinstance(fake, torch.Tensor) else None
    if dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.inexact) or not _computes_in_its_result(target):
        return lambda value: value
    is_wide = dtype in ("float64", "complex128")

    def exact(value: PyTree) -> PyTree:
        if not isinstance(value, jax.Array) or jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
            return value
        return numbers_of(value, dtype) if value.dtype == bool else value.astype(dtype) if is_wide else value

    return exact


def _computes_in_its_result(target: object) -> bool:
    """Tell whether an operator takes all its operands in the dtype of its result: it has no masks among them."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return target._opname not in ("where", "masked_fill", "native_dropout_backward")


def conform(target: object, fake: PyTree, value: PyTree, *, node: Node | None = None) -> PyTree:
    """Give each result the dtype that PyTorch gives it; a shape that is not PyTorch's is our bug."""
    if isinstance(fake, torch.Tensor):
        return _conform_one(target, fake, value, node)
    if isinstance(fake, Sequence):
        pairs = zip(fake, value, strict=True)
        return [_conform_one(target, f, v, node) if isinstance(f, torch.Tensor) else v for f, v in pairs]
    return value


def _conform_one(target: object, fake: torch.Tensor, value: PyTree, node: Node | None) -> PyTree:
    if value is None:
        return None
    value = jax.numpy.asarray(value)
    if value.size == fake.numel() == 0:
        value = value.reshape(tuple(fake.shape))
    if value.shape != tuple(fake.shape) and not (node is not None and _is_unspecified(node, fake)):
        raise NotImplementedError(
            f"The lowering of {target} gave shape {value.shape} where PyTorch gives {tuple(fake.shape)}. "
            "This is a bug of torch_shard: please report the operator and its arguments."
        )
    dtype = jax_dtype(fake.dtype)
    return value if value.dtype == dtype else value.astype(dtype)


def _is_unspecified(node: Node, fake: torch.Tensor) -> bool:
    """Saved statistics that differ between kernels and are read by nobody."""
    return fake.numel() == 0 and not any(user.users for user in node.users)


def matmul_precision() -> AbstractContextManager[object]:
    """Torch's own setting for float32 products, unless JAX has been told otherwise."""
    chosen, name = jax.config.values["jax_default_matmul_precision"], torch.get_float32_matmul_precision()
    return jax.default_matmul_precision(chosen or ("default" if name == "medium" else name))


def place_of(node: Node) -> str:
    """Module path and source line of a node, where the capture recorded them."""
    return notes_of(node).get("where", "(place unknown)")


# Functions of a user's own among those that run a program: what they have to return, and how often they are called.


@dataclasses.dataclass(frozen=True)
class Own:
    """A function of the user's.

    Attributes:
        name: What it stands for, an operator or a function of torch.
        fn: Which it is, with its file and line.
        promise: What it has to return.
    """

    name: str
    fn: str
    promise: str

    def check(self, fakes: PyTree, values: PyTree) -> None:
        """Refuse results that are others than those which PyTorch knows of."""
        tensors = [f for f in torch_pytree.tree_leaves(fakes) if f is not None]
        wanted = [(tuple(f.shape), jax_dtype(f.dtype)) for f in tensors]
        found = [(jax.numpy.shape(v), jax.numpy.result_type(v)) for v in jax.tree.leaves(values)]
        if found != wanted:
            raise ValueError(
                f"{self.fn} must return what {self.promise}: {_shown(wanted)}. It returned {_shown(found)}. Correct "
                "one of the two."
            )


def _shown(results: Iterable[tuple[tuple[int, ...], object]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in results) or "nothing"


def is_own(op: Operator) -> bool:
    """Tell whether the lowering of an operator is the user's."""
    return isinstance(getattr(LOWERINGS.get(op), "own", None), Own)


def own_of(node: Node) -> Own | None:
    """The function of the user's that runs a node, if one does."""
    runs = node.meta.get("called") or (LOWERINGS.get(target_of(node)) if node.op == "call_function" else None)
    return getattr(runs, "own", None)


def report_own(graphs: Iterable[GraphModule]) -> list[str]:
    """Lines that say how often the forward passes of these graphs call functions of the user's."""
    nodes = (n for graph in graphs for n in graph.graph.nodes if notes_of(n).get("pass") != "backward")
    counts = collections.Counter(own for own in map(own_of, nodes) if own is not None)
    return [f"{own.name}: {n} call{'s' * (n > 1)} run{'s' * (n == 1)} as {own.fn}" for own, n in counts.items()]
