"""The adapters that map a torch callable over devices or rows, and bind named axes for `torch_shard.collectives`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from torch_shard._common.axes import manual_axes, size_of
from torch_shard._common.caller import caller, error_prefix, public
from torch_shard._common.random import Key, fold_axes
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import as_positions, check_count, check_kind, check_options, is_integer
from torch_shard._interop import CLOSURE, PerClosure, Pure, Reader, adapt, pure_of, shift
from torch_shard._sharding import as_devices, check_mesh
from torch_shard._spmd.check_maps import (
    as_names,
    check_axes,
    check_axis_name,
    check_inputs,
    check_leaves,
    check_mapped,
    check_names,
    check_nesting,
    check_outermost,
    check_outputs,
    check_places,
    check_rows,
    spread_specs,
)
from torch_shard._spmd.vmap import vmap_of_arrays

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
    if axis_name is not None:
        check_axis_name(axis_name)
    check_axes("out_axes", out_axes)
    if not (axis_size is None or is_integer(axis_size)):
        raise TypeError(f"jax_vmap: axis_size must be an int, got {axis_size!r}.")
    if axis_size is not None:
        check_count("axis_size", axis_size)
    check_options(jax.vmap, kwargs, ("fun",))
    vmap = functools.partial(jax.vmap, axis_name=axis_name, **kwargs)

    @error_prefix("jax_vmap")
    def mapped(key: Key, /, *args: PyTree, **named: PyTree) -> PyTree:
        axes = _axes_of(in_axes, len(args), fn)
        names = [*names_of(fn, len(args)), *named]
        spread = check_mapped(names, (*args, *named.values()), (*axes, *(0 for _ in named)), axis_size=axis_size)
        leaves, tree = jax.tree.flatten((args, named))

        tensors, values = CLOSURE.held()
        token, is_read = CLOSURE.token, bool(CLOSURE.readers)

        def of_leaves(key: Key, *inputs: jax.Array) -> PyTree:
            args, named = jax.tree.unflatten(tree, inputs[len(values) :])
            reader = Reader(tensors, inputs[: len(values)], token, partial=True)
            with reader.active() if is_read else contextlib.nullcontext():
                return check_rows(pure(key, *args, **named), out_axes)

        axes = (None, *(None for _ in values), *spread.axes)
        run = vmap_of_arrays(of_leaves, axes, out_axes, axis_size=spread.size, vmap=vmap)
        return run(key, *values, *map(jax.numpy.asarray, leaves))

    return adapt(fn, mapped)


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
    if axis_name is not None:
        check_axis_name(axis_name)
    check_axes("out_axes", out_axes)
    check_options(jax.pmap, kwargs, ("fun",))
    options: dict[str, Any] = {"out_axes": out_axes, **kwargs}
    if devices is not None:
        options["devices"] = devices = as_devices(devices)

    @error_prefix("jax_pmap")
    def compile_for(run: Pure, num_args: int) -> Pure:
        axes = _axes_of(in_axes, num_args, fn)
        names = names_of(fn, num_args)
        static = as_positions("static_broadcasted_argnums", static_broadcasted_argnums, names)
        donated = as_positions("donate_argnums", donate_argnums, names)
        numbers = {"static_broadcasted_argnums": shift(static), "donate_argnums": shift(donated)}

        def local(given: tuple[list[jax.Array], Key], /, *args: PyTree, **named: PyTree) -> PyTree:
            return check_rows(run(*given, *args, **named), out_axes)

        # One argument for values and key: where in_axes is flat, with an empty list of values JAX 0.10 can take the
        # axes of the arguments for those of their leaves.
        mapped = jax.pmap(local, axis_name, in_axes=((None, None), *axes), **numbers, **options)
        limit = len(devices) if devices is not None else jax.local_device_count(kwargs.get("backend"))

        @error_prefix("jax_pmap")
        def checked(values: list[jax.Array], key: Key, /, *args: PyTree, **named: PyTree) -> PyTree:
            check_outermost()
            every = (*args, *named.values()), (*axes, *(0 for _ in named))
            check_mapped([*names, *named], *every, axis_size=kwargs.get("axis_size"), static=static, limit=limit)
            return mapped((values, key), *args, **named)

        return checked

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
        TypeError: A spec is no `PartitionSpec`, or arguments and specs differ in structure.
        ValueError: A spec does not fit its argument or result, each named with what to do.

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
    check_kind("check_vma", check_vma, bool)
    mapped_names = as_names("axis_names", axis_names)
    check_names("in_specs", in_specs, mesh, mapped_names)
    check_names("out_specs", out_specs, mesh, mapped_names)
    pure = _folding(pure_of(fn), fold_in_axes, mesh)
    called = functools.cache(functools.partial(names_of, fn))  # not at each call

    def compile_for(run: Pure, num_args: int) -> Pure:
        names = called(num_args)
        given = tuple(in_specs) if isinstance(in_specs, (tuple, list)) else (in_specs,) * num_args

        def whole(values: list[jax.Array], key: Key, *args: PyTree) -> PyTree:
            specs = spread_specs("in_specs", given, args, names)
            check_inputs(specs, args, names, mesh)

            def local(*inputs: PyTree) -> PyTree:
                result = run(*inputs)
                check_outputs(result, out_specs, mesh, axes if check_vma else set())
                return result

            if outer := manual_axes():  # in a function that is mapped over other axes of the mesh
                check_nesting(mesh, mapped_names)
            axes = set(mapped_names or mesh.axis_names) - set(outer)
            mapped = jax.shard_map(
                local,
                mesh=None if outer else mesh,
                in_specs=(P(), P(), *specs),
                out_specs=out_specs,
                axis_names=axes,
                check_vma=check_vma,
            )
            return mapped(values, key, *args)

        return jax.jit(whole)

    @error_prefix("jax_shard_map")
    def mapped(key: Key, /, *args: PyTree, **named: PyTree) -> PyTree:
        if named:
            raise TypeError(f"jax_shard_map: in_specs are by position, got the keyword {next(iter(named))!r}.")
        names = called(len(args))
        for name, arg in zip(names, args, strict=True):
            check_leaves(name, arg)
        check_places(names, args, mesh)
        return compiled(key, *args)

    compiled = PerClosure(pure, compile_for)
    return adapt(fn, mapped)


def _folding(pure: Pure, axes: Axes, mesh: Mesh | None = None) -> Pure:
    """`pure` with a key that differs along these axes."""
    names = as_names("fold_in_axes", axes)
    if mesh is not None and not set(names) <= set(mesh.axis_names):
        raise ValueError(f"{caller()}: fold_in_axes={axes!r} names an axis that the mesh lacks: {mesh.axis_names}.")
    if not names:
        return pure

    def folded(key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        unbound = [name for name in names if size_of(name) is None]
        if unbound:
            raise ValueError(
                f"{caller()}: fold_in_axes={axes!r} names {unbound[0]!r}, which is not the axis_name here."
            )
        return pure(None if key is None else fold_axes(key, names), *args, **kwargs)

    return folded


def _axes_of(in_axes: PyTree, num_args: int, fn: Callable[..., object]) -> tuple[PyTree, ...]:
    check_axes("in_axes", in_axes)
    if not isinstance(in_axes, (tuple, list)):
        return (in_axes,) * num_args
    if len(in_axes) != num_args:
        raise ValueError(
            f"{caller()}: in_axes has {len(in_axes)} entries, and the function was called with {num_args} arguments "
            f"({', '.join(names_of(fn, num_args))}). Give one for each, or an int for all."
        )
    return tuple(in_axes)


def names_of(fn: Callable[..., object], num_args: int) -> list[str]:
    """Names of the arguments of a callable, for errors."""
    try:
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind < inspect.Parameter.VAR_POSITIONAL]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(num_args)]
