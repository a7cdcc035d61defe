"""What a captured program computes of constants alone: values that are known while it is captured."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree

from torch_shard._common.fx import args_of, is_random
from torch_shard._common.operator_families import STRICT_VIEWS
from torch_shard._common.types import PyTree

aten = torch.ops.aten

_LARGEST = 1 << 30  # bytes


class Constants:
    """The values of the tensors in a growing graph that depend on no input: no argument, closure or random number.

    Args:
        graph: Of the trace.
        root: Holds what the `get_attr` nodes name.
        known: Values of some of its nodes.
    """

    def __init__(
        self,
        graph: Graph,
        root: torch.nn.Module | None,
        known: Mapping[Node, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._graph, self._root = graph, root
        self._values: dict[Node, PyTree] = dict(known)
        self._unknown: set[int] = set()  # storages that something unknown was written to
        self._last: Node = graph._root  # pyright: ignore[reportAttributeAccessIssue]

    def value(self, node: Node) -> torch.Tensor | None:
        """The value of a node, or None."""
        while self._last.next is not self._graph._root:  # pyright: ignore[reportAttributeAccessIssue]
            self._last = self._last.next
            self._run(self._last)
        return self._known(node)

    def _known(self, node: Node) -> PyTree:
        value = self._values.get(node)
        return None if _storages(value) & self._unknown else value

    def _run(self, node: Node) -> None:
        inputs = node.all_input_nodes
        is_copy = node.target is aten.lift_fresh_copy.default
        if is_copy and (literal := literal_of(args_of(node)[0], self._root)) is not None:
            self._values[node] = literal.clone()
        elif node.op == "call_function" and not is_random(node) and not is_opaque(node) and not _is_large(node):
            if all(self._known(i) is not None for i in inputs):
                args, kwargs = torch_pytree.tree_map_only(Node, self._values.__getitem__, (node.args, node.kwargs))
                # An expanded value has a view in the functional graph, where nothing is written to, and not in torch.
                run = aten.reshape.default if node.target in STRICT_VIEWS else node.target
                self._values[node] = run(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            elif writes(node):
                self._unknown |= {s for i in inputs for s in _storages(self._values.get(i))}


def literal_of(node: Node, root: torch.nn.Module | None) -> torch.Tensor | None:
    """The value that `torch.tensor(...)` of Python numbers has written down in a graph, or None."""
    found = getattr(root, str(node.target)) if node.op == "get_attr" else node.meta.get("value")
    return found if type(found) is torch.Tensor else None


def is_opaque(node: Node) -> bool:
    """Tell whether only JAX can run it."""
    return getattr(node.target, "namespace", "") == "torch_shard"


def _is_large(node: Node) -> bool:
    """Tell whether a result takes more memory than its value is worth."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > _LARGEST


def writes(node: Node) -> bool:
    """Tell whether an operator writes to a tensor that it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def written_by(node: Node) -> set[int]:
    """The storages of the fakes that an operator writes to."""
    if not writes(node):
        return set()
    arguments = node.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    given = zip(arguments, node.args, strict=False)
    named = ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)
    written = [value for argument, value in (*given, *named) if argument.alias_info and argument.alias_info.is_write]
    return {
        s for source in torch_pytree.tree_leaves(written) if isinstance(source, Node) for s in traced_storages(source)
    }


def _storages(value: PyTree) -> set[int]:
    tensors = [t for t in torch_pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


def traced_storages(node: Node) -> set[int]:
    """The storages of the fakes that a node stands for: what is written to one of them changes it."""
    return _storages(node.meta.get("val"))


def bits_of(value: torch.Tensor) -> str:
    """Dtype, shape and a digest of the values of a tensor: equal for equal ones."""
    values = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hash(values.view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {tuple(value.shape)} {digest:x}"
