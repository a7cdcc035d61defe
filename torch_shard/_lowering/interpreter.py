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
    first_nodes: dict[object, Node] = {}
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        target = target_of(node)
        if find_lowering(target) is None:
            first_nodes.setdefault(target, node)
    return list(first_nodes.values())


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
    outputs = outputs_of(graph.graph)
    keys_at = _keys_of(nodes)

    def run(
        key: jax.Array | None, *arrays: jax.Array, place: int | jax.Array = 0, split: RowSplit | None = None
    ) -> list[PyTree]:
        values: dict[Node, PyTree] = dict(zip(inputs, arrays, strict=True))
        for node, array in values.items():
            assert _fits(node, array), (node, array.dtype, node.meta["val"])

        with matmul_precision():
            keys = keys_at(key, place)
            for node, sources, operate, random_place in steps:
                # Whose key was made with the others folds in no place.
                place_of_node = None
                if random_place is not None and node not in keys:
                    place_of_node = place + random_place
                operands = [values[source] for source in sources]
                values[node] = operate(keys.get(node, key), place_of_node, operands, split)
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

    target = target_of(node)
    own = own_of(node)
    fake = node.meta.get("val")
    lowering = find_lowering(target)
    assert lowering is not None, target
    if own is None:
        refuse_generator(target, dict(node.kwargs))
    if target in _STRIDED:
        _refuse_strides(node)

    # Device, layout and the like mean nothing to JAX; a function of the user's is given them all the same.
    kwargs = {name: value for name, value in node.kwargs.items() if own or name not in STORAGE_KWARGS}
    arguments = torch_pytree.tree_map_only(torch.dtype, _narrow, (tuple(node.args), kwargs))
    to_numbers = exact_integers(target, fake)
    drawn = _draws(node)
    scope = _scope_of(node)

    def operate(key: Key, place: Place, values: Sequence[PyTree], split: RowSplit | None = None) -> PyTree:
        constraints = constraints_of(node, split)
        operands: list[PyTree] = []
        for number, value in enumerate(values):
            operands.append(to_numbers(laid(value, constraints.get(number, ()), split)))
        remaining = iter(operands)
        args, named = fill_in(arguments, lambda _: next(remaining))
        if target in ON_MESH:
            named = {**named, "split": split}

        # The scope names the operator and its module in profiles, and in the text that previews read.
        with jax.named_scope(scope):
            result = lowering(*drawn(key, place), *args, **named)
            if own is not None:
                own.check(fake, result)
            result = conform(target, fake, result, node=node)
            return laid(result, constraints.get(RESULT, ()), split)

    return operate


def _draws(node: Node) -> Callable[[Key, Place], tuple[jax.Array, ...]]:
    """What gives a node its random key, first of its arguments, if it draws."""
    target = target_of(node)
    axes = node.meta.get("random_axes", ())

    def drawn(key: Key, place: Place) -> tuple[jax.Array, ...]:
        if target not in RANDOM:
            return ()
        assert key is not None, target
        if place is not None:
            key = jax.random.fold_in(fold_axes(key, axes), place)
        return (key,)

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

    def as_it_is(value: PyTree) -> PyTree:
        return value

    if not isinstance(fake, torch.Tensor) or not _computes_in_its_result(target):
        return as_it_is
    dtype = jax_dtype(fake.dtype)
    if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return as_it_is
    is_wide = dtype in ("float64", "complex128")

    def exact(value: PyTree) -> PyTree:
        if not isinstance(value, jax.Array) or jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
            return value
        if value.dtype == bool:
            return numbers_of(value, dtype)
        return value.astype(dtype) if is_wide else value

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
        results: list[PyTree] = []
        for fake_part, part in zip(fake, value, strict=True):
            is_tensor = isinstance(fake_part, torch.Tensor)
            results.append(_conform_one(target, fake_part, part, node) if is_tensor else part)
        return results
    return value


def _conform_one(target: object, fake: torch.Tensor, value: PyTree, node: Node | None) -> PyTree:
    if value is None:
        return None
    value = jax.numpy.asarray(value)
    # Without elements, the shape is all that there is.
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
    chosen = jax.config.values["jax_default_matmul_precision"]
    if chosen is None:
        name = torch.get_float32_matmul_precision()
        # What torch calls medium, products in bfloat16, is JAX's default on TPUs.
        chosen = "default" if name == "medium" else name
    return jax.default_matmul_precision(chosen)


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
        promised = [
            (tuple(fake.shape), jax_dtype(fake.dtype)) for fake in torch_pytree.tree_leaves(fakes) if fake is not None
        ]
        returned = [(jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in jax.tree.leaves(values)]
        if returned != promised:
            raise ValueError(
                f"{self.fn} must return what {self.promise}: {_shown(promised)}. It returned {_shown(returned)}. "
                "Correct one of the two."
            )


def _shown(results: Iterable[tuple[tuple[int, ...], object]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in results) or "nothing"


def is_own(op: Operator) -> bool:
    """Tell whether the lowering of an operator is the user's."""
    return isinstance(getattr(LOWERINGS.get(op), "own", None), Own)


def own_of(node: Node) -> Own | None:
    """The function of the user's that runs a node, if one does."""
    function = node.meta.get("called")
    if not function and node.op == "call_function":
        function = LOWERINGS.get(target_of(node))
    return getattr(function, "own", None)


def report_own(graphs: Iterable[GraphModule]) -> list[str]:
    """Lines that say how often the forward passes of these graphs call functions of the user's."""
    counts = collections.Counter[Own]()
    for graph in graphs:
        for node in graph.graph.nodes:
            own = own_of(node)
            if own is not None and notes_of(node).get("pass") != "backward":
                counts[own] += 1

    lines: list[str] = []
    for own, count in counts.items():
        calls = "1 call runs" if count == 1 else f"{count} calls run"
        lines.append(f"{own.name}: {calls} as {own.fn}")
    return lines
