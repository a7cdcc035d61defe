"""What a captured program computes of constants alone: values that are known while it is captured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree

from torch_shard._common.fx import args_of, is_random
from torch_shard._common.types import PyTree

aten = torch.ops.aten

_LARGEST = 1 << 30  # bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """A tensor whose value Python has asked for, so that the program is for this value alone.

    Attributes:
        name: Of the buffer; None of a tensor that the callable closes over.
        tensor: The tensor.
        value: What it was before the captured callable.
        version: Of the tensor, then.
    """

    name: str | None
    tensor: torch.Tensor
    value: torch.Tensor
    version: int

    def holds(self) -> bool:
        """Tell whether the tensor has the same value still."""
        return self.tensor._version == self.version or torch.equal(self.tensor, self.value)


class Constants:
    """The values of the tensors in a growing graph that depend on no input: no argument, closure or random number.

    Args:
        graph: Of the trace.
        root: Holds what the `get_attr` nodes name.
        known: Values of some of its nodes.
        given: The value of an input, where a program may depend on it.
    """

    def __init__(
        self,
        graph: Graph,
        root: torch.nn.Module | None,
        known: Mapping[Node, torch.Tensor] = MappingProxyType({}),
        *,
        given: Callable[[Node], torch.Tensor | None] = lambda node: None,
    ) -> None:
        self._graph, self._root, self._given = graph, root, given
        self._values: dict[Node, PyTree] = dict(known)
        self._unknown: set[int] = set()  # storages that something unknown was written to
        self._sources: dict[int, set[Node]] = {}  # inputs that went into a storage
        self._last: Node = graph._root  # pyright: ignore[reportAttributeAccessIssue]

    def value(self, node: Node) -> torch.Tensor | None:
        """The value of a node, or None."""
        while self._last.next is not self._graph._root:  # pyright: ignore[reportAttributeAccessIssue]
            self._last = self._last.next
            self._run(self._last)
        return self._known(node)

    def sources(self, nodes: Sequence[Node]) -> set[Node]:
        """The inputs that the values of nodes come from."""
        return self._sources_of(self._values.get(node) for node in nodes)

    def _sources_of(self, values: PyTree) -> set[Node]:
        return {node for s in _storages(list(values)) for node in self._sources.get(s, ())}

    def _known(self, node: Node) -> PyTree:
        value = self._values.get(node)
        return None if _storages(value) & self._unknown else value

    def _literal(self, node: Node) -> torch.Tensor | None:
        """Value that `torch.tensor(...)` of Python numbers has written down in the graph."""
        found = getattr(self._root, str(node.target)) if node.op == "get_attr" else node.meta.get("value")
        return found if type(found) is torch.Tensor else None

    def _run(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            if (given := self._given(node)) is not None:
                self._keep(node, given, {node})
        elif node.target is aten.lift_fresh_copy.default and (literal := self._literal(args_of(node)[0])) is not None:
            self._values[node] = literal.clone()
        elif node.op == "call_function" and not is_random(node) and not _is_opaque(node) and not _is_large(node):
            if all(self._known(i) is not None for i in inputs):
                args, kwargs = torch_pytree.tree_map_only(Node, self._values.__getitem__, (node.args, node.kwargs))
                value = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
                self._keep(node, value, self._sources_of(self._values[i] for i in inputs))
            elif writes(node):
                self._unknown |= {s for i in inputs for s in _storages(self._values.get(i))}

    def _keep(self, node: Node, value: PyTree, sources: set[Node]) -> None:
        self._values[node] = value
        if sources:
            for storage in _storages(value):
                self._sources[storage] = self._sources.get(storage, set()) | sources


def _is_opaque(node: Node) -> bool:
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


def _storages(value: PyTree) -> set[int]:
    tensors = [t for t in torch_pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}
