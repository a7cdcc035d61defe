"""Reading FX graphs, and trees of tensors: arguments and outputs, which PyTorch types as anything."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument
from torch.utils import _pytree as torch_pytree

from torch_shard._common.types import Operator, PyTree


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a node; nodes stand for their values."""
    return node.args


def target_of(node: Node) -> Operator:
    """The operator that a node of an ATen graph calls."""
    target: Any = node.target
    return target


def operator_name(node: Node) -> str:
    """The name of a node's operator, without namespace and overload; empty for what is not an operator."""
    return getattr(node.target, "_opname", "")


def aten_name(node: Node) -> str:
    """The name of a node's operator if it is one of PyTorch's own; other libraries may call theirs the same."""
    return operator_name(node) if getattr(node.target, "namespace", "") == "aten" else ""


def is_random(node: Node) -> bool:
    """Tell whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_effect(node: Node) -> bool:
    """Tell whether a node does something besides its results, such as printing."""
    return operator_name(node) == "call_for_effect"


def notes_of(node: Node) -> dict[str, str]:
    """What a capture has noted of a node: its pass, the path of its module, its source line, ..."""
    return node.meta.get("custom", {})


def forward_nodes(graphs: Iterable[tuple[str, GraphModule]]) -> Iterator[tuple[str, Node]]:
    """The nodes of the forward passes of graphs that belong to modules, with the path of their own module."""
    for path, graph in graphs:
        for node in graph.graph.nodes:
            if notes_of(node).get("pass") != "backward":
                yield ".".join(filter(None, (path, notes_of(node).get("module")))) or "the loss", node


def outputs_of(graph: Graph) -> list[Any]:
    """The nodes that a graph returns, as a flat list."""
    return list(args_of(graph.output_node())[0])


def fill_in(arguments: Any, value_of: Callable[[Node], Any]) -> Any:
    """Arguments with each node replaced by its value, in plain containers: JAX's pytrees do not know those of fx."""
    if isinstance(arguments, Node):
        return value_of(arguments)
    if isinstance(arguments, dict):
        return {key: fill_in(value, value_of) for key, value in cast(dict[str, Any], arguments).items()}
    if isinstance(arguments, list | tuple):
        filled = [fill_in(value, value_of) for value in cast(Iterable[Any], arguments)]
        return filled if isinstance(arguments, list) else tuple(filled)
    return arguments


def sources_of(node: Node) -> list[Node]:
    """The nodes among the arguments of a node, in order, as often as they stand there."""
    found: list[Node] = []
    fill_in((node.args, node.kwargs), lambda source: found.append(source))
    return found


def depending_on(nodes: Iterable[Node]) -> set[Node]:
    """These nodes of a graph and all that are computed from them."""
    found = set(nodes)
    for node in next(iter(found)).graph.nodes if found else ():
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def check_outputs(before: Graph, after: Graph) -> None:
    """Refuse a graph without mutation whose results have other shapes than those of the graph that it stands for.

    PyTorch loses some writes on the way, of operators that write to several tensors at once.
    """
    for old, new in zip(outputs_of(before), outputs_of(after), strict=False):
        shapes = [tuple(n.meta["val"].shape) for n in (old, new) if isinstance(n, Node) and "val" in n.meta]
        if len(set(shapes)) > 1:
            raise NotImplementedError(
                f"PyTorch cannot write this without writes in place: {new} would have shape {shapes[1]}, not "
                f"{shapes[0]}. Use the results of operators instead of their out= or in-place forms."
            )


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of the tensor that a node stands for."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of the tensor that a node stands for."""
    return node.meta["val"].dtype


def new_before(at: Node, target: Operator, args: tuple[Argument, ...], value: object) -> Node:
    """A new node before `at`, with this fake value."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(target, args)
    node.meta = {**at.meta, "val": value}
    return node


def call_before(at: Node, target: Operator, args: tuple[Argument, ...], shape: tuple[int, ...]) -> Node:
    """A new node before `at`, with a fake value of that shape and the dtype of `at`."""
    return new_before(at, target, args, at.meta["val"].new_empty(shape))


aten = torch.ops.aten


# ATen operators by what they do to values: move none, look at them in other dims, make them, multiply them.
#
# By name where all overloads of an operator do the same. What autocast runs in which precision is another question,
# whose answers are PyTorch's (`autocast_policy.py`): about functions as users call them (`conv2d`), not as captures
# hold them.


COPIES = frozenset({"clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous"})
"""Nothing happens to values and shape; `_to_copy` is not among them, as it may round."""

DIM_VIEWS = frozenset(
    {"t", "transpose", "permute", "unsqueeze", "squeeze", "expand"}
    | {"select", "slice", "split", "split_with_sizes", "unbind"}
)
"""Dims come, go and change places, or a part of them is looked at."""

STRICT_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Dims are cut anew, if strides allow it; by overload, as `aten.view.dtype` reads the bits anew."""

RESHAPES = (*STRICT_VIEWS, aten.reshape.default)
"""Dims are cut anew, whatever the strides: in a functional graph all three do the same."""

FILLS = frozenset({"full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "scalar_tensor"})
"""One number everywhere, known without any tensor's values."""

MATRIX_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
"""Products of the last two dims, and where their two factors begin in the arguments."""

PRODUCTS = frozenset({*MATRIX_PRODUCTS, "linear", "tensordot", "convolution", "einsum"})
"""Sums of products, along whichever dims."""

SCATTERS = frozenset(
    {"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce", "put"}
    | {"index_put", "_unsafe_index_put", "bincount"}
)
"""Values are written, or added, where indices say; all but `bincount` have what is written to as first argument."""

REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "logsumexp", "prod", "any", "all", "argmax", "argmin"})
"""One result instead of all elements along some dims, which are the second argument."""


def is_pointwise(node: Node) -> bool:
    """Tell whether an operator does the same to each element."""
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return aten_name(node) != "" and (tagged or aten_name(node) in COPIES or aten_name(node) == "_to_copy")


def tensors_in(tree: PyTree) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in torch_pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
