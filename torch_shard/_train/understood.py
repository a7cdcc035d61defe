"""The calls of a training step that are understood in place: zero_grad, backward, clipping and step only take notes.

They are so on fakes, while the step is captured, and in eager torch, when it is proved.
"""

# torch annotates some of what is asked here in part, and the registry of hooks has no public name.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import current_user_line
from torch_shard._common.patching import having, patched

_TORCH = f"{torch.__path__[0]}/"
_HERE = f"{pathlib.Path(__file__).parent.parent}/"


_WRITES = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__")
"""Names of functions of torch that write in place, beside those that end with `_`."""


class Stepped(BaseException):
    """The function has come to `optimizer.step()`.

    Args:
        frame: Of the function.
    """

    def __init__(self, frame: types.FrameType) -> None:
        super().__init__()
        self.frame = frame


@dataclasses.dataclass(frozen=True)
class Clipping:
    """How gradients are clipped: as options of `make_train_step`."""

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None


class GradNorm:
    """The norm that clipping returns: it is known when the step has run, and cannot be asked before."""

    def __getattr__(self, name: str) -> NoReturn:
        self._asked()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        cls()._asked()

    def _asked(self, *_: object) -> NoReturn:
        _refuse(
            "the norm that clip_grad_norm_ returns is read before optimizer.step(), and the step computes it. Read it "
            "after optimizer.step()"
        )

    __repr__ = __str__ = __format__ = __bool__ = __float__ = __int__ = __len__ = __hash__ = _asked  # pyright: ignore
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _asked  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _asked
    __pow__ = __neg__ = __abs__ = _asked


class Notes:
    """What a function of a training step calls until it comes to `optimizer.step()`, in order.

    Args:
        model: Whose parameters are trained.
        optimizer: Of torch, of these parameters.
        trained: Their names.
        names: Names by the identities of the user's own parameters, which may be held elsewhere, too.
        code: Of the function.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: frozenset[str],
        names: Mapping[int, str],
        code: types.CodeType,
    ) -> None:
        self._model, self._optimizer, self._trained, self._code = model, optimizer, trained, code
        now = dict(model.named_parameters())  # in a capture, fakes
        self._names = {**names, **{id(parameter): name for name, parameter in now.items()}}
        self._wanting = {name for name, parameter in now.items() if parameter.requires_grad}
        self._zeroed = set[str]()
        self.outside: list[torch.Tensor] = []
        """Tensors that want a gradient and are none of the model."""
        self._met: dict[int, torch.Tensor] = {}
        self._saved: dict[int, torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.clipping = Clipping()

    @property
    def loss(self) -> torch.Tensor:
        """What the gradients are of."""
        total = self._losses[0]
        for loss in self._losses[1:]:
            total = total + loss
        return total

    @property
    def is_zeroed(self) -> bool:
        """Whether all gradients were taken away before the first backward pass."""
        return self._zeroed >= self._trained

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter of the model."""
        return self._names.get(id(tensor))

    def is_view_of_model(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the memory of a parameter or buffer."""
        held = (*self._model.parameters(), *self._model.buffers())
        return any(memory_of(each) == memory_of(tensor) for each in held)

    @contextlib.contextmanager
    def taken(self) -> Generator[None, None, None]:
        """Take notes within, in this thread."""
        clips = [
            patched(module, name, lambda _, note=note: note)
            for function, note in (
                (nn.utils.clip_grad_norm_, self._clip_norm),
                (nn.utils.clip_grad_value_, self._clip_value),
            )
            for module, name in _holders(function)
        ]
        with contextlib.ExitStack() as stack:
            for context in (
                *clips,
                patched(torch.Tensor, "backward", lambda _: _as_method(self._backward)),
                patched(torch.autograd, "backward", lambda _: self._backward),
                patched(torch.Tensor, "grad", self._instead_of_grad),
                patched(torch.optim.Optimizer, "zero_grad", lambda _: _as_method(self._zero_of_optimizer)),
                patched(nn.Module, "zero_grad", lambda _: _as_method(self._zero_of_module)),
                patched(torch.amp.GradScaler, "scale", _instead_of_scaling),
            ):
                stack.enter_context(context)
            stack.callback(register_optimizer_step_pre_hook(self._step).remove)
            stack.enter_context(_Calls(self))
            stack.enter_context(having(_CURRENT, notes=self))
            yield

    def note_call(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Look at a call of torch."""
        is_write = (name.endswith("_") and not name.endswith("__")) or name in _WRITES
        if self._losses and is_write and tensors and memory_of(tensors[0]) in self._saved:
            _refuse(
                "a parameter, or what the loss was computed of, is written between backward() and optimizer.step(), "
                "and the gradients are taken at the end. Write before backward() or after optimizer.step()"
            )
        for tensor in tensors:
            if tensor.requires_grad:
                self._met[memory_of(tensor)] = tensor
            is_leaf = tensor.requires_grad and tensor.is_leaf and not hasattr(tensor, "fake_mode")
            if is_leaf and self.name_of(tensor) is None and not any(tensor is other for other in self.outside):
                self.outside.append(tensor)

    # -- the calls --

    def _zero_of_optimizer(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if optimizer is self._optimizer:
            self._zero(self._trained)
        else:
            self._zero(self._names_of(p for group in optimizer.param_groups for p in group["params"]))

    def _zero_of_module(self, module: nn.Module, set_to_none: bool = True) -> None:
        self._zero(self._names_of(module.parameters()))

    def _names_of(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        return {name for tensor in tensors if (name := self.name_of(tensor)) is not None}

    def _zero(self, names: Set[str]) -> None:
        if self._losses and names & self._trained:
            _refuse("zero_grad() comes between backward() and optimizer.step(), and takes gradients away")
        self._zeroed |= names

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
        **others: object,
    ) -> None:
        given = {"gradient": gradient, "retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        if named := [name for name, value in {**given, **others}.items() if value is not None and value is not False]:
            _refuse(f"backward() is given {', '.join(named)}. Call it without, on each loss: their gradients add up")
        if not isinstance(cast(object, loss), torch.Tensor) or loss.numel() != 1:
            _refuse("backward() is of more than one element. Reduce the loss with .mean() or .sum()")
        if self.clipping != Clipping():
            _refuse("backward() after clipping adds gradients that are not clipped. Clip after the last one")
        self._losses.append(loss.reshape(()))
        self.losses.append(loss)
        self._saved |= self._met | {memory_of(parameter): parameter for parameter in self._model.parameters()}
        self._met = {}

    def _clip_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> GradNorm:
        if float(norm_type) != 2.0 or error_if_nonfinite:
            _refuse("clip_grad_norm_ has another norm_type=, or error_if_nonfinite=True. A step clips by the 2-norm")
        self._clip(parameters, Clipping(clip_grad_norm=float(max_norm)))
        return GradNorm()

    def _clip_value(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        self._clip(parameters, Clipping(clip_grad_value=float(clip_value)))

    def _clip(self, parameters: torch.Tensor | Iterable[torch.Tensor], clipping: Clipping) -> None:
        if not self._losses:
            _refuse("the gradients are clipped before backward(), when there are none")
        if self.clipping != Clipping():
            _refuse("the gradients are clipped twice. Clip them once, by norm or by value")
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        names = {self.name_of(tensor) or "" for tensor in tensors}
        if "" in names or names & self._wanting != {*self._trained}:
            _refuse(
                "only some of the gradients are clipped, or others than those of the optimizer's parameters. Clip "
                "those of all parameters that it trains, and no others"
            )
        self.clipping = clipping

    def _instead_of_grad(self, original: Any) -> property:
        def get(tensor: torch.Tensor) -> torch.Tensor | None:
            if self.name_of(tensor) is None and not tensor.requires_grad:
                return original.__get__(tensor)
            if self._losses:
                _refuse(
                    "a gradient is read between backward() and optimizer.step(), and those of the step stay in its "
                    "program. clip_grad_norm_ gives their norm, and ts.train_step(watch=...) those of modules"
                )
            return None

        def put(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
            name = self.name_of(tensor)
            if name is None:
                original.__set__(tensor, value)
            elif value is not None or self._losses:
                _refuse("a gradient is written. Change the loss, or use a hook on the parameter (register_hook)")
            else:
                self._zeroed.add(name)  # `for p in model.parameters(): p.grad = None`

        return property(get, put)

    def _step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(_CURRENT, "notes", None) is not self:
            return  # of another thread
        if optimizer is not self._optimizer:
            _refuse(
                f"the function steps another optimizer, {type(optimizer).__name__}. Write a function for each "
                "optimizer, with @ts.train_step above it"
            )
        if len(args) > 1 or kwargs.get("closure") is not None:
            _refuse("optimizer.step is given a closure, which it calls as often as it likes (LBFGS)")
        if not self._losses:
            _refuse("optimizer.step() comes before backward(), when there are no gradients")
        raise Stepped(self._own_frame())

    def _own_frame(self) -> types.FrameType:
        """That of the function; no other but torch's is to be below it, which would go on after the step."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._code:
            if not frame.f_code.co_filename.startswith((_TORCH, _HERE)):
                _refuse(
                    f"optimizer.step() is called by {frame.f_code.co_name}, and what that does after it is not seen. "
                    f"Call it in {self._code.co_name} itself"
                )
            frame = frame.f_back
        assert frame is not None
        return frame


class _Calls(TorchFunctionMode):
    """Sees what torch is called with: writes to parameters after backward, and others that want gradients."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in torch_pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with torch._C.DisableTorchFunction():
            self._notes.note_call(getattr(func, "__name__", ""), tensors)
        return func(*args, **(kwargs or {}))


class _Current(threading.local):
    notes: Notes | None = None


_CURRENT = _Current()


def memory_of(tensor: torch.Tensor) -> int:
    """The same for tensors of one memory."""
    return tensor.untyped_storage()._cdata


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _instead_of_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            _refuse("GradScaler is for float16. bfloat16 needs none: GradScaler(enabled=False), or leave it out")
        return original(scaler, outputs)

    return scale


def _holders(function: Callable[..., Any]) -> Iterator[tuple[types.ModuleType, str]]:
    """The modules that have a function, with its names there: `from torch.nn.utils import function` gives another."""
    for module in list(sys.modules.values()):
        if isinstance(cast(object, module), types.ModuleType):
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"{current_user_line()}\ntrain_step: {what}.")


@contextlib.contextmanager
def without_other_steps(optimizer: torch.optim.Optimizer) -> Generator[None, None, None]:
    """Refuse steps of other optimizers within: they would find no gradients."""

    def refuse(other: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if other is not optimizer:
            _refuse(
                f"the function steps another optimizer, {type(other).__name__}. Write a function for each "
                "optimizer, with @ts.train_step above it"
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
