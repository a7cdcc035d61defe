"""The adapters: a JAX transform of a torch callable, as a torch callable. View, transform, view back.

Each takes the keyword arguments of the JAX transform that it adapts. Adapted functions nest in any order that JAX
allows, take torch tensors of the CPU or the jax device, numpy arrays and Python numbers, and return jax-device tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import torch

from torch_shard._capture import ModuleFlags, current_mode
from torch_shard._common.axes import into_shares, sum_shares, tracked_axes
from torch_shard._common.caller import error_prefix, public
from torch_shard._common.convert import adopt_torch_nodes
from torch_shard._common.random import Key
from torch_shard._common.types import PyTree
from torch_shard._common.validate import as_positions, check_kind
from torch_shard._interop.jax_function import CLOSURE, MoreInputs, Reader
from torch_shard._interop.views import call_jax, call_pure, is_adapted, pure_of
from torch_shard._lowering import Program, capture_settings
from torch_shard._sharding import check_mesh

A = ParamSpec("A")
R = TypeVar("R")

Pure = Callable[..., PyTree]
"""A JAX function of `(key, *args, **kwargs)`."""

Transform = Callable[[Pure, int], Pure]
"""Maps a function of `(closed-over arrays, key, *args, **kwargs)`, of so many args, to its compiled form."""

NUM_GIVEN = 2  # the closed-over arrays and the key stand before the arguments


def adapt(fn: Callable[A, object], pure: Callable[..., R]) -> Callable[A, R]:
    """`pure` as a torch function named after `fn`."""

    def adapted(*args: A.args, **kwargs: A.kwargs) -> R:
        adopt_torch_nodes((args, kwargs))
        return call_pure(pure, args, kwargs, random=True)

    if not isinstance(fn, torch.nn.Module):
        functools.update_wrapper(adapted, fn)
    adapted._torch_shard_pure = pure  # pyright: ignore[reportFunctionMemberAccess]
    return adapted


class PerClosure:
    """A compiled form of `pure` per set of closed-over tensors, training flags and settings of torch."""

    def __init__(self, pure: Pure, transform: Transform) -> None:
        self.pure, self.transform = pure, transform
        self._variants: list[_Variant] = []

    def __call__(self, key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        settings = CLOSURE.token or capture_settings()
        variant = next(
            (v for v in self._variants if v.settings == settings and (CLOSURE.token or v.is_current())), None
        )
        if variant is None:
            variant = _Variant(self, settings, ())
            self._variants.append(variant)
        while True:
            try:
                return variant(key, args, kwargs)
            except MoreInputs as request:
                if CLOSURE.readers and not variant.traced:
                    raise
                wider = _Variant(self, settings, (*variant.closure, *request.tensors))
                # Another thread may have replaced it meanwhile.
                self._variants[:] = [*(other for other in self._variants if other is not variant), wider]
                variant = wider


class _Variant:
    """The compiled form for one set of closed-over tensors."""

    def __init__(self, owner: PerClosure, settings: object, closure: tuple[torch.Tensor, ...]) -> None:
        self.owner, self.settings, self.closure = owner, settings, closure
        self.flags: list[ModuleFlags] = []
        self.programs: list[Program[Any]] = []
        self.compiled: dict[int, Pure] = {}
        self.traced = False

    def is_current(self) -> bool:
        """Tell whether modules still have the training flags, and what was read the values, of the trace."""
        return all(flags.hold() for flags in self.flags) and all(
            program.graph.is_current() for program in self.programs
        )

    def __call__(self, key: Key, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        if len(args) not in self.compiled:
            self.compiled[len(args)] = self.owner.transform(self._run, len(args))
        self.traced = False
        values = CLOSURE.values(self.closure)
        if not CLOSURE.traces:
            for program in self.programs:
                program.look_again()
        result = self.compiled[len(args)](values, key, *args, **kwargs)
        if CLOSURE.readers:  # what this depends on, a trace around it does too
            CLOSURE.readers[-1].modules.extend(self.flags)
            CLOSURE.readers[-1].programs.extend(self.programs)
        return result

    def _run(self, values: list[jax.Array], key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        self.traced = True
        reader = Reader(self.closure, values)
        with reader.active():
            result = self.owner.pure(key, *args, **kwargs)
        self.flags.extend(flags for flags in reader.modules if flags not in self.flags)
        self.programs.extend(program for program in reader.programs if program not in self.programs)
        return result


def shift(positions: int | Sequence[int], by: int = 1) -> Any:
    """Argument positions of the user's function as positions of ours, which has `by` more in front."""
    if isinstance(positions, int):
        return positions + by if positions >= 0 else positions
    return tuple(shift(operator.index(p), by) for p in positions)


@public
def jax_value_and_grad(
    fn: Callable[A, R], argnums: int | Sequence[int] = 0, *, has_aux: bool = False, **kwargs: Any
) -> Callable[A, tuple[R, PyTree]]:
    """`jax.value_and_grad` of a torch callable.

    Args:
        fn: Returns a scalar tensor, or with `has_aux` a pair of it and anything else.
        argnums: Which positional arguments to differentiate by; pytrees of tensors.
        has_aux: True where `fn` returns a pair of the scalar and something else.
        **kwargs: Further arguments of `jax.value_and_grad`.

    Returns:
        A function that returns `(value, gradients)`; gradients are PyTorch's own and have the structure of the
        arguments. Where an argument holds integers, their gradient is zero.

    Example:
        >>> import torch, torch_shard as ts
        >>> value, grad = ts.jax_value_and_grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        >>> grad.tolist()
        [2.0, 4.0]
    """
    if is_adapted(fn) or kwargs:
        options = {"argnums": shift(argnums), "has_aux": has_aux, "allow_int": True, **kwargs}
        found = jax.value_and_grad(pure_of(fn), **options)

        def value_and_grad(*args: PyTree, **kwargs: PyTree) -> PyTree:
            value, grads = found(*args, **kwargs)
            return value, jax.tree.map(lambda grad: jnp.conj(grad) if jnp.iscomplexobj(grad) else grad, grads)

        return adapt(fn, value_and_grad)
    return adapt(fn, pure_of(_TorchGradient(fn, argnums, has_aux)))


class _TorchGradient:
    """Value and gradients of a torch callable by torch itself, so that a capture holds the forward pass only once."""

    def __init__(self, fn: Callable[..., PyTree], argnums: int | Sequence[int], has_aux: bool) -> None:
        self.fn, self.argnums, self.has_aux = fn, argnums, has_aux
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        positions = as_positions("argnums", self.argnums, [f"argument {number}" for number in range(len(args))])
        capture_mode = current_mode()
        bound = () if capture_mode is None else capture_mode.bound  # fakes of closed-over tensors
        tensors = [*jax.tree.leaves((args, kwargs)), *bound]
        again = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        given = list(args)
        for position in positions:
            given[position] = jax.tree.map(_as_leaf, args[position])
        out = self.fn(*given, **kwargs)
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"jax_value_and_grad: with has_aux=True {self.__qualname__}() must return a pair of a scalar and "
                f"anything else, it returned {type(out).__name__}."
            )
        value, aux = cast(tuple[PyTree, PyTree], out) if self.has_aux else (out, None)
        _check_scalar(value, self.__qualname__)
        grads = [_gradients(cast(torch.Tensor, value), given[position], again) for position in positions]
        result = grads[0] if isinstance(self.argnums, int) else tuple(grads)
        return ((value, aux) if self.has_aux else value), result


def _as_leaf(leaf: PyTree) -> PyTree:
    """A tensor to differentiate by: a leaf of autograd, unless an outer derivative needs its history."""
    tensor = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_() if is_inexact and not tensor.requires_grad else tensor


def _check_scalar(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"jax_value_and_grad: {name}() must return a scalar floating-point tensor to be differentiated, it "
            f"returned {found}. Reduce it (.sum(), .mean()), or return (value, aux) with has_aux=True."
        )


def _gradients(value: torch.Tensor, tree: PyTree, again: bool) -> PyTree:
    """The gradients of `value` by the leaves of `tree`; integers have gradient zero."""
    leaves, structure = jax.tree.flatten(tree)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not (value.requires_grad and wanted):
        return jax.tree.map(torch.zeros_like, tree)
    shared = bool(tracked_axes())
    seed = call_jax(_seed, value.detach()) if shared else None
    found = torch.autograd.grad(
        value, wanted, seed, create_graph=again, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    grads = (
        (call_jax(sum_shares, g, leaf.detach()) for g, leaf in zip(found, wanted, strict=True))
        if shared
        else iter(found)
    )
    return jax.tree.unflatten(structure, [next(grads) if x.requires_grad else torch.zeros_like(x) for x in leaves])


def _seed(value: jax.Array) -> jax.Array:
    """The gradient of a scalar by itself, in shares."""
    return into_shares(jnp.ones_like(value), value)


@public
def jax_grad(
    fn: Callable[A, PyTree], argnums: int | Sequence[int] = 0, *, has_aux: bool = False, **kwargs: Any
) -> Callable[A, PyTree]:
    """`jax.grad` of a torch callable.

    Args:
        fn: Returns a scalar tensor, or with `has_aux` a pair of it and anything else.
        argnums: Which positional arguments to differentiate by; pytrees of tensors.
        has_aux: True where `fn` returns a pair of the scalar and something else.
        **kwargs: Further arguments of `jax.grad`.

    Returns:
        A function that returns the gradients, with `has_aux` a pair of them and the second result of `fn`. They are
        PyTorch's own and have the structure of the arguments. Where an argument holds integers, their gradient is zero.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.jax_grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0])).tolist()
        [2.0, 4.0]
    """
    value_and_grad = pure_of(jax_value_and_grad(fn, argnums, has_aux=has_aux, **kwargs))

    def grad(key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = value_and_grad(key, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return adapt(fn, grad)


@public
def jax_checkpoint(fn: Callable[A, R], **kwargs: Any) -> Callable[A, R]:
    """`jax.checkpoint` of a torch callable: its derivative recomputes it instead of keeping intermediate values.

    Args:
        fn: A torch callable of pytrees of tensors, a module for example.
        **kwargs: Arguments of `jax.checkpoint`: `policy`, `prevent_cse`, `static_argnums`.

    Returns:
        A function with the same results and the same gradients.

    Example:
        >>> import torch, torch_shard as ts
        >>> wave = ts.jax_checkpoint(lambda x: x.sin().exp())
        >>> ts.jax_grad(lambda x: wave(x).sum())(torch.zeros(2)).tolist()
        [1.0, 1.0]
    """
    check_kind("policy", kwargs.get("policy"), Callable | None, hint="jax.checkpoint_policies has some.")
    if "static_argnums" in kwargs:
        kwargs["static_argnums"] = shift(kwargs["static_argnums"])
    pure = pure_of(fn)

    def checkpointed(*args: PyTree, **named: PyTree) -> PyTree:
        # A new function for each call: jax.checkpoint keeps its trace, and with it what the trace closed over.
        return jax.checkpoint(lambda *args, **named: pure(*args, **named), **kwargs)(*args, **named)

    return adapt(fn, checkpointed)


@public
def jax_jit(fn: Callable[A, R], **kwargs: Any) -> Callable[A, R]:
    """`jax.jit` of a torch callable: one compiled program per signature.

    Tensors that `fn` reaches by itself, such as the parameters of a closed-over module, are inputs of the program:
    their current values are read at each call. Switching a module between `train()` and `eval()` runs the other
    program. Random operators draw anew at each call; `torch.manual_seed` repeats them.

    Args:
        fn: A torch callable of pytrees of tensors, a module for example.
        **kwargs: Arguments of `jax.jit`: `static_argnums`, `donate_argnums`, `in_shardings`, `out_shardings`, ...

    Returns:
        The compiled function, of the same arguments.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.jax_jit(torch.nn.functional.relu)(torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    for sharding in jax.tree.leaves([kwargs.get("in_shardings"), kwargs.get("out_shardings")]):
        if isinstance(sharding, jax.sharding.NamedSharding):
            check_mesh(sharding.mesh)

    def compile_for(run: Pure, num_args: int) -> Pure:
        compiled = jax.jit(run, **_as_ours(kwargs, num_args))

        @error_prefix("jax_jit")
        def call(*args: PyTree, **named: PyTree) -> PyTree:
            return compiled(*args, **named)

        return call

    return adapt(fn, PerClosure(pure_of(fn), compile_for))


def _as_ours(options: dict[str, Any], num_args: int) -> dict[str, Any]:
    """The user's options of `jax.jit`, which count arguments without ours."""
    ours = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        if ours.get(name) is not None:
            ours[name] = shift(ours[name], NUM_GIVEN)
    if ours.get("in_shardings") is not None:
        given = ours["in_shardings"]
        ours["in_shardings"] = (None, None, *(given if isinstance(given, tuple) else (given,) * num_args))
    return ours
