"""The call of torch that made the first value that is not finite: followed from there to the loss, or to a gradient."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree
from torch.utils.weak import WeakTensorKeyDictionary

from torch_shard._capture import current_user_line
from torch_shard._common.fx import tensors_in
from torch_shard._common.types import PyTree
from torch_shard._train import ModuleCalls, numbers_in, unseen

_INPUTS = ("batch", "buffer", "constant")  # which may hold minus infinity on purpose, as a mask does


@dataclasses.dataclass(eq=False)
class Origin:
    """Where values that are not finite came from.

    Attributes:
        kind: "parameter", "buffer", "batch" and "constant" are inputs, "asked" is an infinity that the code writes,
            "call" a call of torch, "gradient" the derivative of one.
        name: Of the input, or of the operator.
        value: "NaN", "infinity" or "minus infinity".
        module: In which the call is.
        line: Of the user's code.
        given: What the call was given, for people.
        order: How many modules had ended before, or how many gradients of modules were there.
        cause: The origin of the infinity of which this made NaN.
    """

    kind: str
    name: str
    value: str
    module: str = ""
    line: str = ""
    given: tuple[str, ...] = ()
    order: int = 0
    cause: "Origin | None" = None

    @property
    def root(self) -> "Origin":
        """The first of its causes; an infinity that is there on purpose is none."""
        cause = self.cause
        if cause is None or cause.kind == "asked" or (cause.kind in _INPUTS and cause.value == "minus infinity"):
            return self
        return cause.root


class Origins(TorchFunctionMode):
    """Follows values that are not finite through the calls of torch within, and through their derivatives."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.modules = ModuleCalls(model)
        self._origins = WeakTensorKeyDictionary()
        self._places: dict[Any, Origin] = {}
        self._bad: dict[Any, tuple[Origin, bool]] = {}
        """Nodes of autograd that gave a gradient that is not finite, in order; and whether what arrived was finite."""
        self._params, self._buffers = dict(model.named_parameters()), set(map(id, model.buffers()))
        for kind, held in (("parameter", self._params), ("buffer", dict(model.named_buffers())), ("batch", batch)):
            for name, tensor in held.items():
                if (value := _what(tensor)) is not None:
                    self._origins[tensor] = Origin(kind, name, value)

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """Where the values of a tensor that are not finite came from; None if all are finite."""
        value = _what(tensor)
        if value is None:
            return None
        known = self._origins.get(tensor)
        if known is None:
            node = tensor.grad_fn
            kind, name = ("constant", "a tensor that no call made") if node is None else ("call", node.name())
            known = self._origins[tensor] = Origin(kind, name, value, *self._place(), order=len(self.modules.rows))
        return known

    def of_gradients(self) -> Origin | None:
        """Where the gradients of parameters that are not finite came from; None if all are finite."""
        wrong = {id(p) for p in self._params.values() if p.grad is not None and _what(p.grad) is not None}
        if not wrong:
            return None
        reaching, fed = set[Any](), set[Any]()
        for node in reversed(self._bad):  # gradients go from a node to those that follow it
            following = [each for each, _ in node.next_functions]
            fed.update(following)
            if any(each in reaching or id(getattr(each, "variable", None)) in wrong for each in following):
                reaching.add(node)
        bad = list(self._bad.items())
        sources = [origin for node, (origin, ok) in bad if node in reaching and (ok or node not in fed)]
        return next(iter(sources or [origin for _, (origin, _) in bad]), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "a call")
        if name in ("__get__", "__set__"):
            out = func(*args, **kwargs)
            if (known := self._origins.get(args[0])) is not None:  # what is read from a tensor: `.data`, `.T`
                for tensor in tensors_in(out):
                    self._origins.setdefault(tensor, known)
            return out
        given = tensors_in((args, kwargs))
        for tensor in given:
            self._watch(tensor.grad_fn)
        origins = [(tensor, self.of(tensor)) for tensor in given]
        out = func(*args, **kwargs)
        written = [tensor for tensor, origin in origins if _what(tensor) != (origin and origin.value)]
        bad = [origin for _, origin in origins if origin is not None]
        changed = {*self._buffers, *map(id, written)}  # batch_norm writes to buffers, and says so to nobody
        unchanged = [tensor for tensor in given if id(tensor) not in changed]

        def call(value: str, cause: Origin | None) -> Origin:
            shown = tuple(map(_describe, unchanged))
            return Origin("call", name, value, *self._place(), shown, len(self.modules.rows), cause)

        results = [*tensors_in(out), *written]
        for tensor in (*given, *results):
            self._watch(tensor.grad_fn, name)
        for tensor in results:
            self._note(tensor, bad, (args, kwargs), call)
        return out

    def _note(
        self, tensor: torch.Tensor, bad: list[Origin], given: PyTree, call: Callable[[str, Origin | None], Origin]
    ) -> None:
        """Note where a result of a call has its values from."""
        if (value := _what(tensor)) is None:
            return
        if value == "NaN":
            kept = next((o for o in bad if o.value == "NaN"), None)
            cause = next((o for o in bad if o.root.kind in ("call", "parameter")), next(iter(bad), None))
            self._origins[tensor] = kept or call(value, cause)
        elif bad:
            self._origins[tensor] = next((o for o in bad if o.kind == "call"), bad[0])
        elif any(isinstance(leaf, float) and math.isinf(leaf) for leaf in torch_pytree.tree_leaves(given)):
            self._origins[tensor] = Origin("asked", "an infinity", value)
        else:
            self._origins[tensor] = call(value, None)

    def _place(self) -> tuple[str, str]:
        return self.modules.current, current_user_line()

    def _watch(self, node: Any, name: str = "") -> None:
        """Look at the derivatives of a call: its node of autograd, and those behind it that no call before had."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._places or hasattr(node, "variable"):
                continue
            operator = name or node.name().removesuffix("Backward0")
            self._places[node] = Origin("gradient", operator, "NaN", *self._place())
            node.register_hook(functools.partial(self._look, node))
            waiting += [following for following, _ in node.next_functions]

    def _look(self, node: Any, grads: PyTree, cotangents: PyTree) -> None:
        values = [value for grad in tensors_in(grads) if (value := _what(grad)) is not None]
        if not values or node in self._bad:
            return
        was_finite = all(_what(cotangent) is None for cotangent in tensors_in(cotangents))
        saved = [(n.removeprefix("_saved_"), getattr(node, n, None)) for n in dir(node) if n.startswith("_saved_")]
        given = [f"the gradient that arrives: {_describe(t)}" for t in tensors_in(cotangents)]
        given += [f"{name}: {_describe(t)}" for name, t in saved if isinstance(t, torch.Tensor) and t.ndim]
        value = "NaN" if "NaN" in values else values[0]
        order = len(self.modules.with_gradient)
        origin = dataclasses.replace(self._places[node], value=value, given=tuple(given), order=order)
        if not was_finite:
            origin.given = (*origin.given, "what arrives is a sum of gradients, or a hook has changed it")
        self._bad[node] = origin, was_finite


@unseen()
def _describe(tensor: torch.Tensor) -> str:
    """A tensor in a few words: shape, dtype, and from where to where its entries go."""
    said, numbers = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}", numbers_in(tensor)
    if numbers is None or numbers.is_complex():
        return said
    finite = numbers[numbers.isfinite()]
    if finite.numel():
        said += f" from {float(finite.min()):.4g} to {float(finite.max()):.4g}"
    wrong = numbers.numel() - finite.numel()
    return said + (f", {wrong} of {numbers.numel()} entries not finite" if wrong else "")


@unseen()
def _what(tensor: torch.Tensor) -> str | None:
    """The worst that is in a tensor; None if all is finite."""
    numbers = numbers_in(tensor)
    if numbers is None or bool(numbers.isfinite().all()):
        return None
    if bool(numbers.isnan().any()):
        return "NaN"
    return "infinity" if numbers.is_complex() or bool((numbers == math.inf).any()) else "minus infinity"
