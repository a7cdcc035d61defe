"""`override`: a JAX function in the place of one of torch, of a library or of a module's forward, in captures."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import Mesh
from torch import nn
from torch.overrides import resolve_name
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import current_mode, current_values, outline
from torch_shard._common.autocast_policy import LOWER, PRODUCTS
from torch_shard._common.caller import caller, error_prefix, public
from torch_shard._common.overrides import ATTRIBUTES, FUNCTIONS, HELD, Attribute, in_transform, replace_in
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, signature_of
from torch_shard._interop.jax_function import like, run_known
from torch_shard._interop.kernels import Calls, Kernel, Split, described
from torch_shard._lowering import Own


@public
def override(
    function: Callable[..., Any],
    *,
    when: Callable[..., bool] | None = None,
    takes: Callable[..., Sequence[PyTree]] | None = None,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    mesh: Mesh | None = None,
    check_vma: bool = True,
    matmul_precision: str | None = None,
) -> Callable[[Callable[..., PyTree]], Kernel]:
    """Put a JAX or Pallas function in the place of a function of torch, in programs; a decorator.

    The decorated function is called as torch's is, with arrays for tensors, and returns arrays of the shapes and dtypes
    that torch's returns: that is checked. Gradients are `jax.vjp`'s of it, so that a `jax.custom_vjp` has its own rule.
    Programs alone are changed: eager torch, and with it `step.prove` and `compare_with_torch`, goes on to run torch's
    own function, and so tells whether the two are the same. `step.report()` counts the calls.

    Args:
        function: A function of torch (`torch.nn.functional.scaled_dot_product_attention`, `torch.Tensor.softmax`); a
            Python function that a module holds, or a method of a class; a class of modules, which stands for its
            forward; or an operator of `torch.ops`.
        when: Tells of a call, by its arguments, whether it is the JAX function's; torch's own runs the others. The
            tensors have shapes and dtypes, and no values. By default all calls are; not those within a transform of
            `torch.func`.
        takes: Gives, from the arguments of a call, those of the JAX function, as a tuple: of a method, for example,
            `lambda norm, x: (x, norm.weight, norm.eps)`. It is torch code, and gradients flow through it.
        in_specs: How arrays are split over the mesh, for functions that the compiler cannot split, as Pallas kernels:
            a `PartitionSpec` for all, or a tuple with one, or a pytree of them, for each parameter of the JAX function
            (None for what is not a tensor). The function then gets one device's part of them, as in `jax.shard_map`.
        out_specs: How the results lie: a spec for all, or a pytree of them.
        mesh: The devices, by default those of the step; without a mesh the function gets whole arrays.
        check_vma: As in `jax.shard_map`; Pallas kernels may need False, with which a result that differs between
            devices where `out_specs` says that it does not is silently that of one device.
        matmul_precision: Of the products in the function and its derivatives, as `jax.default_matmul_precision` has it;
            by default torch's (`torch.set_float32_matmul_precision`). Pallas kernels for TPUs may need "default".

    Returns:
        A decorator, which returns a `Kernel`: the JAX function, with `remove()`; also for a `with` statement.

    Raises:
        TypeError: `function` is nothing that can be replaced.
        ValueError: Another function is in its place already.

    Example:
        >>> import jax, torch, torch_shard as ts
        >>> @ts.override(torch.nn.functional.gelu, when=lambda x, approximate="none": approximate == "tanh")
        ... def gelu(x, approximate):
        ...     return jax.nn.gelu(x)
        >>> ts.jax_jit(torch.nn.functional.gelu)(torch.zeros(2)).tolist()
        [0.0, 0.0]
        >>> gelu.remove()
    """
    place = _Place.of(function)
    split = Split(in_specs, out_specs, mesh, check_vma, matmul_precision)
    split.check()
    if place.owner is not None and issubclass(place.owner, nn.Module) and takes is None:
        raise TypeError(
            f"override: {place.name} is given a module, which holds tensors. Say by takes= which of them the JAX "
            "function gets, as takes=lambda norm, x: (x, norm.weight, norm.eps)."
        )

    @error_prefix("override")
    def register(fn: Callable[..., PyTree]) -> Kernel:
        check_kind("fn", fn, Callable, hint="Decorate a function of arrays.")
        return Kernel(fn, place.name, place, lambda: place.put(_Override(place, fn, when, takes, split=split)))

    return register


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a function is found: by torch's own tracing, by modules that hold it, or as an attribute of a class.

    Attributes:
        name: Of the function.
        function: The function itself.
        owner: The class of which it is an attribute.
        attribute: Its name there.
        targets: What torch's tracing sees in its place: the function, or the overloads of an operator too.
    """

    name: str
    function: Callable[..., Any]
    owner: type | None = None
    attribute: str = ""
    targets: tuple[Callable[..., Any], ...] = ()

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """The parameters of the function, where it is written in Python."""
        return signature_of(self.function)

    @classmethod
    def of(cls, function: Any) -> _Place:
        if isinstance(function, type) and issubclass(function, nn.Module):
            return cls(f"{function.__module__}.{function.__qualname__}.forward", function.forward, function, "forward")
        function = getattr(function, "_opoverload", function)  # of what custom_op returns
        if isinstance(function, torch._ops.OpOverload):
            if len(function.overloadpacket.overloads()) > 1:
                raise TypeError(
                    f"{caller()}: {function} is one of several overloads, which are replaced together. Give "
                    f"torch.ops.{function.overloadpacket}, and choose the calls by when=."
                )
            function = function.overloadpacket
        if isinstance(function, torch._ops.OpOverloadPacket):
            overloads = [getattr(function, name) for name in function.overloads()]
            return cls(str(function), function, targets=(function, *overloads))
        if (name := _name_in_torch(function)) is not None:
            return cls(name, function, targets=(function,))
        if isinstance(function, types.FunctionType):
            owner = _owner_of(function)
            name = f"{function.__module__}.{function.__qualname__}"
            if owner is not None or _is_held(function):
                return cls(name, function, owner, function.__name__)
            raise TypeError(
                f"{caller()}: {described(function)} is found under no name in a module or class, so that calls of it "
                "cannot be seen. Define it at the top of a module; of a method, give one of a class at the top of a "
                "module, or the class of modules for its forward."
            )
        raise TypeError(
            f"{caller()}: function must be a function of torch, a Python function, a class of modules or an operator, "
            f"got {function!r:.99}."
        )

    def put(self, instead: _Override) -> Callable[[], None]:
        """Put an override into the tables; returns what takes it away."""

        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:  # a function, for a class makes methods of these alone
            return instead(*args, **kwargs)

        if self.owner is not None:
            entry = Attribute(self.owner, self.attribute, call)
            ATTRIBUTES.append(entry)
            return lambda: ATTRIBUTES.remove(entry)
        instead.otherwise = FUNCTIONS.get(self.function, self.function)
        functions = replace_in(FUNCTIONS, dict.fromkeys(self.targets, call))
        # Also where a function of torch calls another, which torch's tracing cannot see.
        is_held = isinstance(self.function, types.FunctionType | types.BuiltinFunctionType)
        held = replace_in(HELD, {self.function: call} if is_held else {})

        def take_away() -> None:
            functions()
            held()

        return take_away


def _name_in_torch(function: object) -> str | None:
    try:
        return resolve_name(function) if callable(function) else None
    except TypeError:  # not hashable
        return None


def _owner_of(function: types.FunctionType) -> type | None:
    """The class of a method."""
    *path, name = function.__qualname__.split(".")
    owner: Any = sys.modules.get(function.__module__)
    for part in path:
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, type) and vars(owner).get(name) is function else None


def _is_held(function: types.FunctionType) -> bool:
    """Tell whether a module has it."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    return any(value is function for module in modules for value in list(vars(module).values()))


_LEFT: contextvars.ContextVar[tuple[_Override, ...]] = contextvars.ContextVar("left", default=())
"""Overrides whose calls torch's own function is running."""


class _Override:
    """What a capture calls in the place of a function."""

    def __init__(
        self,
        place: _Place,
        fn: Callable[..., PyTree],
        when: Callable[..., bool] | None,
        takes: Callable[..., Sequence[PyTree]] | None,
        *,
        split: Split,
    ) -> None:
        self.place, self._fn, self._when, self._takes, self._split = place, fn, when, takes, split
        self.otherwise = place.function
        self._own = Own(place.name, described(fn), f"{place.name} does, whose place it takes")
        self._calls = Calls(self._run, self._own, split.matmul_precision)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if self in _LEFT.get():
            return self.place.function(*args, **kwargs)
        is_users = current_mode() is not None and not current_values().is_within_operator() and not in_transform()
        if not is_users or not self._is_wanted(args, kwargs):
            return self._by_torch(*args, **kwargs)
        args, kwargs = _as_autocast_has_them(self.place.function, args, kwargs)
        result, fault = outline(lambda: self._by_torch(*args, **kwargs))
        if fault:
            raise NotImplementedError(
                f"{self.place.name} {fault}, which {self._own.fn} in its place cannot do. Leave such calls to "
                "torch with override(..., when=...), or put a function in the place of one that returns new tensors."
            )
        leaves, tree = torch_pytree.tree_flatten(result)
        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values, rounds = self._arguments(args, kwargs), torch.is_autocast_enabled("cpu")
        known, tensors = self._calls.of(values, [*map(like, wanted)], rounds=rounds)
        results = iter(
            found if fake.requires_grad or not found.requires_grad else found.detach()
            for fake, found in zip(wanted, run_known(known, tensors), strict=True)
        )
        return torch_pytree.tree_unflatten([next(results) if isinstance(v, torch.Tensor) else v for v in leaves], tree)

    def _by_torch(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        token = _LEFT.set((*_LEFT.get(), self))
        try:
            return self.otherwise(*args, **kwargs)
        finally:
            _LEFT.reset(token)

    def _is_wanted(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> bool:
        if self._when is None:
            return True
        args, kwargs = self._fitted(self._when, args, kwargs)
        return bool(self._when(*args, **kwargs))

    def _arguments(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        """The arguments of the JAX function, by position and by keyword, with all defaults."""
        if self._takes is None:
            return self._fitted(self._fn, args, kwargs)
        args, kwargs = self._fitted(self._takes, args, kwargs)
        given = self._takes(*args, **kwargs)
        if not isinstance(given, tuple):
            raise TypeError(
                f"override: takes must return a tuple, the arguments of {self._own.fn}, got {type(given).__name__}."
            )
        return given, {}

    def _fitted(
        self, fn: Callable[..., object], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments of a call of torch's function as those of `fn`."""
        signature = signature_of(fn)
        if signature is None:
            return args, kwargs
        try:
            bound = bind_as(self.place.signature, signature, args, kwargs)
        except TypeError as error:
            raise TypeError(
                f"{described(fn)} is called as {self.place.name} is, and cannot be: {error}. Give it the same "
                "parameters, leave such calls to torch by when=, or choose its arguments by takes=."
            ) from None
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _run(self, values: Sequence[PyTree]) -> PyTree:
        args, kwargs = values
        signature = signature_of(self._fn)
        parameters = [] if signature is None else [*signature.parameters]
        by_keyword = sorted(kwargs, key=lambda name: parameters.index(name) if name in parameters else len(parameters))

        def run(*values: PyTree) -> PyTree:
            return self._fn(*values[: len(args)], **dict(zip(by_keyword, values[len(args) :], strict=True)))

        values = [*args, *(kwargs[name] for name in by_keyword)]
        return self._split.run(run, values, f"{self._own.fn}, in place of {self.place.name},")


def bind_as(
    own: inspect.Signature | None,
    signature: inspect.Signature,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> inspect.BoundArguments:
    """Bind the arguments of a call of one function to the parameters of another, which may lack some with defaults.

    PyTorch calls by all parameters, by keyword, what it was called with in another way: where those of the function
    are known, they come by position, and the last of them may be missing where they are defaults.
    """
    if own is None:
        return signature.bind(*args, **kwargs)
    given = own.bind(*args, **kwargs)
    given.apply_defaults()
    positional = [p for p in own.parameters.values() if p.kind < inspect.Parameter.VAR_POSITIONAL]
    kept = [*given.args]
    by_name = {
        name: value
        for name, value in given.kwargs.items()
        if name in signature.parameters or name not in own.parameters or not _is_default(value, own.parameters[name])
    }
    while True:
        try:
            return signature.bind(*kept, **by_name)
        except TypeError:
            if not 0 < len(kept) <= len(positional) or not _is_default(kept[-1], positional[len(kept) - 1]):
                raise
            kept.pop()


def _is_default(value: object, parameter: inspect.Parameter) -> bool:
    default = parameter.default
    is_plain = isinstance(value, int | float | str) and type(value) is type(default)
    return value is default or (is_plain and value == default)


def _as_autocast_has_them(
    function: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """The arguments of a function of torch in the precision in which autocast would run it."""
    capture_mode = current_mode()
    assert capture_mode is not None
    args, kwargs = capture_mode.widened(function, args, kwargs)
    if not torch.is_autocast_enabled("cpu") or getattr(function, "__name__", "") not in PRODUCTS:
        return args, kwargs
    if _name_in_torch(function) is None:
        return args, kwargs
    dtype = torch.get_autocast_dtype("cpu")
    is_cast = (torch.float32, *LOWER)
    return torch_pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype in is_cast else t, (args, kwargs))
