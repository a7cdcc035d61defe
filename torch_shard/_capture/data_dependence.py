"""Values that a captured callable asks of a tensor: known from the program alone, not needed, or refused."""

import contextlib
import dataclasses
import operator
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_shard._capture.checks import leads_only_to_raise
from torch_shard._capture.masks import SELECTIONS, Masks
from torch_shard._capture.provenance import current_user_line
from torch_shard._capture.ragged import PLACE
from torch_shard._common.fx import args_of, is_random
from torch_shard._common.overrides import instead_of_attribute
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

DEVICE_OF = torch.ops.prim.device.default  # PyTorch asks fakes this all the time; the answer needs no other mode

_TORCH = pathlib.Path(torch.__file__).parent

_LAYERS = ("fx", "_subclasses", "_dynamo", "_compile.py", "_ops.py", "overrides.py", "utils")

_CHECK_ALL = torch._check_tensor_all_with.__code__  # it hands the value on to what raises

_MACHINERY = (*(str(_TORCH / layer) for layer in _LAYERS), str(pathlib.Path(__file__).parent.parent))


class DataDependence(TorchDispatchMode):
    """Answers for tensors that have no value.

    A tensor made from Python numbers alone has one: it is computed. A check that would only raise an error passes:
    a compiled program cannot raise. Anything else goes on to the tracer, which refuses it.

    Args:
        node_of: The node of a traced tensor.
        root: Gives the module that holds what the `get_attr` nodes of the trace name.
    """

    def __init__(
        self, node_of: Callable[[torch.Tensor], Node | None], root: Callable[[], torch.nn.Module | None]
    ) -> None:
        super().__init__()
        self._node_of, self._root = node_of, root
        self._masks = Masks(node_of)
        self._constants: Constants | None = None
        self.skipped: list[str] = []
        """Places of the checks that were passed."""
        self.asked: str | None = None
        """The line that first asked for what nobody knows, and may have caught the refusal."""
        self.axes: tuple[str, ...] = ()
        """Named axes along which random operators draw other numbers."""
        self.position = 0
        """Number of random operators that have run; a checkpoint sets it back to draw the same numbers again."""

    def __enter__(self) -> "DataDependence":
        _CURRENT.stack.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _CURRENT.stack.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Operator, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func is DEVICE_OF:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default or func is aten.equal.default:
            answer = self._answer(func, args)
            if answer is not None:
                return answer
        func, args = self._masks.unify(func, args)
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.asked = self.asked or current_user_line()
            raise
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draw(result)
        if func in SELECTIONS and (node := self._node_of(result)) is not None:
            node.meta[PLACE] = current_user_line()
        return result

    def _note_draw(self, result: PyTree) -> None:
        first = torch_pytree.tree_leaves(result)[0]
        node = self._node_of(first) if isinstance(first, torch.Tensor) else None
        if node is not None:
            node = args_of(node)[0] if node.target is operator.getitem else node
            node.meta["random_place"], node.meta["random_axes"] = self.position, self.axes
        self.position += 1

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that depends on no input, or None."""
        node = self._node_of(tensor)
        if node is None:
            return None
        self._constants = self._constants or Constants(node.graph, self._root())
        with _disable_current_modes(), torch.no_grad():
            return self._constants.value(node)

    def _answer(self, func: Operator, args: Sequence[torch.Tensor]) -> Any:
        values = [value for tensor in args if (value := self.known(tensor)) is not None]
        if len(values) == len(args):
            with _disable_current_modes():
                return func(*values)
        frame = _asking_frame()
        if frame is None or (func is aten._local_scalar_dense.default and args[0].dtype is not torch.bool):
            return None
        truth = True if frame.f_code is _CHECK_ALL else leads_only_to_raise(frame)
        if truth is not None:
            self.skipped.append(current_user_line())
        return truth


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[DataDependence] = []


_CURRENT = _Current()


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the capture under way that depends on no input of it, or None."""
    return _CURRENT.stack[-1].known(tensor) if _CURRENT.stack else None


def skip_draws(count: int) -> int:
    """Let the capture under way go over random operators that run elsewhere; returns the position of the first."""
    values = _CURRENT.stack[-1]
    values.position += count
    return values.position - count


def num_draws() -> int:
    """Number of random operators that the capture under way has run."""
    return _CURRENT.stack[-1].position


@contextlib.contextmanager
def drawing_along(axes: tuple[str, ...]) -> Iterator[None]:
    """Let random operators of the capture under way draw other numbers for each index along these named axes."""
    values = _CURRENT.stack[-1]
    before, values.axes = values.axes, tuple(dict.fromkeys((*values.axes, *axes)))
    try:
        yield
    finally:
        values.axes = before


@dataclasses.dataclass(frozen=True)
class RandomState:
    """Result of `torch.get_rng_state` in a capture: a position in the stream of random numbers."""

    position: int


@instead_of_attribute(torch, "get_rng_state")
def get_rng_state() -> RandomState:
    """The position of the capture under way."""
    return RandomState(_CURRENT.stack[-1].position)


@instead_of_attribute(torch, "set_rng_state")
def set_rng_state(state: object) -> None:
    """Go back to a position, so that what is computed again draws the same numbers."""
    if not isinstance(state, RandomState):
        raise NotImplementedError(
            f"{current_user_line()}\nHere torch.set_rng_state is given a state from outside of the captured function, "
            "whose stream JAX cannot follow. Take it with torch.get_rng_state within the function."
        )
    _CURRENT.stack[-1].position = state.position


@instead_of_attribute(torch, "manual_seed")
@instead_of_attribute(torch, "seed")
def refuse_seed(*args: object, **kwargs: object) -> object:
    """`torch.manual_seed` and `torch.seed` in a capture."""
    raise NotImplementedError(
        f"{current_user_line()}\nHere torch is seeded within a captured function. The random numbers of a compiled "
        "program come from its own key (step.init(seed=...), or torch.manual_seed before an adapter is called); to "
        "draw the same numbers twice, use torch.get_rng_state and torch.set_rng_state within the function."
    )


def _asking_frame() -> FrameType | None:
    """The Python function that asked for the value, below the layers of PyTorch's dispatch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame


class Constants:
    """The values of the tensors in a growing graph that depend on no input: no argument, closure or random number."""

    def __init__(
        self, graph: Graph, root: torch.nn.Module | None, known: Mapping[Node, torch.Tensor] = MappingProxyType({})
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

    def _literal(self, node: Node) -> torch.Tensor | None:
        """Value that `torch.tensor(...)` of Python numbers has written down in the graph."""
        found = getattr(self._root, str(node.target)) if node.op == "get_attr" else node.meta.get("value")
        return found if type(found) is torch.Tensor else None

    def _run(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if node.target is aten.lift_fresh_copy.default and (literal := self._literal(args_of(node)[0])) is not None:
            self._values[node] = literal.clone()
        elif node.op == "call_function" and not is_random(node) and not _is_opaque(node):
            if all(self._known(i) is not None for i in inputs):
                args, kwargs = torch_pytree.tree_map_only(Node, self._values.__getitem__, (node.args, node.kwargs))
                self._values[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            elif _writes(node):
                self._unknown |= {s for i in inputs for s in _storages(self._values.get(i))}


def _is_opaque(node: Node) -> bool:
    """Tell whether only JAX can run it."""
    return getattr(node.target, "namespace", "") == "torch_shard"


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _storages(value: PyTree) -> set[int]:
    tensors = [t for t in torch_pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}
