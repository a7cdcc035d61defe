"""`tpmap`: a torch function runs once per device, and nobody sees the device axis unless they ask for it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from torch_shard._common.caller import error_prefix, public
from torch_shard._common.convert import Static
from torch_shard._common.random import Key, fold_axes, wrap_seed
from torch_shard._common.types import Device, PyTree
from torch_shard._common.validate import MAX_SEED, check_kind, is_integer
from torch_shard._interop import PerClosure, Pure, adapt, call_jax, pure_of
from torch_shard._sharding import as_devices
from torch_shard._spmd.maps import names_of

Check = Callable[[PyTree, int], str | None]

VALUES = jax.Array | np.ndarray | np.generic | int | float | complex
"""What may be mapped: bools are ints."""


@dataclasses.dataclass(frozen=True)
class ArgKind:
    """The way in which an argument of a function under `tpmap` reaches the devices.

    The strings that `tpmap` takes are names of such objects; make your own for another way.

    Attributes:
        spread: Maps a leaf of the argument and the number of devices to a tensor of shape (num_devices, ...), whose
            rows the devices see; a torch function. None gives the whole leaf to every device.
        join: Its inverse, if `wrap_return` may name this kind: maps a result of shape (num_devices, ...) to what is
            returned.
        check: Says what is wrong with a leaf, for that number of devices, or None. Leaves are arrays, with a `shape`,
            or Python numbers.
        needs_leaves: True makes an argument without any tensor an error.

    Example:
        >>> import torch, torch_shard as ts
        >>> dealt = ts.ArgKind(spread=lambda x, n: x.reshape(-1, n, *x.shape[1:]).movedim(1, 0))  # like cards
        >>> ts.tpmap(lambda x: x, "i", [dealt])(torch.arange(16))[0].tolist()
        [0, 8]
    """

    spread: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    join: Callable[[torch.Tensor], torch.Tensor] | None = None
    check: Check = lambda leaf, num_devices: None
    needs_leaves: bool = True


def _check_shard(leaf: ArrayLike, num_devices: int) -> str | None:
    shape = np.shape(leaf)
    if not shape:
        return "is a scalar, which has no leading dim to split"
    if shape[0] % num_devices:
        return f"has {shape[0]} rows, which do not divide among {num_devices} devices: pad or drop some"
    return None


def _check_thru(leaf: ArrayLike, num_devices: int) -> str | None:
    shape = np.shape(leaf)
    if not shape or shape[0] != num_devices:
        return f"must have a leading dim of {num_devices}, one row for each device"
    return None


def _check_rng(leaf: ArrayLike, num_devices: int) -> str | None:
    if is_integer(leaf):
        if 0 <= leaf <= MAX_SEED:
            return None
        return f"is the seed {leaf}: give one from 0 to 2**32 - 1"

    if is_typed_key(leaf):
        is_key = np.shape(leaf) == () and jax.random.key_impl(leaf) == "threefry2x32"
    else:
        is_key = getattr(leaf, "dtype", None) == np.uint32 and np.shape(leaf) == (2,)
    if is_key:
        return None
    return "is neither one key of JAX (jax.random.key(0), or its two words) nor an integer seed"


def _split_key(words: torch.Tensor, num_devices: int) -> torch.Tensor:
    return call_jax(lambda key: jax.random.key_data(jax.random.split(wrap_seed(key), num_devices)), words)


RNG = ArgKind(_split_key, check=_check_rng)

STATIC = ArgKind(needs_leaves=False)

KINDS = {
    "broadcast": ArgKind(needs_leaves=False),
    "shard": ArgKind(lambda x, n: x.reshape(n, x.shape[0] // n, *x.shape[1:]), lambda x: x.flatten(0, 1), _check_shard),
    "rng": RNG,
    "static": STATIC,
    "thru": ArgKind(lambda x, n: x, lambda x: x, _check_thru),
}

Kind = str | ArgKind


def kind_of(where: str, kind: object) -> ArgKind:
    if isinstance(kind, ArgKind):
        return kind
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    close = difflib.get_close_matches(str(kind), KINDS, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"tpmap: {where} is {kind!r}, which is not a kind of argument. {hint}The kinds are "
        f"{', '.join(map(repr, KINDS))}, or an ArgKind of your own."
    )


class ArgKinds:
    """The kinds of all arguments, by position and by name."""

    def __init__(self, f: Callable[..., object], argtypes: Sequence[Kind], kwargtypes: Mapping[str, Kind]) -> None:
        check_kind("argtypes", argtypes, Sequence)
        check_kind("kwargtypes", kwargtypes, Mapping)
        self._positional = [kind_of(f"argtypes[{i}]", kind) for i, kind in enumerate(argtypes)]
        self._named = {name: kind_of(f"kwargtypes[{name!r}]", kind) for name, kind in kwargtypes.items()}
        self.names = names_of(f, len(self._positional))
        self._what = getattr(f, "__qualname__", type(f).__name__)

    def map(
        self, fn: Callable[[ArgKind, PyTree], PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """Apply `fn` to each kind and its argument; gives `(args, kwargs)`."""
        new_args = tuple(fn(kind, value) for kind, value in zip(self._positional, args, strict=True))
        new_kwargs = {name: fn(self._named[name], value) for name, value in kwargs.items()}
        return new_args, new_kwargs

    def items(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> Iterator[tuple[str, ArgKind, PyTree]]:
        """Each argument with its name and kind."""
        yield from zip(self.names, self._positional, args, strict=True)
        for name, value in kwargs.items():
            yield name, self._named[name], value

    def check(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], num_devices: int) -> None:
        """Refuse arguments that were not announced, or that do not suit their kinds."""
        if len(args) != len(self._positional):
            announced = ", ".join(self.names)
            raise ValueError(
                f"tpmap: {self._what} takes {len(self._positional)} positional arguments by its argtypes "
                f"({announced}), and got {len(args)}. Arguments that are passed by name need an entry in kwargtypes."
            )
        for name in kwargs:
            if name not in self._named:
                raise ValueError(
                    f"tpmap: {self._what} got the keyword {name!r}, and its kwargtypes name {list(self._named)}."
                )

        faults: list[str] = []
        for name, kind, value in self.items(args, kwargs):
            faults += _faults(name, kind, value, num_devices)
        if faults:
            raise ValueError(f"tpmap: arguments of {self._what}:\n\n" + "\n".join(f"  {fault}" for fault in faults))


def _faults(name: str, kind: ArgKind, value: PyTree, num_devices: int) -> Iterator[str]:
    """Faults of an argument of this kind."""
    if kind is STATIC:
        # JAX takes what is not hashable, and a list that has changed would still be equal to itself.
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            yield f'{name} is "static", and holds a tensor: programs are made for the values of static arguments'
        elif not _is_hashable(value):
            yield f'{name} is "static", and a {type(value).__name__} is not hashable: pass a tuple, a string, a number'
        return

    leaves = jax.tree_util.tree_leaves_with_path(value)
    if kind.needs_leaves and not leaves:
        yield f"{name} is {value!r}: it holds no tensor"
    for path, leaf in leaves:
        where = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim:
            where += f" {leaf.shape}"
        if not isinstance(leaf, VALUES):
            yield f'{where} is {leaf!r}, which is not a tensor: the kind of Python values is "static"'
        elif kind is not RNG and is_typed_key(leaf):
            yield f'{where} is a key of JAX: its kind is "rng"'
        else:
            fault = kind.check(leaf, num_devices)
            if fault:
                yield f"{where} {fault}"


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_typed_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
    if kind is RNG:
        return jax.tree.map(_words, value)
    return value


def _words(key: PyTree) -> jax.Array:
    if is_integer(key):
        key = jax.random.key(int(key), impl="threefry2x32")
    return jax.random.key_data(key) if is_typed_key(key) else key


def _mapped(run: Pure, mesh: Mesh, kinds: ArgKinds) -> Pure:
    """The function of whole arguments, of one that runs on each device."""
    (axis,) = mesh.axis_names

    def local(values: list[jax.Array], key: Key, args: PyTree, kwargs: PyTree) -> PyTree:
        args, kwargs = kinds.map(_take_row, args, kwargs)
        seeds = [value for _, kind, value in kinds.items(args, kwargs) if kind is RNG]
        words = jax.tree.leaves(seeds)
        if words:
            key = jax.random.fold_in(wrap_seed(words[0]), _OF_TORCH)
        elif key is not None:
            key = fold_axes(key, (axis,))

        args, kwargs = kinds.map(lambda kind, value: value.value if kind is STATIC else value, args, kwargs)
        results = run(values, key, *args, **kwargs)
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), results)

    def whole(values: list[jax.Array], key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        specs = kinds.map(lambda kind, value: P(axis) if kind.spread else P(), args, kwargs)
        rows = kinds.map(lambda kind, value: _spread(kind, value, mesh.size), args, kwargs)
        # Everything counts as each device's own, so that gradients within are too, of closed-over parameters as well.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), *specs), out_specs=P(axis), check_vma=False)
        return mapped(values, key, *rows)

    return whole


# Keeps what torch draws apart from what `f` makes of the same key by fold_in or split.
_OF_TORCH = 0x7470_6D61


def _spread(kind: ArgKind, value: PyTree, num_devices: int) -> PyTree:
    spread = kind.spread
    if spread is None:
        return value

    spread_leaf = functools.partial(pure_of(lambda leaf: spread(leaf, num_devices)), None)
    return jax.tree.map(spread_leaf, value)


def _take_row(kind: ArgKind, value: PyTree) -> PyTree:
    if kind.spread is None:
        return value
    # `shard_map` leaves a dim of one row. JAX refuses to squeeze more.
    return jax.tree.map(lambda rows: rows.squeeze(0), value)


def _join_of(wrap_return: PyTree) -> Callable[[PyTree], PyTree] | None:
    if wrap_return is None or callable(wrap_return):
        return wrap_return
    join = kind_of("wrap_return", wrap_return).join
    if join is None:
        able = ", ".join(repr(name) for name, kind in KINDS.items() if kind.join)
        raise ValueError(f"tpmap: wrap_return={wrap_return!r} cannot be undone; {able} can. Or pass a callable.")
    return lambda result: jax.tree.map(join, result)
