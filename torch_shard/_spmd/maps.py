"""The adapters that map a torch callable over devices or rows, and bind named axes for `torch_shard.collectives`."""

from __future__ import annotations

import contextlib
import functools
import inspect
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
from torch_shard._common.specs import describe_mesh
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import as_positions, check_kind, signature_of
from torch_shard._interop import CLOSURE, PerClosure, Pure, Reader, adapt, pure_of
from torch_shard._sharding import as_devices, check_mesh


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
        result_axes = spread_prefix(out_axes, tree)
        # JAX gives integers a cotangent of the dtype float0, which is none.
        has_cotangent = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]
        has_gradient = [array is not None and jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays]

        row_cotangents: list[jax.Array] = []
        cotangent_axes: list[int | None] = []
        for cotangent, axis, is_float in zip(leaves, result_axes, has_cotangent, strict=True):
            if is_float:
                # A result that is not mapped is one for all rows: each has its share of the gradient.
                row_cotangents.append(cotangent if axis is not None else cotangent / axis_size)
                cotangent_axes.append(axis)

        pull = functools.partial(_pull, fn, has_gradient, has_cotangent)
        run = vmap_of_arrays(pull, (*in_axes, *cotangent_axes), 0, axis_size=axis_size, vmap=vmap)
        row_gradients = iter(run(*arrays, *row_cotangents))

        gradients: list[jax.Array | None] = []
        for axis, is_wanted in zip(in_axes, has_gradient, strict=True):
            gradients.append(_unmap(next(row_gradients), axis) if is_wanted else None)
        return tuple(gradients)

    mapped.defvjp(forward, backward)
    return mapped


def _pull(
    fn: Callable[..., PyTree], has_gradient: list[bool], has_cotangent: list[bool], *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of one row."""
    num_arrays = len(has_gradient)
    arrays = inputs[:num_arrays]
    cotangents = list(inputs[num_arrays:])
    _, pull = vjp_of_chosen(fn, arrays, has_gradient, has_cotangent)
    return pull(cotangents)


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
        # Like `jax.vmap`: `in_axes` is of positional arguments, and keyword arguments are mapped along their first dim.
        leaf_axes = spread_prefix((_for_each(in_axes, len(args)), dict.fromkeys(named, 0)), tree)

        # What a transform around this one differentiates must be an argument of the `custom_vjp`.
        tensors, values = CLOSURE.held()
        num_values = len(values)
        token = CLOSURE.token
        is_read = bool(CLOSURE.readers)

        def of_leaves(key: Key, *inputs: jax.Array) -> PyTree:
            args, named = jax.tree.unflatten(tree, inputs[num_values:])
            reader = Reader(tensors, inputs[:num_values], token, partial=True)
            with reader.active() if is_read else contextlib.nullcontext():
                return pure(key, *args, **named)

        axes = (None, *[None] * num_values, *leaf_axes)
        run = vmap_of_arrays(of_leaves, axes, out_axes, axis_size=size, vmap=vmap)
        return run(key, *values, *map(jax.numpy.asarray, leaves))

    return adapt(fn, mapped)


def _num_rows(
    fn: Callable[..., object], in_axes: PyTree, axis_size: int | None, args: Sequence[PyTree], named: dict[str, PyTree]
) -> int:
    """How many rows are mapped, by JAX, which refuses axes that do not fit the arguments as the user counts them."""
    sizes: list[int] = []

    @functools.wraps(fn, updated=())
    def row(*args: PyTree, **named: PyTree) -> None:
        sizes.append(jax.lax.axis_size("rows"))

    jax.vmap(row, in_axes, axis_name="rows", axis_size=axis_size)(*args, **named)
    return sizes[0]


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
        static = as_positions("static_broadcasted_argnums", static_broadcasted_argnums, names)
        donated = as_positions("donate_argnums", donate_argnums, names)

        mapped = jax.pmap(
            _counted_as(fn, run),
            axis_name,
            in_axes=(*_for_each(in_axes, num_args), (None, None)),
            static_broadcasted_argnums=static,
            donate_argnums=donated,
            **options,
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
            # Not empty in a function that is mapped over other axes of the mesh.
            outer = manual_axes()
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
            # Of an axis that is Explicit, JAX fails with a KeyError.
            if isinstance(getattr(leaf, "sharding", None), NamedSharding):
                check_mesh(leaf.sharding.mesh)
        return compiled(key, *args)

    return adapt(fn, mapped)


def _counted_as(fn: Callable[..., object], run: Pure) -> Callable[..., PyTree]:
    """With one argument for values and key, the last, so that JAX counts the others as the user does."""

    @functools.wraps(fn, updated=())
    def local(*args: PyTree, **named: PyTree) -> PyTree:
        *user_args, (values, key) = args
        return run(values, key, *user_args, **named)

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


def _for_each(prefix: PyTree, num_args: int) -> tuple[PyTree, ...]:
    """Axes or specs of each argument, where a user said one for all or one for each."""
    if isinstance(prefix, tuple | list):
        return tuple(prefix)
    return (prefix,) * num_args


def names_of(fn: Callable[..., object], num_args: int) -> list[str]:
    """Names of the arguments of a callable, for errors."""
    signature = signature_of(fn)
    parameters = [] if signature is None else list(signature.parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind < inspect.Parameter.VAR_POSITIONAL]
    names += [f"argument {position}" for position in range(len(names), num_args)]
    return names[:num_args]
