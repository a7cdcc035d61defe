"""One tree per device, one tree per process, and whether replicas are what they should be: equal."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import adopt_torch_nodes, tensor_to_numpy
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, check_number
from torch_shard._device import JaxTensor, to_cpu
from torch_shard._hosts import exchange, pack

Part = tuple[str, str]
"""The path of a leaf, and which part of it, where it is sharded."""


@public
def unshard(tree: PyTree) -> list[PyTree]:
    """Take the leading dim of devices apart, for plain Python loops.

    Args:
        tree: A pytree of tensors or arrays of shape (num_devices, ...), such as `tpmap` returns.

    Returns:
        A list with one tree per device, of tensors of shape (...), each on the devices where the whole was; gradients
        flow.

    Raises:
        ValueError: The tree is empty, or leading dims are missing or differ.

    Example:
        >>> import torch, torch_shard as ts
        >>> [row["x"].item() for row in ts.unshard({"x": torch.arange(3)})]
        [0, 1, 2]
    """
    adopt_torch_nodes(tree)
    leaves, structure = jax.tree.flatten(tree)
    shapes = {path: tuple(np.shape(leaf)) for path, leaf in _with_paths(tree)}
    if not leaves:
        raise ValueError("unshard: the tree holds no tensor, so there is nothing to take apart.")
    without = [f"{path} {shape}" for path, shape in shapes.items() if not shape]
    if without:
        raise ValueError(f"unshard: every leaf needs a leading dim of devices, and {', '.join(without)} has none.")
    if len({shape[0] for shape in shapes.values()}) > 1:
        shown = ", ".join(f"{path}: {shape[0]}" for path, shape in shapes.items())
        raise ValueError(f"unshard: the leading dims must have one size, the number of devices, got {shown}.")

    rows_of_leaves: list[Sequence[PyTree]] = []
    for leaf in leaves:
        rows_of_leaves.append(leaf.unbind(0) if isinstance(leaf, torch.Tensor) else list(leaf))
    return [jax.tree.unflatten(structure, row) for row in zip(*rows_of_leaves, strict=True)]


@public
def gather_from_jax_processes(tree: PyTree) -> list[PyTree]:
    """Bring the trees of all processes together; every process must call it.

    Args:
        tree: A pytree; trees of different processes may differ in every way. Its leaves are tensors, arrays, numbers,
            strings and bytes. Nodes are lists, tuples and dicts; or others (named tuples, registered classes), where
            all processes give trees of one structure. An array over the devices of several processes must be the same
            on all of them.

    Returns:
        One tree per process, in the order of `jax.process_index()`, with tensors and arrays as CPU tensors.

    Raises:
        TypeError: A leaf is something else.
        ValueError: An array is spread over processes, or processes have different structures with nodes of their own.
            Where one process fails, all raise.

    Example:
        >>> import jax.numpy as jnp, torch_shard as ts
        >>> ts.gather_from_jax_processes({"loss": jnp.float32(0.5), "host": "a"})  # one process, so one tree
        [{'host': 'a', 'loss': tensor(0.5000)}]
    """
    adopt_torch_nodes(tree)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    has_own_nodes = not _is_plain(structure)

    def make() -> tuple[str, PyTree]:
        leaves = [_of_process(path, leaf) for path, leaf in paths]
        return (str(structure), leaves) if has_own_nodes else ("", structure.unflatten(leaves))

    def shown(text: str) -> str:
        return text or "lists, tuples and dicts alone"

    of_processes = exchange(make)
    first_text, _ = of_processes[0]
    for process, (text, _) in enumerate(of_processes):
        if text != first_text:
            raise ValueError(
                f"{caller()}: a tree with nodes other than lists, tuples and dicts must have one structure in all "
                f"processes, found {shown(first_text)} in process 0 and {shown(text)} in process {process}. Give "
                "dicts, or jax.tree.leaves(tree)."
            )

    # Nodes of classes do not travel, as nothing that comes from another process is executed: only their leaves do.
    return [structure.unflatten(tree) if text else tree for text, tree in of_processes]


# The structure is a PyTreeDef, whose type JAX does not name.
def _is_plain(structure: Any) -> bool:
    """Tell whether all nodes are of types of which the structure alone says what they are."""
    node = structure.node_data()
    if node is None:
        return True
    kind, _ = node
    return kind in (list, tuple, dict, type(None)) and all(map(_is_plain, structure.children()))


def _of_process(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, JaxTensor):
        return to_cpu(leaf).detach().clone().as_subclass(torch.Tensor)
    if not isinstance(leaf, JaxTensor | jax.Array):
        try:
            pack(leaf)
        except TypeError as error:
            raise TypeError(f"{caller()}: {jax.tree_util.keystr(path) or 'the tree'}: {error}.") from None
        return leaf
    array = leaf.jax() if isinstance(leaf, JaxTensor) else leaf
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(
            f"{jax.tree_util.keystr(path)} {array.shape} is one array over the devices of several processes, of which "
            "no process holds the whole. Take apart what each holds (array.addressable_shards), or bring it together "
            "with jax.experimental.multihost_utils.process_allgather(array, tiled=True)."
        )
    return to_cpu(array.addressable_data(0) if array.is_fully_replicated else array)


@public
def assert_replica_integrity(tree: PyTree, *, rtol: float = 0.0, atol: float = 0.0, device_axis: bool = False) -> None:
    """Raise if replicas that should be equal are not, on any device of any process; every process must call it.

    The replicas are the copies that devices hold of each part of an array, by its sharding, and what each process
    has of everything else: CPU tensors, numbers, and arrays on its own devices alone. NaNs equal NaNs.

    Args:
        tree: A pytree of tensors, arrays and numbers, of the same structure in all processes.
        rtol: How far replicas may differ, relative to the most common value.
        atol: How far they may differ besides.
        device_axis: True where the rows of the leading dim are replicas too, as in what `tpmap` and `jax_pmap` return.

    Raises:
        AssertionError: In every process: each leaf whose replicas differ, where they are, and by how much.
        ValueError: The tree is empty.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.assert_replica_integrity({"w": torch.tensor([[1.0, 2.0], [1.0, 2.5]])}, device_axis=True)
        Traceback (most recent call last):
        ...
        AssertionError: assert_replica_integrity: replicas differ by more than rtol=0.0, atol=0.0:
        <BLANKLINE>
          ['w']: row 1 differs from row 0 by 0.5 at most.
    """
    check_number("rtol", rtol)
    check_number("atol", atol)
    check_kind("device_axis", device_axis, bool)
    adopt_torch_nodes(tree)
    values: dict[tuple[Part, bytes], Callable[[], np.ndarray]] = {}
    tables = exchange(lambda: _table(tree, device_axis, values))
    _check_leaves([leaves for leaves, _ in tables])
    places: dict[Part, dict[bytes, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for _, replicas in tables:
        for part, place, digest in replicas:
            places[part][digest].append(place)

    disputed = {part: by_digest for part, by_digest in places.items() if len(by_digest) > 1}
    if not disputed:
        return

    # Only of parts that differ do the values travel, one for each digest.
    def disputed_values() -> dict[tuple[Part, bytes], np.ndarray]:
        values_here: dict[tuple[Part, bytes], np.ndarray] = {}
        for part, by_digest in disputed.items():
            for digest in by_digest:
                if (part, digest) in values:
                    values_here[part, digest] = values[part, digest]()
        return values_here

    arrays: dict[tuple[Part, bytes], np.ndarray] = {}
    for of_process in exchange(disputed_values):
        arrays.update(of_process)

    faults: list[str] = []
    for part, by_digest in disputed.items():
        faults += _faults(part, by_digest, arrays, rtol=rtol, atol=atol)
    if faults:
        heading = f"{caller()}: replicas differ by more than rtol={rtol}, atol={atol}:"
        raise AssertionError(f"{heading}\n\n" + "\n".join(faults))


def _faults(
    part: Part,
    places: dict[bytes, list[str]],
    arrays: Mapping[tuple[Part, bytes], np.ndarray],
    *,
    rtol: float,
    atol: float,
) -> Iterator[str]:
    """The replicas of one part that differ from what most of them are."""
    common = max(places, key=lambda digest: len(places[digest]))
    for digest in places:
        if digest == common:
            continue
        difference = _difference(arrays[part, digest], arrays[part, common], rtol, atol)
        if difference is not None:
            others = _join(places[digest])
            most = _join(places[common])
            yield f"  {''.join(part)}: {others} differs from {most} by {difference} at most."


def _table(
    tree: PyTree, device_axis: bool, values: dict[tuple[Part, bytes], Callable[[], np.ndarray]]
) -> tuple[dict[str, str], list[tuple[Part, str, bytes]]]:
    """Describe each leaf and the replicas that this process holds: part, place, digest.

    How to read one of each goes to `values`.
    """
    leaves: dict[str, str] = {}
    replicas: list[tuple[Part, str, bytes]] = []
    process = f" of process {jax.process_index()}" if jax.process_count() > 1 else ""
    for path, leaf in _with_paths(tree):
        array = _array_of(path, leaf)
        leaves[path] = f"{tuple(array.shape)} {array.dtype}"
        if isinstance(array, jax.Array):
            pieces = _shards(array)
        else:
            pieces = [((), "the host", lambda array=array: array)]
        if device_axis:
            pieces = _rows(path, pieces, array.ndim)

        for index, place, read in pieces:
            value = np.ascontiguousarray(read())
            digest = hashlib.blake2b(value.tobytes(), digest_size=16).digest()
            part = path, _describe(index)
            values.setdefault((part, digest), read)
            replicas.append((part, place + process, digest))
    if not leaves:
        raise ValueError("assert_replica_integrity: the tree holds no tensor, so there is nothing to compare.")
    return leaves, replicas


Piece = tuple[tuple[slice, ...], str, Callable[[], np.ndarray]]


def _shards(array: jax.Array) -> Iterator[Piece]:
    for shard in array.addressable_shards:
        place = f"{shard.device.platform.upper()} {shard.device.id}"
        yield shard.index, place, lambda shard=shard: np.asarray(shard.data)


def _rows(path: str, pieces: Iterable[Piece], ndim: int) -> Iterator[Piece]:
    """The rows of the leading dim, each a replica."""
    if not ndim:
        raise ValueError(f"assert_replica_integrity: {path} is a scalar, and device_axis=True needs a leading dim.")
    for index, place, read in pieces:
        first = (index[0].start or 0) if index else 0
        on = "" if place == "the host" else f" on {place}"
        for row in range(len(read())):
            yield index[1:], f"row {first + row}{on}", lambda read=read, row=row: read()[row]


def _array_of(path: str, leaf: PyTree) -> jax.Array | np.ndarray:
    """A leaf as a jax or numpy array."""
    if isinstance(leaf, JaxTensor):
        return leaf.jax()
    if isinstance(leaf, torch.Tensor):
        return tensor_to_numpy(leaf.detach().cpu())
    if isinstance(leaf, jax.Array):
        # numpy has no dtype for a key of JAX, only for the words of one.
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return np.asarray(leaf)
    hint = " Give its state_dict()." if isinstance(leaf, torch.nn.Module) else ""
    raise TypeError(f"assert_replica_integrity: {path} is {leaf!r}; the tree must hold tensors and numbers.{hint}")


def _check_leaves(leaves: Sequence[dict[str, str]]) -> None:
    """Refuse trees that differ between processes in structure, shapes or dtypes."""
    for process, of_process in enumerate(leaves):
        for path in leaves[0].keys() | of_process.keys():
            first = leaves[0].get(path, "nothing")
            other = of_process.get(path, "nothing")
            if first != other:
                raise AssertionError(
                    f"assert_replica_integrity: {path} is {first} in process 0 and {other} in process {process}."
                )


def _difference(a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> float | None:
    """The largest difference of elements that are not close; None if all are."""
    kind = np.complex128 if np.iscomplexobj(b) else np.float64
    wide_a = a.astype(kind)
    wide_b = b.astype(kind)
    # inf - inf is NaN, with a warning of numpy's.
    with np.errstate(invalid="ignore"):
        difference = np.abs(wide_a - wide_b)
        # float64 does not tell large integers apart.
        if np.issubdtype(b.dtype, np.integer):
            larger = np.maximum(a, b).astype(np.uint64)
            smaller = np.minimum(a, b).astype(np.uint64)
            difference = larger - smaller

        close = (a == b) | (np.isnan(wide_a) & np.isnan(wide_b))
        if rtol or atol:
            close |= difference <= atol + rtol * np.abs(wide_b)
    if close.all():
        return None
    return float(f"{difference[~close].max():.3g}")


def _describe(index: tuple[slice, ...]) -> str:
    if all(part == slice(None) for part in index):
        return ""
    parts = [":" if part == slice(None) else f"{part.start or 0}:{part.stop}" for part in index]
    return f"[{', '.join(parts)}]"


def _join(places: list[str]) -> str:
    if len(places) > 8:
        places = [*places[:7], f"{len(places) - 7} more"]
    *others, last = places
    return f"{', '.join(others)} and {last}" if others else last


def _with_paths(tree: PyTree) -> list[tuple[str, PyTree]]:
    leaves: list[tuple[str, PyTree]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaves.append((jax.tree_util.keystr(path) or "the tensor", leaf))
    return leaves
