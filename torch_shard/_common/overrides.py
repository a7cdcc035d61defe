"""Overrides of PyTorch's own in a capture: by function, by attribute of a class or module, by ATen operator.

The tables are empty here. Whoever has something better to offer fills them with the decorators, so that an operator of
ours, declared by `captured_op`, is one file, and the capture, which reads them, knows none of them.
"""

# PyTorch's class of operators, and some of its state, have no public names, or annotations in part.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import collections
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.fx import Node

from torch_shard._common.patching import Owner
from torch_shard._common.types import Operator

F = TypeVar("F", bound=Callable[..., object])
Shapes = TypeVar("Shapes", bound=Callable[..., object])
K = TypeVar("K")
V = TypeVar("V")

Rewrite = Callable[[Node], Node | None]


class Named(Protocol):
    """What a user has put in the place of something of torch's, of this name."""

    name: str


class Attribute(NamedTuple):
    """An override of what is found by a name.

    Attributes:
        owner: The class or module, or the path of a class of a library.
        name: Of the attribute.
        call: What is called instead.
        source: The first digits of the SHA-256 of the only source that is replaced; empty for any.
    """

    owner: Owner | str
    name: str
    call: Callable[..., Any]
    source: str = ""


FUNCTIONS: dict[Callable[..., object], Callable[..., Any]] = {}
"""Overrides of functions of torch, where a torch function mode sees the call."""

ATTRIBUTES: list[Attribute] = []
"""Overrides of what is not such a function."""

OPERATORS: dict[Operator, Callable[..., Any]] = {}
"""Overrides of ATen operators, while the callable is traced."""

REWRITES: collections.defaultdict[Operator, list[Rewrite]] = collections.defaultdict(list)
"""Rewrites of a node of the functional graph: to another node, or None to leave it."""

HELD: dict[Callable[..., object], Callable[..., Any]] = {}
"""Overrides of functions wherever a module holds them, under whatever name, as `from library import function` does."""

KERNELS: list["Named"] = []
"""What users have put into these tables and into that of the lowerings: a program is for the ones it was made with."""


def instead_of(*functions: Callable[..., object]) -> Callable[[F], F]:
    """Let a capture call the decorated function instead of these functions of torch."""
    return lambda fn: FUNCTIONS.update(dict.fromkeys(functions, fn)) or fn


def instead_of_attribute(owner: Owner | str, name: str, source: str = "") -> Callable[[F], F]:
    """Let a capture find the decorated function under this name of a class or module.

    Args:
        owner: The class or module; or `module`, `module.Class` or a glob of such, of what has been imported and has
            the attribute.
        name: Of the attribute.
        source: Of a function of a library, the first digits of the SHA-256 of the source that was read here: another
            one stays as it is. The decorated function is given the original first.
    """
    return lambda fn: ATTRIBUTES.append(Attribute(owner, name, fn, source)) or fn


def captured_op(name: str, schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Shapes], Shapes]:
    """Declare an operator of captures alone, without a kernel, as `torch.library.define` does.

    The decorated function gives its results on fake tensors.
    """

    def run(*_: object) -> NoReturn:
        raise NotImplementedError(f"{name} is only captured, never run")

    def declare(shapes: Shapes) -> Shapes:
        torch.library.custom_op(name, run, mutates_args=(), schema=schema, tags=tags).register_fake(shapes)
        return shapes

    return declare


@functools.cache
def digest_of(code: Any) -> str:
    """The first digits of the SHA-256 of the source of code; empty if it is not to be had."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:8]
    except (OSError, TypeError):
        return ""


def instead_of_operator(*operators: Operator) -> Callable[[F], F]:
    """Let a capture trace the decorated function instead of these ATen operators."""
    return lambda fn: OPERATORS.update(dict.fromkeys(operators, fn)) or fn


def rewrites(*operators: Operator) -> Callable[[Rewrite], Rewrite]:
    """Let the decorated function rewrite the nodes of these ATen operators in functional graphs."""

    def register(fn: Rewrite) -> Rewrite:
        for operator in operators:
            REWRITES[operator].append(fn)
        return fn

    return register


def replace_in(table: dict[K, V], entries: Mapping[K, V]) -> Callable[[], None]:
    """Put entries into a table; returns what puts back those that they have replaced."""
    before = {key: table[key] for key in entries if key in table}
    table.update(entries)

    def undo() -> None:
        for key, value in entries.items():
            if table.get(key) is value:  # nobody has replaced it in turn
                del table[key]
                table.update({key: before[key]} if key in before else {})

    return undo


def attribute_overrides() -> Iterator[Attribute]:
    """Overrides of what is found by a name, wherever it is held."""
    yield from ATTRIBUTES
    by_id = {id(function): own for function, own in HELD.items()}
    for module in cast(list[object], list(sys.modules.values())) if HELD else ():
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    yield Attribute(module, name, by_id[id(value)])


def is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors have one floating-point dtype and are used as they are, without autocast or a transform."""
    return (
        all(t.is_floating_point() and t.dtype == tensors[0].dtype for t in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed(tensors)
    )


def in_transform() -> bool:
    """Tell whether a transform of torch.func is under way."""
    return maybe_current_level() is not None


def is_transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a transform of torch.func, or forward-mode differentiation, is under way."""
    level = cast(int, torch.autograd.forward_ad._current_level)
    return level >= 0 or any(map(is_functorch_wrapped_tensor, tensors))


def gradients_again(
    results: torch.Tensor | Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    needed: Sequence[object],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the tensors that need one, for a derivative of a derivative."""
    wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]
