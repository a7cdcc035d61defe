"""A mode that sees what a captured callable does: tensors that it closes over, modules that run, and where."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.autocast import SharedCast, cast_once, widened
from torch_shard._capture.guards import ModuleFlags
from torch_shard._capture.late_numbers import LateNumber
from torch_shard._capture.provenance import calls_seen, current_user_line
from torch_shard._capture.side_effects import SideEffects
from torch_shard._common.overrides import FUNCTIONS
from torch_shard._common.patching import having, patched
from torch_shard._common.types import PyTree

_T = torch.Tensor

_DEVICE = _T.device.__get__  # pyright: ignore[reportAttributeAccessIssue]

_ABOUT = frozenset(attribute.__get__ for attribute in (_T.shape, _T.dtype, _T.ndim, _T.requires_grad))  # pyright: ignore

_ABOUT |= {_T.size, _T.stride, _T.dim, _T.numel, _T.is_floating_point}

_GRAD = (_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__)  # pyright: ignore

_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.Size})


class CaptureMode(TorchFunctionMode):
    """Sees every torch call of a capture.

    A fake stands for each closed-over tensor. All fakes are on the CPU, so that a model means the same wherever it
    lives.

    Args:
        is_of_capture: Whether a tensor belongs to the capture, rather than being closed over.
        make_standin: A fake of the capture for a closed-over tensor.
        revive: The value of a fake that an earlier capture left behind; any other tensor itself.
        set_data: What `x.data = y` means in the capture.
        explain: Whether the place of each torch call is noted on its nodes.
    """

    def __init__(
        self,
        is_of_capture: Callable[[torch.Tensor], bool],
        make_standin: Callable[[torch.Tensor], torch.Tensor],
        revive: Callable[[torch.Tensor], torch.Tensor],
        set_data: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        explain: bool,
    ) -> None:
        super().__init__()
        self.is_of_capture, self._make_standin, self._revive = is_of_capture, make_standin, revive
        self._set_data, self.explains = set_data, explain
        self._standins: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._modules: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._made = weakref.WeakSet[nn.Module]()  # within it: others take their place in the next one
        self._running: list[nn.Module] = []
        self._outer: CaptureMode | None = None
        self.about: object = None
        """What the captured function lets those know that stand in for torch's own; captures within it know it too."""
        self._scopes: list[contextlib.AbstractContextManager] = []
        self.side_effects = SideEffects()
        self.bound: tuple[torch.Tensor, ...] = ()
        """The fakes that `binding` has given to closed-over tensors."""
        self.axes: dict[str, int] = {}
        """Named axes that the capture depends on, with their sizes."""
        self.uses_grad = False
        """Whether the callable has read or written `.grad`."""
        self.last_cast: SharedCast | None = None
        """The latest argument of a product, cast by autocast; forgotten where modules with children begin and end."""
        self.effects: Any = None
        """What Python does with late numbers, where a caller of the program does it again: its `Effects`."""
        self.answers_at_once = False
        """Whether numbers that the host can compute before the call are not late."""
        self.items_wanted: Sequence[int] = ()
        """Positions of tensors of late numbers that the program is to give in any case."""
        self.held: list[object] = []
        """What operators of the graph name by number, until the graph is complete and its nodes hold it."""

    def __torch_function__(self, func: Callable, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if (
            _INNERMOST.capture_mode is not self or func in _ABOUT
        ):  # a capture inside of a capture, or no use of the values
            return func(*args, **(kwargs or {}))
        with calls_seen(False):
            return self._called(func, args, kwargs)

    def _called(self, func: Callable, args: PyTree, kwargs: PyTree) -> PyTree:
        if func == _DEVICE and not self.is_of_capture(args[0]):
            return torch.device("cpu")
        self.uses_grad = self.uses_grad or func in _GRAD
        args, kwargs = self._on_cpu(args), self._on_cpu(kwargs or {})
        func = FUNCTIONS.get(func, func)
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__set__":
            func = self._set_data
        args, kwargs = widened(func, args, kwargs)
        args, self.last_cast = cast_once(func, args, self.last_cast)
        _refuse_lost_writes(func, kwargs)
        _refuse_other_devices(func, args, kwargs)
        with annotated(where=self._where()) if self.explains else contextlib.nullcontext():
            return func(*args, **kwargs)

    def _on_cpu(self, value: PyTree) -> PyTree:
        """Arguments of a torch call as they are in the capture."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is LateNumber:
            return value.value
        if isinstance(value, torch.Tensor):
            if (known := self._standins.get(id(value))) is not None:  # also of a model on the meta device
                return known[0]
            return value if self.is_of_capture(value) else self._standin(value)
        if kind is tuple or kind is list:
            return kind(map(self._on_cpu, value))
        if kind is dict:
            return {key: self._on_cpu(item) for key, item in value.items()}
        if kind is torch.device:
            return torch.device("cpu") if value.type == "jax" else value
        if kind is str:
            return "cpu" if value.split(":")[0] == "jax" else value
        return value if torch_pytree.tree_is_leaf(value) else torch_pytree.tree_map(self._on_cpu, value)

    def _standin(self, tensor: torch.Tensor) -> torch.Tensor:
        original = self._revive(tensor)
        standin = _marked_like(tensor, original if self.is_of_capture(original) else self._make_standin(original))
        self._standins[id(tensor)] = (standin, original, tensor)
        return standin

    def has_standin(self, tensor: torch.Tensor) -> bool:
        """Tell whether a fake stands for a tensor: it is closed over."""
        return id(tensor) in self._standins

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a fake of this capture stand for a tensor, whatever it means elsewhere; returns the fake."""
        if id(tensor) not in self._standins:
            self._standins[id(tensor)] = (_marked_like(tensor, self._make_standin(tensor)), tensor, tensor)
        return self._standins[id(tensor)][0]

    def standins(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The closed-over tensors so far: `(fake, tensor)`, in the order in which they were met."""
        return [(fake, tensor) for fake, tensor, _ in self._standins.values()]

    def original(self, constant: torch.Tensor) -> torch.Tensor:
        """The tensor that a constant of the graph stands for."""
        return next((tensor for fake, tensor, _ in self._standins.values() if fake is constant), constant)

    @contextlib.contextmanager
    def innermost(self) -> Iterator[None]:
        """Be the one that acts, also where captures nest."""
        self._outer = _INNERMOST.capture_mode
        self.about = self._outer and self._outer.about
        with having(_INNERMOST, capture_mode=self):
            yield

    def path(self, module: nn.Module) -> str:
        """The path of a module; in a capture within another one, from the module on that is captured there."""
        if self._outer is None:
            return self.side_effects.path(module) or type(module).__name__
        whole, base = (self._outer.full_path(m) for m in (module, (self._outer._running or [module])[-1]))
        return "" if whole == base else whole.removeprefix(f"{base}.")

    def full_path(self, module: nn.Module) -> str:
        """The path of a module in the outermost capture that knows it."""
        return (self._outer.full_path(module) if self._outer else "") or self.side_effects.path(module)

    def add_modules(self, flags: ModuleFlags) -> None:
        """Note modules that ran in a capture within this one."""
        modules = ((ref(), ref, flag) for ref, flag in flags)
        self._modules.update((id(m), (ref, flag)) for m, ref, flag in modules if m is not None and not self._makes(m))

    def _makes(self, module: nn.Module) -> bool:
        """Tell whether a module was made in this capture, or in one around it."""
        return module in self._made or (self._outer is not None and self._outer._makes(module))

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(module: nn.Module, *args: object, **kwargs: object) -> None:
            self._made.add(module)
            original(module, *args, **kwargs)

        return call

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """See the torch calls and the module calls made within."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        made, copied = (patched(nn.Module, name, self._noting) for name in ("__init__", "__setstate__"))
        try:
            with made, copied, self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        if _INNERMOST.capture_mode is self:
            if id(module) not in self._modules and not self._makes(module):
                self.side_effects.note(module.named_modules(), entries=False)
                self._modules[id(module)] = (weakref.ref(module), self.side_effects.training(module))
            self._running.append(module)
            self._forget_cast(module)
            self._scopes.append(annotated(module=self.path(module)))
            self._scopes[-1].__enter__()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if _INNERMOST.capture_mode is self:
            self._running.pop()
            self._forget_cast(module)
            self._scopes.pop().__exit__(None, None, None)

    def _forget_cast(self, module: nn.Module) -> None:
        if module._modules:
            self.last_cast = None

    def modules(self) -> ModuleFlags:
        """The modules that ran, with their training flags."""
        return ModuleFlags(self._modules.values())

    def note(self, values: Iterable[tuple[str, object]]) -> None:
        """Remember modules, and other objects that can change, before the capture reaches them by these names."""
        for name, value in values:
            self.side_effects.note_value(name, value)

    @contextlib.contextmanager
    def binding(self, tensors: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let these tensors be these fakes of the capture."""
        before = {id(tensor): self._standins.pop(id(tensor), None) for tensor in tensors}
        for tensor, fake in zip(tensors, fakes, strict=True):
            self._standins[id(tensor)] = (fake, tensor, tensor)

        try:
            with having(self, bound=tuple(fakes)):
                yield
        finally:
            # Each is taken out first, so that those which were there before are again the last ones met.
            for key, standin in before.items():
                del self._standins[key]
                if standin is not None:
                    self._standins[key] = standin

    def widened(self, func: Callable, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
        """The arguments of a torch call as an autocast region of an accelerator passes them on, if one is active."""
        return widened(func, args, kwargs)

    def _where(self) -> str:
        """The module path, if a module runs, and the user's line."""
        names = [type(self._running[0]).__name__] if self._running else []
        for parent, child in zip(self._running, self._running[1:], strict=False):
            names += [name for name, m in parent.named_modules() if m is child][:1]
        return f"{'.'.join(names)}: {current_user_line()}" if names else current_user_line()


def _marked_like(tensor: torch.Tensor, standin: torch.Tensor) -> torch.Tensor:
    """A fake that counts as a parameter where it stands for one."""
    if isinstance(tensor, nn.Parameter) and standin is not tensor:
        standin._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    return standin


def _refuse_lost_writes(func: Callable, kwargs: dict[str, object]) -> None:
    """These leave `out=` alone where tensors have no data: PyTorch assigns a new tensor in its place."""
    if kwargs.get("out") is not None and getattr(func, "__name__", "") == "linalg_matrix_rank":
        raise NotImplementedError(
            "torch.linalg.matrix_rank(out=...) cannot be captured: PyTorch's tracer loses the write. Use its result."
        )


def _refuse_other_devices(func: Callable, args: PyTree, kwargs: dict[str, Any]) -> None:
    """A move to a device, or a tensor made on one, where all tensors are on those of the mesh."""
    found: list[object] = [arg for arg in (*args, kwargs.get("device")) if type(arg) is torch.device]
    if isinstance(kwargs.get("device"), str | int):
        found.append(kwargs["device"])
    if func is _T.to and len(args) > 1 and isinstance(args[1], str | int):
        found.append(args[1])
    if func in (_T.cuda, _T.xpu):
        found.append(func.__name__)
    for device in found:
        if str(device).split(":")[0] not in ("cpu", "meta"):
            raise NotImplementedError(
                f"{current_user_line()}\nHere the captured function asks for the device {device!s}, "
                "where every tensor is on the devices of the mesh. Delete it, or write the device of another tensor "
                "(x.to(y.device), torch.zeros(3, device=y.device)): the step itself puts model and batch on the mesh."
            )


class _Innermost(threading.local):
    capture_mode: CaptureMode | None = None
    repeats: bool = False
    left: bool = False


_INNERMOST = _Innermost()


def current_mode() -> CaptureMode | None:
    """The mode of the innermost capture under way."""
    return _INNERMOST.capture_mode


def outermost_mode() -> CaptureMode | None:
    """The mode of the capture under way that is within no other."""
    found = _INNERMOST.capture_mode
    while found is not None and found._outer is not None:
        found = found._outer
    return found


def outside_capture() -> contextlib.AbstractContextManager[None]:
    """Leave the capture under way, to run or trace JAX code in the midst of it."""
    return having(_INNERMOST, capture_mode=None, left=is_capturing())


def is_capturing() -> bool:
    """Tell whether a capture is under way, left or not."""
    return _INNERMOST.left or _INNERMOST.capture_mode is not None


def as_captured(tensor: torch.Tensor) -> torch.Tensor:
    """Fake that stands for a tensor in the capture under way."""
    return tensor if _INNERMOST.capture_mode is None else _INNERMOST.capture_mode._on_cpu(tensor)


def repeating() -> contextlib.AbstractContextManager[None]:
    """Capture what another program runs too: what it does besides its results is done there."""
    return having(_INNERMOST, repeats=True)


def is_repeating() -> bool:
    """Tell whether another program runs what is being captured."""
    return _INNERMOST.repeats


class annotated(contextlib.AbstractContextManager[None]):
    """Make notes on the nodes made within.

    PyTorch's own `annotate` is a generator: where a backward function raises, nobody leaves it, and it would put back
    what it has found whenever it is collected, into the notes of a later capture.
    """

    def __init__(self, **notes: str) -> None:
        self._notes = notes

    def __enter__(self) -> None:
        self._before: dict[str, str] = fx_traceback.get_current_meta().get("custom", {})
        fx_traceback.get_current_meta()["custom"] = {**self._before, **self._notes}

    def __exit__(self, *_: object) -> None:
        fx_traceback.get_current_meta()["custom"] = self._before
