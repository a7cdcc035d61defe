"""Values that a captured callable asks of a tensor: known from the program alone, not needed, or refused."""

import contextlib
import operator
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import Node
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from torch_shard._capture.checks import leads_only_to_raise
from torch_shard._capture.constants import Asked, Constants
from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.masks import SELECTIONS, Masks
from torch_shard._capture.provenance import current_user_line
from torch_shard._capture.ragged import PLACE
from torch_shard._common.fx import args_of
from torch_shard._common.overrides import instead_of
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

DEVICE_OF = torch.ops.prim.device.default  # PyTorch asks fakes this all the time; the answer needs no other mode

_TORCH = pathlib.Path(torch.__file__).parent

_LAYERS = ("fx", "_subclasses", "_dynamo", "_compile.py", "_ops.py", "overrides.py", "utils")

_CHECK_ALL = torch._check_tensor_all_with.__code__  # it hands the value on to what raises

_MACHINERY = (*(str(_TORCH / layer) for layer in _LAYERS), str(pathlib.Path(__file__).parent.parent))


_LARGEST = 1 << 20  # elements of a buffer whose value Python may ask for

_OF_UNKNOWN_SIZE = frozenset(
    {aten.nonzero.default, aten.repeat_interleave.Tensor, aten._unique2.default, aten.unique_consecutive.default}
)


def _tensors(args: PyTree) -> list[torch.Tensor]:
    return [t for t in torch_pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]


Traced = tuple[Node, Callable[[Node], torch.Tensor | None]]


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
        self._masks = Masks(node_of, lambda mask: self.values([mask]))
        self._given: dict[Node, tuple[str, Callable[[], torch.Tensor]]] | None = None
        self._top: torch.nn.Module | None = None
        self._inputs: dict[Any, Asked] = {}
        self._asked: dict[Any, Asked] = {}
        self._constants: Constants | None = None
        self._mode = None
        self.skipped: list[str] = []
        """Places of the checks that were passed."""
        self.asked: str | None = None
        """The line that first asked for what nobody knows, and may have caught the refusal."""
        self.axes: tuple[str, ...] = ()
        """Named axes along which random operators draw other numbers."""
        self.position = 0
        """Number of random operators that have run; a checkpoint sets it back to draw the same numbers again."""

    def __enter__(self) -> "DataDependence":
        if not _CURRENT.stack:
            _CURRENT.made = list(filter(_is_alive, _CURRENT.made))
        _CURRENT.stack.append(self)
        self._mode = current_mode()
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
        if func in _OF_UNKNOWN_SIZE and (values := self.values(_tensors(args))) is not None:
            return self._literal(func, values, args, kwargs)
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.asked = self.asked or current_user_line()
            raise
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draw(result)
        made = result if isinstance(result, list | tuple) else [result]
        _CURRENT.made += [weakref.ref(tensor) for tensor in made if isinstance(tensor, torch.Tensor)]
        if func in SELECTIONS and isinstance(result, torch.Tensor) and (node := self._node_of(result)) is not None:
            node.meta[PLACE] = current_user_line()
        return result

    def _literal(self, func: Operator, values: list[torch.Tensor], args: PyTree, kwargs: PyTree) -> PyTree:
        """The result of an operator on values that are known, as a constant of the program."""
        of = iter(values)
        known = torch_pytree.tree_map_only(torch.Tensor, lambda _: next(of), args)
        with torch._C.DisableTorchFunction():
            with _disable_current_modes(), torch.no_grad():
                result = func(*known, **(kwargs or {}))
            return torch_pytree.tree_map_only(torch.Tensor, aten.lift_fresh_copy.default, result)

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
        return self._constant(node)

    def constant(self, tensor: torch.Tensor, around: Sequence["DataDependence"]) -> torch.Tensor | None:
        """The value of a tensor that depends on no input of this capture, nor of those around it.

        Within another capture, only what a rehearsal knows too, which writes no graph: views of constants around.
        """
        if around or self._node_of(tensor) is None:
            return self._constant_around(tensor, around)
        return self.known(tensor)

    def traced(self, tensor: torch.Tensor, around: Sequence["DataDependence"]) -> Traced | None:
        """The node of a tensor in the outermost capture, and what tells the value of a node there if it is constant."""
        if not around:
            node = self._node_of(tensor)
            return None if node is None else (node, self._constant)
        original = tensor if self._mode is None else self._mode.original(tensor)
        if original is tensor and tensor._base is not None and _is_all_of(tensor, tensor._base):
            return self.traced(tensor._base, around)
        return None if original is tensor else around[-1].traced(original, around[:-1])

    def _constant(self, node: Node) -> torch.Tensor | None:
        value, sources = self._computed(node)
        return None if sources else value

    def _constant_around(self, tensor: torch.Tensor, around: Sequence["DataDependence"]) -> torch.Tensor | None:
        """The value of a tensor that is a constant around this capture, or a view of one, where there is no graph."""
        original = tensor if self._mode is None else self._mode.original(tensor)
        if original is not tensor:
            return around[-1].constant(original, around[:-1]) if around else None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if (base := tensor._base) is None or (value := self._constant_around(base, around)) is None:
                return None
            if value.stride() != base.stride():
                return None
            offset = value.storage_offset() + tensor.storage_offset() - base.storage_offset()
            return value.as_strided(tensor.shape, tensor.stride(), offset)

    def _constants_of(self, node: Node) -> Constants:
        if self._constants is None:
            self._top = self._root()
            self._constants = Constants(node.graph, self._top, given=self._input)
        return self._constants

    def specialise(self, buffers: Mapping[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]) -> None:
        """Let Python ask for the values of buffers and of what the callable closes over.

        Args:
            buffers: By name, the fake of each in the capture, and what gives its value.
        """
        nodes = {name: self._node_of(fake) for name, (fake, _) in buffers.items()}
        self._given = {node: (name, buffers[name][1]) for name, node in nodes.items() if node is not None}

    @property
    def specialised(self) -> tuple[Asked, ...]:
        """What Python has asked for."""
        return tuple(self._asked.values())

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The values of tensors, if all are known; the program is then for these alone."""
        nodes = [self._node_of(tensor) for tensor in tensors]
        found = [self._met(t) if node is None else self._computed(node) for node, t in zip(nodes, tensors, strict=True)]
        if not found or any(value is None for value, _ in found):
            return None
        self._asked |= {key: self._inputs[key] for _, keys in found for key in keys}
        return [value for value, _ in found if value is not None]

    def _computed(self, node: Node) -> tuple[torch.Tensor | None, set[Any]]:
        """The value of a node, and the inputs that it comes from."""
        constants = self._constants_of(node)
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            return constants.value(node), constants.sources([node])

    def _met(self, tensor: torch.Tensor) -> tuple[torch.Tensor | None, set[Any]]:
        """The value of a tensor that the trace meets for the first time, if the callable closes over it."""
        mode = current_mode()
        original = tensor if mode is None or self._given is None else mode.original(tensor)
        if original is tensor:
            return None, set()
        return self._read(id(original), None, original), {id(original)}

    def _input(self, node: Node) -> torch.Tensor | None:
        """The value of an input of the capture, if Python may ask for it."""
        if self._given is None:
            return None
        if node in self._given:
            name, read = self._given[node]
            return self._read(node, name, read()) if node.meta["val"].numel() <= _LARGEST else None
        mode = current_mode()
        if node.op != "get_attr" or mode is None:
            return None
        standin = getattr(self._top, str(node.target))
        original = mode.original(standin)
        return None if original is standin else self._read(node, None, original)

    def _read(self, key: object, name: str | None, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.numel() > _LARGEST:
            return None
        if tensor.requires_grad:
            return None
        with _disable_current_modes():
            value = tensor.clone()
            self._inputs[key] = Asked(name, tensor, value, tensor._version)
            return value.clone()

    def _answer(self, func: Operator, args: Sequence[torch.Tensor]) -> Any:
        if (values := self.values(args)) is not None:
            with _disable_current_modes():
                return func(*values)
        frame = _asking_frame()
        if frame is None or (func is aten._local_scalar_dense.default and args[0].dtype is not torch.bool):
            return None
        truth = True if frame.f_code is _CHECK_ALL else leads_only_to_raise(frame)
        if truth is not None:
            self.skipped.append(current_user_line())
        return truth


def specialise(buffers: Mapping[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]) -> None:
    """Let Python ask for the values of buffers in the capture under way: by name, the fake, and what gives it."""
    _CURRENT.stack[-1].specialise(buffers)


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[DataDependence] = []
        self.made: list[weakref.ref[torch.Tensor]] = []


_CURRENT = _Current()


def _is_alive(made: "weakref.ref[torch.Tensor]") -> bool:
    return made() is not None


def left_over() -> list[torch.Tensor]:
    """The tensors of captures in this thread that somebody still holds."""
    return [tensor for made in _CURRENT.made if (tensor := made()) is not None]


def forget_left_over() -> None:
    """Look at what captures have left behind until now no more: searching for its holders takes long."""
    _CURRENT.made.clear()


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the capture under way that depends on no input of it, or None."""
    return _CURRENT.stack[-1].known(tensor) if _CURRENT.stack else None


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the capture under way that depends on no input, of it and of those around it, or None.

    It is not to be written to.
    """
    stack = _CURRENT.stack
    return stack[-1].constant(tensor, stack[:-1]) if stack else None


def traced(tensor: torch.Tensor) -> Traced | None:
    """The node of a tensor in the outermost capture under way, and what tells the constants there; or None."""
    stack = _CURRENT.stack
    return stack[-1].traced(tensor, stack[:-1]) if stack else None


def _is_all_of(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        same = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return same == (base.shape, base.stride(), base.storage_offset())


@instead_of(torch.Tensor.tolist)
def tolist(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor whose value is known."""
    values = _CURRENT.stack[-1].values([tensor])
    return torch.Tensor.tolist(tensor) if values is None else values[0].tolist()


@instead_of(torch.Tensor.numpy)
def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    """A copy of a tensor whose value is known."""
    values = _CURRENT.stack[-1].values([tensor])
    return torch.Tensor.numpy(tensor, force=force) if values is None else values[0].clone().numpy(force=force)


def skip_draws(count: int) -> int:
    """Let the capture under way go over random operators that run elsewhere; returns the position of the first."""
    values = _CURRENT.stack[-1]
    values.position += count
    return values.position - count


def num_draws() -> int:
    """Number of random operators that the capture under way has run."""
    return _CURRENT.stack[-1].position


def within_operator() -> bool:
    """Tell whether it is PyTorch that calls, to run an operator of the capture under way, and not the user's code."""
    return bool(_CURRENT.stack) and _CURRENT.stack[-1] not in _get_current_dispatch_mode_stack()


@contextlib.contextmanager
def drawing_along(axes: tuple[str, ...]) -> Iterator[None]:
    """Let random operators of the capture under way draw other numbers for each index along these named axes."""
    values = _CURRENT.stack[-1]
    before, values.axes = values.axes, tuple(dict.fromkeys((*values.axes, *axes)))
    try:
        yield
    finally:
        values.axes = before


def _asking_frame() -> FrameType | None:
    """The Python function that asked for the value, below the layers of PyTorch's dispatch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame
