"""`tpmap`: a torch function runs once per device, and nobody sees the device axis unless they ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from torch_shard._common.caller import error_prefix, public
from torch_shard._common.random import Key, fold_axes, wrap_seed
from torch_shard._common.static import Static
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import check_kind
from torch_shard._interop import PerClosure, Pure, adapt, pure_of
from torch_shard._sharding import as_devices
from torch_shard._spmd.arg_kinds import KINDS, RNG, STATIC, ArgKind, ArgKinds, Kind, is_typed_key, kind_of


@public
def tpmap(
    f: Callable[..., PyTree],
    axis_name: str,
    argtypes: Sequence[Kind],
    kwargtypes: Mapping[str, Kind] | None = None,
    *,
    devices: Sequence[Device] | None = None,
    wrap_return: Callable[[PyTree], PyTree] | Kind | None = None,
) -> Callable[..., PyTree]:
    """Run a torch function once per device, as one compiled program: a transparent `pmap`.

    No device is touched before the first call. Collectives work by `axis_name`, and gradients taken within `f` are each
    device's own, as under `jax_pmap`. Random functions of torch draw other numbers on each device, as they would in a
    loop over the devices: from the device's key of the first "rng" argument, or anew at each call where there is none.

    Args:
        f: A torch callable of what one device sees.
        axis_name: The devices as a named axis for `torch_shard.collectives`.
        argtypes: The kind of each positional argument; arguments are pytrees, whose leaves are all of that kind:

            - "broadcast": each device sees the whole.
            - "shard": the leading dim is split; of shape (n, ...), each device sees (n / num_devices, ...).
            - "rng": a JAX key or an integer seed is split; each device sees the words of its own key, (2,) uint32.
            - "static": a hashable Python value, known when the program is compiled.
            - "thru": of shape (num_devices, ...), each device sees its row.
            - an `ArgKind`, for any other way.
        kwargtypes: The kinds of keyword arguments, by name.
        devices: Which devices, in order; by default all that JAX sees.
        wrap_return: What to make of the results, which have a leading dim of devices: a callable of the pytree, or
            a kind to undo, such as "shard" to merge the first two dims.

    Raises:
        ValueError: A kind is unknown; or, when called, the arguments are not those that were announced, or do not suit
            their kinds. All are listed.

    Example:
        >>> import torch, torch_shard as ts
        >>> from torch_shard.collectives import psum
        >>> share = ts.tpmap(lambda x: x / psum(x.sum(), "i"), "i", ["shard"], wrap_return="shard")
        >>> share(torch.full((16,), 3.0))[:2].tolist()
        [0.0625, 0.0625]
    """
    check_kind("axis_name", axis_name, str)
    kinds = ArgKinds(f, argtypes, kwargtypes or {})
    join = _join_of(wrap_return)
    mesh = functools.cache(lambda: _mesh_of(axis_name, devices))
    compiled = PerClosure(pure_of(f), lambda run, num_args: jax.jit(_mapped(run, mesh(), kinds)))

    @error_prefix("tpmap")
    def checked(key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        kinds.check(args, kwargs, mesh().size)
        args, kwargs = kinds.map(_prepare, args, kwargs)
        return compiled(key, *args, **kwargs)

    mapped = adapt(f, checked)
    if join is None:
        return mapped

    @functools.wraps(f, updated=())
    def joined(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return join(mapped(*args, **kwargs))

    return joined


def _mesh_of(axis_name: str, devices: Sequence[Device] | None) -> Mesh:
    chosen = np.asarray(jax.devices() if devices is None else as_devices(devices))
    return Mesh(chosen, (axis_name,), axis_types=(AxisType.Auto,))


def _prepare(kind: ArgKind, value: PyTree) -> PyTree:
    """An argument as the compiled program takes it: of static values only the type of the call, keys as words."""
    if kind is STATIC:
        return Static(value)
    return jax.tree.map(_words, value) if kind is RNG else value


def _words(key: PyTree) -> jax.Array:
    if isinstance(key, int | np.integer):
        key = jax.random.key(int(key), impl="threefry2x32")
    return jax.random.key_data(key) if is_typed_key(key) else key


def _mapped(run: Pure, mesh: Mesh, kinds: ArgKinds) -> Pure:
    """The function of whole arguments, of one that runs on each device."""
    (axis,) = mesh.axis_names

    def local(values: list[jax.Array], key: Key, args: PyTree, kwargs: PyTree) -> PyTree:
        args, kwargs = kinds.map(_take_row, args, kwargs)
        seeds = jax.tree.leaves(kinds.select(RNG, args, kwargs))
        if seeds:
            key = jax.random.fold_in(wrap_seed(seeds[0]), _OF_TORCH)
        elif key is not None:
            key = fold_axes(key, (axis,))
        args, kwargs = kinds.map(lambda kind, value: value.value if kind is STATIC else value, args, kwargs)
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), run(values, key, *args, **kwargs))

    def whole(values: list[jax.Array], key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        specs = kinds.map(lambda kind, value: P(axis) if kind.spread else P(), args, kwargs)
        rows = kinds.map(lambda kind, value: _spread(kind, value, mesh.size), args, kwargs)
        # Everything counts as each device's own, so that gradients within are too, of closed-over parameters as well.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), *specs), out_specs=P(axis), check_vma=False)
        return mapped(values, key, *rows)

    return whole


_OF_TORCH = 0x7470_6D61  # keeps what torch draws apart from what `f` makes of the same key by fold_in or split


def _spread(kind: ArgKind, value: PyTree, num_devices: int) -> PyTree:
    spread = kind.spread
    if spread is None:
        return value
    return jax.tree.map(functools.partial(pure_of(lambda leaf: spread(leaf, num_devices)), None), value)


def _take_row(kind: ArgKind, value: PyTree) -> PyTree:
    return jax.tree.map(lambda rows: rows.squeeze(0), value) if kind.spread else value  # JAX refuses more rows than one


def _join_of(wrap_return: PyTree) -> Callable[[PyTree], PyTree] | None:
    if wrap_return is None or callable(wrap_return):
        return wrap_return
    join = kind_of("wrap_return", wrap_return).join
    if join is None:
        able = ", ".join(repr(name) for name, kind in KINDS.items() if kind.join)
        raise ValueError(f"tpmap: wrap_return={wrap_return!r} cannot be undone; {able} can. Or pass a callable.")
    return lambda result: jax.tree.map(join, result)
