"""A user's own JAX function in a place of torch's: its registration, its calls in captures, and its shards."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from types import TracebackType

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torch_shard._common.axes import manual_axes
from torch_shard._common.caller import caller
from torch_shard._common.convert import Rest, Static, adopt_torch_nodes, spread_prefix, take_out
from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.overrides import KERNELS
from torch_shard._common.types import PyTree
from torch_shard._interop.jax_function import CLOSURE, KnownFunction, Like, MoreInputs, Reader, like, precision_of
from torch_shard._lowering import Own
from torch_shard._sharding import check_mesh


@dataclasses.dataclass(frozen=True)
class Split:
    """How a kernel is run: over a mesh as `jax.shard_map` is told, by arguments in the order of its parameters.

    Attributes:
        in_specs: One spec for all arrays, or one or a pytree of them for each argument; None to leave it whole.
        out_specs: Those of the results.
        mesh: By default that of the step.
        check_vma: Whether JAX tracks what varies over which axes.
        matmul_precision: Of the products in it; None for torch's.
    """

    in_specs: PyTree
    out_specs: PyTree
    mesh: Mesh | None
    check_vma: bool
    matmul_precision: str | None

    def check(self) -> None:
        """Refuse what does not go together; specs that do not fit are refused by JAX."""
        precision_of(self.matmul_precision)
        if (self.in_specs is None) != (self.out_specs is None) or (self.in_specs is None and self.mesh is not None):
            raise ValueError(f"{caller()}: in_specs and out_specs go together, and a mesh needs both.")
        if self.mesh is not None:
            check_mesh(self.mesh)

    def run(self, fn: Callable[..., PyTree], values: Sequence[PyTree], whose: str) -> PyTree:
        """The results of `fn` on these arguments, on its own part of them on each device of the mesh."""
        mesh = self.mesh if self.mesh is not None or CLOSURE.split is None else CLOSURE.split.mesh
        with Reader((), ()).active(), precision_of(self.matmul_precision):
            try:
                if self.in_specs is None or mesh is None:
                    return fn(*values)
                return self._on_shards(fn, values, mesh, whose)
            except MoreInputs as request:
                shape = tuple(request.tensors[0].shape)
                raise NotImplementedError(
                    f"{whose} reaches a torch tensor of shape {shape} by itself, which would be a constant of the "
                    "program. Pass it as an argument."
                ) from None

    def _on_shards(self, fn: Callable[..., PyTree], values: Sequence[PyTree], mesh: Mesh, whose: str) -> PyTree:
        if outer := manual_axes():
            raise NotImplementedError(
                f"{whose} has in_specs, and is called within a function that is mapped over {', '.join(outer)} "
                "already, where it gets shards. Register it without in_specs for this function."
            )
        leaves, tree = jax.tree.flatten(list(values))
        own = self.in_specs
        if isinstance(own, tuple | list):  # those of the last arguments may be missing
            own = [*own[: len(values)], *[None] * (len(values) - len(own))]
        specs = spread_prefix(own, tree)
        given = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if _is_array(leaf)]
        for leaf, spec in given:
            if spec is None:
                raise ValueError(
                    f"{whose} has no spec in in_specs for an array of shape {leaf.shape}. P() leaves it whole."
                )

        def local(*shards: jax.Array) -> PyTree:
            arrays = iter(shards)
            return fn(*jax.tree.unflatten(tree, [next(arrays) if _is_array(leaf) else leaf for leaf in leaves]))

        local.__name__ = whose  # in errors of JAX
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(spec for _, spec in given),
            out_specs=self.out_specs,
            check_vma=self.check_vma,
        )
        return mapped(*(leaf for leaf, _ in given))


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


class Kernel:
    """A JAX function in the place of torch's, as `lowering` and `override` return it.

    It is called as the function itself. It stays in its place until it is removed; at the end of a `with` block it is.
    Programs are made for the kernels that are in place when they are called: others are compiled again.

    Attributes:
        fn: The function.
        name: What it stands for, `torch.nn.functional.gelu` for example.

    Example:
        >>> import jax.numpy as jnp, torch, torch_shard as ts
        >>> with ts.override(torch.tanh)(jnp.tanh) as kernel:
        ...     y = ts.jax_jit(torch.tanh)(torch.zeros(2))
        >>> kernel.name
        'torch.tanh'
    """

    def __init__(
        self, fn: Callable[..., PyTree], name: str, place: object, put: Callable[[], Callable[[], None]]
    ) -> None:
        self.fn, self.name, self._place = fn, name, place
        for earlier in [k for k in KERNELS if isinstance(k, Kernel) and k._place == place]:
            if not _is_again(earlier.fn, fn):
                raise ValueError(
                    f"{caller()}: {name} has {described(earlier.fn)} in its place already. Call .remove() on what "
                    f"{caller()} returned for that one first, or use it in a with statement."
                )
            earlier.remove()
        self._take_away = put()
        KERNELS.append(self)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.fn(*args, **kwargs)

    def remove(self) -> None:
        """Give the place back to torch's own; nothing happens the second time."""
        if self in KERNELS:
            KERNELS.remove(self)
            self._take_away()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _is_again(earlier: Callable[..., object], fn: Callable[..., object]) -> bool:
    """Tell whether a function of a module is defined anew, as by a cell of a notebook that runs a second time."""
    name, where = (getattr(fn, key, None) for key in ("__qualname__", "__module__"))
    same = (name, where) == tuple(getattr(earlier, key, None) for key in ("__qualname__", "__module__"))
    return fn is earlier or (same and name is not None and "<" not in name)


def described(fn: Callable[..., object]) -> str:
    """The name of a function, with its file and line where Python knows them."""
    fn = inspect.unwrap(getattr(fn, "func", fn))  # of functools.partial
    name, code = getattr(fn, "__qualname__", type(fn).__name__), getattr(fn, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


class Calls:
    """The calls of a kernel in captures as functions of their tensors alone: one function for all that are alike."""

    def __init__(self, run: Callable[[Sequence[PyTree]], PyTree], own: Own, precision: str | None) -> None:
        self._run, self._own, self._precision = run, own, precision
        self._known: dict[object, KnownFunction] = {}

    def of(
        self,
        values: Sequence[PyTree],
        results: Sequence[Like],
        *,
        operator: Callable[..., PyTree] | None = None,
        rounds: bool = False,
    ) -> tuple[KnownFunction, list[torch.Tensor]]:
        """The function for these arguments, and their tensors."""
        adopt_torch_nodes(values)
        tensors, rest = take_out(list(values), torch.Tensor)
        key = rest.structure, Static(rest.leaves), tuple(map(like, tensors)), tuple(results), rounds
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._make(rest, results, operator, rounds=rounds)
        return known, tensors

    def _make(
        self, rest: Rest, results: Sequence[Like], operator: Callable[..., PyTree] | None, *, rounds: bool
    ) -> KnownFunction:
        def run(*arrays: jax.Array) -> list[jax.Array]:
            found = jax.tree.leaves(self._run(rest.filled(arrays)))
            if not rounds:
                return found
            return [_rounded(f, dtype) for f, (_, dtype) in zip(found, results, strict=len(found) == len(results))]

        def run_operator(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found = operator(*rest.filled(tensors)) if operator is not None else ()
            return [found] if isinstance(found, torch.Tensor) else list(found)

        operate = None if operator is None else run_operator
        return KnownFunction(run, list(results), self._own, operate, precision=self._precision)


def _rounded(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    is_float = dtype.is_floating_point and jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
    return array.astype(jax_dtype(dtype)) if is_float else array
