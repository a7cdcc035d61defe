"""What a captured program knows besides its inputs: values of constants, literals, and tensors that it closes over."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._common.fx import STRICT_VIEWS, args_of, is_random, outputs_of, tensors_in
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


@contextlib.contextmanager
def in_eager_torch() -> Iterator[None]:
    """Compute values within a capture, of which it sees nothing."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


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
    return {t.untyped_storage()._cdata for t in tensors_in(value)}


def traced_storages(node: Node) -> set[int]:
    """The storages of the fakes that a node stands for: what is written to one of them changes it."""
    return _storages(node.meta.get("val"))


def bits_of(value: torch.Tensor) -> str:
    """Dtype, shape and a digest of the values of a tensor: equal for equal ones."""
    values = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hash(values.view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {tuple(value.shape)} {digest:x}"


FAR = 1 << 20
"""Places in the random stream from here on belong to operators that PyTorch has made of others."""

_LITERAL = "_torch_shard_literal"


def is_literal(tensor: torch.Tensor) -> bool:
    """Tell whether it is what a captured `torch.tensor(...)` wrote down: no one else has it, and no one changes it."""
    return _LITERAL in vars(tensor)


def note_literal(tensor: torch.Tensor) -> None:
    """Note that a tensor is a constant of the program alone."""
    vars(tensor)[_LITERAL] = True


def constants_to_inputs(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Turn the tensors that the trace met on its way into further inputs, so that their values stay live."""
    found: dict[str, torch.Tensor] = {}
    placeholders: dict[str, torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr" or not isinstance(value := getattr(graph, node.target), torch.Tensor):
            continue
        if node.target not in found:
            found[node.target] = value
            if all(user.target is aten.lift_fresh_copy.default for user in node.users):
                note_literal(value)
            with graph.graph.inserting_before(node):
                placeholders[node.target] = graph.graph.placeholder(f"closure{len(found)}")
                placeholders[node.target].meta["value"] = value
        node.replace_all_uses_with(placeholders[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(found.values())


def return_writes(graph: torch.fx.GraphModule, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
    """Make the new values of inputs that were written in place outputs; return the positions of those inputs."""
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    writes = {}
    for node in list(graph.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in inputs:
            writes[inputs.index(node.args[0])] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
    outputs = outputs_of(graph.graph)[:num_outputs]
    graph.graph.output_node().args = ([*outputs, *writes.values()],)
    if shapes := [str(tuple(inputs[p].meta["val"].shape)) for p in writes if p >= num_inputs]:
        raise NotImplementedError(
            f"The captured function writes in place to tensors that it closes over, of shapes {', '.join(shapes)}, and "
            "the compiled program could not keep that. make_train_step keeps parameters and buffers (register_buffer), "
            "such as the statistics of batch norms in train mode, which eval() leaves as they are; elsewhere write to "
            "a clone and return it."
        )
    return tuple(writes)


def decomposes_draws(graph: torch.fx.Graph) -> bool:
    """Tell whether PyTorch has made random operators of a graph of others."""
    return any(node.meta.get("random_place", 0) >= FAR for node in graph.nodes)


def carry_random_places(before: torch.fx.Graph, after: torch.fx.Graph) -> None:
    """Give each random node of a rewritten graph the place in the random stream that it had before."""
    old, new = ([n for n in graph.nodes if is_random(n)] for graph in (before, after))
    places = [n.meta.get("random_place") for n in old]
    axes = [n.meta.get("random_axes", ()) for n in old]
    if len(old) != len(new) or None in places:
        if len(set(places)) != len(places):
            raise NotImplementedError(
                "A random operator that PyTorch decomposes is computed again in a checkpoint, and would draw other "
                "numbers there. Use torch.utils.checkpoint without it, or torch_shard.jax_checkpoint."
            )
        if len(set(axes)) > 1:
            raise NotImplementedError(
                "A random operator that PyTorch decomposes draws within fold_in_axis, and others do not. Fold the axis "
                "for the whole function (fold_in_axes of the adapter), or draw with torch.rand and its kin."
            )
        places = [(number + 1) * FAR for number in range(len(new))]
        axes = [axes[0] if axes else ()] * len(new)
    for node, place, along in zip(new, places, axes, strict=True):
        node.meta["random_place"], node.meta["random_axes"] = place, along
