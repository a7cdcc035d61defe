"""A record of what a torch callable did: two calls with equal records mean the same program.

A record has every ATen operator in order, with its arguments (tensors by number, everything else by type and value),
whether autograd was on and which tensors required a gradient, and the autograd graph behind the results (the class of
each node and, for `autograd.Function`s, what their `ctx` holds). PyTorch derives the backward pass from exactly these,
so equal records have equal derivatives too. What a record does not show is refused: hooks on tensors, and hooks that
pack saved tensors. A refusal is noted and nothing is raised, for it is found in the midst of the user's code.
"""

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from torch_shard._capture import current_mode, read_by
from torch_shard._common.containers import Same
from torch_shard._common.overrides import OPERATORS
from torch_shard._common.patching import patched

_VALUES = (
    bool,
    int,
    float,
    str,
    complex,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

_CHECKPOINT = "torch.utils.checkpoint"  # packs nothing: it computes again what was computed

_grad_fn = torch._C.TensorBase.grad_fn.__get__  # pyright: ignore


class Fingerprint(TorchDispatchMode):
    """The record of one call; `with record: ...`, then `record.close(result)`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Hashable] = []
        self._numbers: dict[int, Hashable] = {}
        self._alive: list[object] = []
        self.outside: list[torch.Tensor] = []
        """Tensors that the call closed over, in the order in which operators met them."""
        self.rules: dict[type[torch.autograd.Function], tuple[Hashable, ...]] = {}
        """Values that the backward passes of `autograd.Function`s read from outside."""
        self.constants: list[torch.Tensor] = []
        """Tensors that it made of Python's numbers."""
        self.refused: str | None = None
        """Why the call cannot stand for, or be stood for by, another call."""

    def refuse(self, why: str) -> None:
        """Note that the call stands for itself alone; the first reason stays."""
        self.refused = self.refused or why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        given = self._encode((args, kwargs))
        result = func(*args, **kwargs) if func not in OPERATORS else OPERATORS[func](*args, **kwargs)
        self._events.append((func, torch.is_grad_enabled(), given, self._encode(result, new=True)))
        return result

    def close(self, result: object) -> Hashable:
        """The record as one hashable value, for a call that returned `result`."""
        leaves, tree = torch_pytree.tree_flatten(result)
        nodes: dict[Node, int] = {}
        behind = tuple(self._behind(_grad_fn(t), nodes) for t in self.tensors().values() if t.requires_grad)
        returned = tuple(self._numbers.get(id(leaf)) for leaf in leaves)
        return tuple(self._events), str(tree), returned, behind

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that the call has made, by number."""
        alive = [t for t in self._alive if isinstance(t, torch.Tensor)]
        return {number: t for t in alive if isinstance(number := self._numbers[id(t)], int)}

    def _encode(self, value: object, *, new: bool = False) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._number(value, new), value.requires_grad
        if isinstance(value, (tuple, list)):
            return tuple(self._encode(v, new=new) for v in value)
        if isinstance(value, dict):
            return tuple((k, self._encode(v, new=new)) for k, v in value.items())
        return (type(value), repr(value)) if isinstance(value, _VALUES) else self._same(value)

    def _same(self, value: object) -> Same:
        self._alive.append(value)
        return Same(value)

    def _number(self, tensor: torch.Tensor, new: bool) -> Hashable:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
            self._numbers[id(tensor)] = len(self._numbers) if new else self._meet(tensor)
        return self._numbers[id(tensor)]

    def _meet(self, tensor: torch.Tensor) -> Hashable:
        """The number of a tensor that no operator has made: one from outside, or one of Python's numbers."""
        capture_mode = current_mode()
        assert capture_mode is not None
        for fake, original in capture_mode.standins():
            if fake is tensor:
                self.outside.append(original)
                about = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
                return "outside", len(self.outside) - 1, about
        if type(tensor) is torch.Tensor and tensor.numel() <= 64:
            self.constants.append(tensor)
            with _disable_current_modes():
                return "constant", tensor.dtype, tuple(tensor.shape), repr(tensor.tolist())
        self.refuse("it uses a tensor whose origin is not known")
        return None

    def _behind(self, node: Node | None, nodes: dict[Node, int]) -> Hashable:
        """The autograd graph from a node on, each node once."""
        if node is None or node in nodes:
            return None if node is None else nodes[node]
        nodes[node] = len(nodes)
        self._alive.append(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            if id(leaf) not in self._numbers:
                self.refuse("its gradient flows to a tensor whose origin is not known")
            return self._numbers.get(id(leaf))
        inputs = tuple((self._behind(n, nodes), index) for n, index in node.next_functions)
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            return node.name(), inputs
        saved = tuple(self._numbers.get(id(t), "new") for t in node.saved_tensors)  # pyright: ignore
        function = type(node)._forward_cls  # pyright: ignore
        self.rules[function] = read_by(function.backward)
        return function, inputs, saved, self._encode(vars(node)), self.rules[function]


def _reads_plainly(frame: FrameType) -> bool:
    """Tell whether who reads `grad_fn` registers no hook: PyTorch, but for what runs the backward hooks of modules."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in ("torch", "torch_shard") and name != "torch.utils.hooks"


@contextlib.contextmanager
def hooks_refused(current: Callable[[], Fingerprint | None]) -> Iterator[None]:
    """Refuse what a record does not show: hooks on a tensor or on what autograd saves, or maybe on its graph."""

    def refuse(why: str) -> None:
        if (record := current()) is not None:
            record.refuse(why)

    def grad_fn(original: property) -> property:
        def read(tensor: torch.Tensor) -> Node | None:
            if current() is not None and not _reads_plainly(sys._getframe(2)):  # behind the patched attribute
                refuse("it reads grad_fn, where a hook may be registered")
            return original.__get__(tensor)

        return property(read)

    def register_hook(original: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        def register(tensor: torch.Tensor, hook: Callable[..., object]) -> RemovableHandle:
            refuse("it registers a hook on a tensor")
            return original(tensor, hook)

        return register

    def saved_hooks(original: Callable[..., None]) -> Callable[..., None]:
        def enter(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
            if not type(hooks).__module__.startswith(_CHECKPOINT):
                refuse("it packs saved tensors by hooks of its own")
            return original(hooks)

        return enter

    with (
        patched(torch.Tensor, "register_hook", register_hook),
        patched(torch.Tensor, "grad_fn", grad_fn),
        patched(torch.autograd.graph.saved_tensors_hooks, "__enter__", saved_hooks),
    ):
        yield
