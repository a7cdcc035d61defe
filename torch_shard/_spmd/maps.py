"""The adapters that map a torch callable over devices or rows, and bind named axes for `torch_shard.collectives`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torch_shard._common.axes import manual_axes, vjp_of_chosen
from torch_shard._common.caller import error_prefix, public
from torch_shard._common.convert import spread_prefix
from torch_shard._common.random import Key, fold_axes
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import as_positions, check_kind, signature_of
from torch_shard._interop import CLOSURE, PerClosure, Pure, Reader, adapt, pure_of
from torch_shard._sharding import as_devices, check_mesh, describe_mesh


def vmap_of_arrays(
    fn: Callable[..., PyTree],
    in_axes: tuple[int | None, ...],
    out_axes: PyTree,
    *,
    axis_size: int,
    vmap: Callable[..., Any],
) -> Callable[..., PyTree]:
    """`jax.vmap` of a function of arrays that returns a pytree of arrays.

    Args:
        fn: What to map.
        in_axes: The mapped dim of each argument, or None.
        out_axes: As for `jax.vmap`.
        axis_size: How many rows there are.
        vmap: `jax.vmap`, with an `axis_name` for example.
    """
    mapped = jax.custom_vjp(vmap(fn, in_axes, out_axes, axis_size=axis_size))

    def forward(*arrays: jax.Array) -> tuple[PyTree, tuple[jax.Array, ...]]:
        return mapped(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], cotangents: PyTree) -> tuple[jax.Array | None, ...]:
        leaves, tree = jax.tree.flatten(cotangents)
        axes = spread_prefix(out_axes, tree)
        given = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]
        wanted = [a is not None and jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays]
        # A result that is not mapped is one for all rows: each has its share of the gradient.
        shares = [c if axis is not None else c / axis_size for c, axis, g in zip(leaves, axes, given, strict=True) if g]
        pull = functools.partial(_pull, fn, wanted, given)
        run = vmap_of_arrays(pull, (*in_axes, *itertools.compress(axes, given)), 0, axis_size=axis_size, vmap=vmap)
        grads = iter(run(*arrays, *shares))
        return tuple(_unmap(next(grads), axis) if w else None for axis, w in zip(in_axes, wanted, strict=True))

    mapped.defvjp(forward, backward)
    return mapped


def _pull(
    fn: Callable[..., PyTree], wanted: list[bool], given: list[bool], *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of one row."""
    arrays, cotangents = inputs[: len(wanted)], inputs[len(wanted) :]
    return vjp_of_chosen(fn, arrays, wanted, given)[1](list(cotangents))


def _unmap(rows: jax.Array, axis: int | None) -> jax.Array:
    return rows.sum(0) if axis is None else jnp.moveaxis(rows, 0, axis)


A = ParamSpec("A")
R = TypeVar("R")

Axes = str | Sequence[str]


@public
def jax_vmap(
    fn: Callable[A, R],
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    *,
    axis_name: str | None = None,
    axis_size: int | None = None,
    fold_in_axes: Axes = (),
    **kwargs: Any,
) -> Callable[A, R]:
    """`jax.vmap` of a torch callable.

    Random operators draw the same numbers for every element of the batch, unless the key is folded over `axis_name`.

    Args:
        fn: A torch callable of one element of the batch.
        in_axes: The dim of each argument that holds the batch, None for none; an int for all arguments, or a tuple of
            ints and pytrees of them.
        out_axes: Where the results hold it.
        axis_name: The batch as a named axis for `torch_shard.collectives`.
        axis_size: Its size, needed if no argument has it.
        fold_in_axes: Named axes along which random numbers differ.
        **kwargs: Further arguments of `jax.vmap`.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.jax_vmap(torch.dot, in_axes=(0, None))(torch.eye(2), torch.tensor([3.0, 4.0])).tolist()
        [3.0, 4.0]
    """
    pure = _folding(pure_of(fn), fold_in_axes)
    vmap = functools.partial(jax.vmap, axis_name=axis_name, **kwargs)

    @error_prefix("jax_vmap")
    def mapped(key: Key, /, *args: PyTree, **named: PyTree) -> PyTree:
        size = _num_rows(fn, in_axes, axis_size, args, named)
        leaves, tree = jax.tree.flatten((args, named))
        spread = spread_prefix((_for_each(in_axes, len(args)), dict.fromkeys(named, 0)), tree)
        tensors, values = CLOSURE.held()
        token, is_read = CLOSURE.token, bool(CLOSURE.readers)

        def of_leaves(key: Key, *inputs: jax.Array) -> PyTree:
            args, named = jax.tree.unflatten(tree, inputs[len(values) :])
            reader = Reader(tensors, inputs[: len(values)], token, partial=True)
            with reader.active() if is_read else contextlib.nullcontext():
                return pure(key, *args, **named)

        axes = (None, *(None for _ in values), *spread)
        run = vmap_of_arrays(of_leaves, axes, out_axes, axis_size=size, vmap=vmap)
        return run(key, *values, *map(jax.numpy.asarray, leaves))

    return adapt(fn, mapped)


def _num_rows(
    fn: Callable[..., object], in_axes: PyTree, axis_size: int | None, args: Sequence[PyTree], named: dict[str, PyTree]
) -> int:
    """How many rows are mapped, by JAX, which refuses axes that do not fit the arguments as the user counts them."""
    found: list[int] = []

    @functools.wraps(fn, updated=())
    def row(*args: PyTree, **named: PyTree) -> None:
        found.append(jax.lax.axis_size("rows"))

    jax.vmap(row, in_axes, axis_name="rows", axis_size=axis_size)(*args, **named)
    return found[0]


@public
def jax_pmap(
    fn: Callable[A, R],
    axis_name: str | None = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[Device] | None = None,
    fold_in_axes: Axes = (),
    **kwargs: Any,
) -> Callable[A, R]:
    """`jax.pmap` of a torch callable: `jax_vmap`, with each element of the batch on a device of its own.

    Results stay on their devices: mapping them again moves nothing. New code is often shorter with `jax_shard_map`,
    which takes arrays as a whole and any mesh. Random operators draw the same numbers on every device, unless the key
    is folded over `axis_name`.

    Args:
        fn: A torch callable of what one device gets.
        axis_name: The devices as a named axis for `torch_shard.collectives`.
        in_axes: The dim of each argument that is spread over the devices, None to give the whole to each.
        out_axes: Where the results hold it.
        static_broadcasted_argnums: Arguments that are hashable Python values, known when the program is compiled.
        donate_argnums: Arguments whose memory the program may use.
        devices: Which devices, in order; by default the first ones.
        fold_in_axes: Named axes along which random numbers differ.
        **kwargs: Further arguments of `jax.pmap`.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import psum
        >>> ts.jax_pmap(lambda x: psum(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0])).tolist()
        [3.0, 3.0]
    """
    check_kind("axis_name", axis_name, str | None)
    options: dict[str, Any] = {"out_axes": out_axes, **kwargs}
    if devices is not None:
        options["devices"] = as_devices(devices)

    @error_prefix("jax_pmap")
    def compile_for(run: Pure, num_args: int) -> Pure:
        names = names_of(fn, num_args)
        for name, positions in (
            ("static_broadcasted_argnums", static_broadcasted_argnums),
            ("donate_argnums", donate_argnums),
        ):
            options[name] = as_positions(name, positions, names)

        mapped = jax.pmap(
            _counted_as(fn, run), axis_name, in_axes=(*_for_each(in_axes, num_args), (None, None)), **options
        )
        return lambda values, key, /, *args, **named: mapped(*args, (values, key), **named)

    return adapt(fn, PerClosure(_folding(pure_of(fn), fold_in_axes), compile_for))


@public
def jax_shard_map(
    fn: Callable[A, R],
    *,
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: str | Sequence[str] | frozenset[str] = (),
    check_vma: bool = True,
    fold_in_axes: Axes = (),
) -> Callable[A, R]:
    """`jax.shard_map` of a torch callable: it sees one device's shards of the arguments and gives those of the results.

    The program is compiled once per signature. Arguments need not be placed before. Tensors that `fn` reaches by
    itself, such as the parameters of a closed-over module, are whole on every device. `torch_shard.collectives`
    communicate. Random operators draw the same numbers on every device, unless the key is folded over an axis: with
    `fold_in_axes` for all of `fn`, or with `collectives.fold_in_axis` for a part of it.

    Args:
        fn: A torch callable of tensors of local shapes.
        mesh: The devices, with named axes.
        in_specs: How each argument is split: a `PartitionSpec` for all, or a tuple with a pytree of them for each.
        out_specs: How the results lie: a spec for all, or a pytree of them. A result that a spec does not name an axis
            for must be the same along that axis (after `psum` and its kin, or made from what is).
        axis_names: The axes that are mapped, by default all; the compiler goes on to shard along the others.
        check_vma: True lets JAX track what varies over which axes. It then refuses a result that is not the same on all
            devices where `out_specs` says that it is. Without it such a result is silently that of one device, and
            `jax_grad` within `fn` gives each device's own gradient.
        fold_in_axes: Mesh axes along which random numbers differ.

    Raises:
        TypeError: A spec is no `PartitionSpec`.
        ValueError: A spec does not fit its argument or result, in JAX's words.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> from torch_shard.collectives import psum
        >>> mean = ts.jax_shard_map(
        ...     lambda x: psum(x.sum(), "i") / 8, mesh=ts.make_mesh(i=4), in_specs=P("i"), out_specs=P()
        ... )
        >>> float(mean(torch.arange(8.0)))
        3.5
    """
    check_mesh(mesh)

    def compile_for(run: Pure, num_args: int) -> Pure:
        specs = _for_each(in_specs, num_args)

        def whole(values: list[jax.Array], key: Key, *args: PyTree) -> PyTree:
            outer = manual_axes()  # in a function that is mapped over other axes of the mesh
            axes = set(_names(axis_names) or mesh.axis_names) - set(outer)
            if outer:
                _check_nesting(mesh, axes)
            mapped = jax.shard_map(
                _counted_as(fn, run),
                mesh=None if outer else mesh,
                in_specs=(*specs, P()),
                out_specs=out_specs,
                axis_names=axes,
                check_vma=check_vma,
            )
            return mapped(*args, (values, key))

        return jax.jit(whole)

    compiled = PerClosure(_folding(pure_of(fn), fold_in_axes), compile_for)

    @error_prefix("jax_shard_map")
    def mapped(key: Key, /, *args: PyTree) -> PyTree:
        for leaf in jax.tree.leaves(args):
            if isinstance(getattr(leaf, "sharding", None), NamedSharding):
                check_mesh(leaf.sharding.mesh)  # JAX fails with a KeyError, of an axis that is Explicit
        return compiled(key, *args)

    return adapt(fn, mapped)


def _counted_as(fn: Callable[..., object], run: Pure) -> Callable[..., PyTree]:
    """With one argument for values and key, the last, so that JAX counts the others as the user does."""

    @functools.wraps(fn, updated=())
    def local(*args: PyTree, **named: PyTree) -> PyTree:
        *own, (values, key) = args
        return run(values, key, *own, **named)

    return local


def _check_nesting(mesh: Mesh, axes: set[str]) -> None:
    """Refuse a map within another one that has all its axes, or another mesh: JAX would map over those of the other."""
    around = jax.sharding.get_abstract_mesh()
    if not axes or dict(around.shape) != dict(mesh.shape):
        raise ValueError(
            f"jax_shard_map: a map around this one has the axes {tuple(manual_axes())} of {dict(around.shape)}. A map "
            f"within needs the same mesh and other axes of it, and has the mesh {describe_mesh(mesh)}. Give the outer "
            "jax_shard_map fewer axis_names."
        )


def _folding(pure: Pure, axes: Axes) -> Pure:
    """`pure` with a key that differs along these axes."""
    names = _names(axes)
    if not names:
        return pure

    def folded(key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return pure(None if key is None else fold_axes(key, names), *args, **kwargs)

    return folded


def _names(axes: Iterable[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _for_each(given: PyTree, num_args: int) -> tuple[PyTree, ...]:
    """Axes or specs of each argument, of what is given for all or for each."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,) * num_args


def names_of(fn: Callable[..., object], num_args: int) -> list[str]:
    """Names of the arguments of a callable, for errors."""
    parameters = () if (signature := signature_of(fn)) is None else signature.parameters.values()
    names = [p.name for p in parameters if p.kind < inspect.Parameter.VAR_POSITIONAL]
    return [names[i] if i < len(names) else f"argument {i}" for i in range(num_args)]
