"""Contents of a saved state: each stored array with the names of the entries in it, as orbax writes and reads it."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from torch_shard._common.specs import describe_spec
from torch_shard._common.types import PyTree
from torch_shard._io.integrity import Unreadable, read_json, reading
from torch_shard._sharding import Kept, Layout, Stacks, describe_group, row_sharding, stack_sharding, take_row
from torch_shard._state import KINDS, TrainState, differs_by

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

TENSORS = "tensors"
"""The place of parameters and buffers; all else is the rest of the state."""


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One stored array.

    Attributes:
        where: `tensors`, or the place in the state, as in `opt_state[0].mu`.
        names: Of the entries in it: none for an array that is not kept by name, several for rows of a stack.
        shape: Of the whole array.
        dtype: JAX's name of it.
        spec: How each entry was split, for people.
        kind: `params`, `frozen` or `buffers`, of tensors.
    """

    where: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: str = ""
    kind: str = ""

    @property
    def label(self) -> str:
        """Name of the array in the checkpoint."""
        return f"{self.where}/{describe_group(self.names)}" if self.names else self.where

    @property
    def entries(self) -> list[tuple[str, str]]:
        """Its entries: where each stands, and its name."""
        return [(self.where, name) for name in self.names or ("",)]

    @property
    def entry_type(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of each entry."""
        return self.shape[len(self.names) > 1 :], self.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the whole array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * jnp.dtype(self.dtype).itemsize


Parts = collections.OrderedDict[str, PyTree]
"""Of a state, by the names of its fields, in the order in which they are shown."""


def parts_of(state: TrainState, *, all_of_it: bool = True) -> Parts:
    """The parts of a state (or of a tree of structs in its place): all, or those that hold parameters and buffers."""
    parts = [(kind, Stacks.merged(getattr(state, kind))) for kind in KINDS]
    rest = ("step", "num_batches", "key", "opt_state") if all_of_it else ()
    return collections.OrderedDict([*parts, *((name, getattr(state, name)) for name in rest)])


def flatten(parts: Parts) -> dict[SavedArray, PyTree]:
    """The stored arrays in torch's form, each with what it is."""
    return {stored: _plain(leaf) for stored, leaf, _ in _walk(parts)}


def _walk(parts: Parts) -> Iterator[tuple[SavedArray, PyTree, Kept | None]]:
    """In the order of the leaves: what each is, in torch's form, and the form in which it is kept."""
    for path, node in jax.tree_util.tree_leaves_with_path(parts, is_leaf=lambda node: isinstance(node, Stacks)):
        part: str = path[0].key
        kind = part if part in KINDS else ""
        where = (TENSORS if kind else part) + jax.tree_util.keystr(path[1:])
        if not isinstance(node, Stacks):
            yield _describe(where, (), node), node, None
            continue
        for group, value in zip(node.layout.groups, node.whole().arrays, strict=True):
            # No array, but none (where it is masked) or several: for one name alone.
            for below, leaf in jax.tree_util.tree_leaves_with_path(value):
                stored = _describe(where + jax.tree_util.keystr(below), group, leaf, kind)
                yield stored, leaf, node.layout.forms.get(group[0])


def fill(structs: Parts, entries: "Entries") -> Parts:
    """Parts like `structs` with these entries, each on its shards, stored as `structs` are."""
    leaves, tree = jax.tree.flatten(structs)
    found: list[jax.Array] = []
    for (stored, _, form), struct in zip(_walk(structs), leaves, strict=True):
        array = entries.array(stored)
        found.append(_put(array if form is None else form.store(array, is_stack=len(stored.names) > 1), struct))
    return jax.tree.unflatten(tree, found)


def _plain(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    """A form that can be written: of a random key, its words."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.random.key_data(leaf)
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def _describe(
    where: str, names: tuple[str, ...], array: jax.Array | jax.ShapeDtypeStruct, kind: str = ""
) -> SavedArray:
    array = _plain(array)
    spec, sharding = "", getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = describe_spec((row_sharding(sharding) if len(names) > 1 else sharding).spec)
    return SavedArray(where, names, tuple(array.shape), str(array.dtype), spec, kind)


class Entries:
    """Stored arrays as entries: by where they stand and their name."""

    def __init__(self, arrays: Mapping[SavedArray, PyTree]) -> None:
        self._arrays = dict(arrays)
        self._homes = {entry: stored for stored in arrays for entry in stored.entries}

    def type_of(self, entry: tuple[str, str]) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        return self._homes[entry].entry_type

    def array(self, stored: SavedArray) -> PyTree:
        """The entries of a stored array, as it has them."""
        home = self._homes[stored.entries[0]]
        if home.names == stored.names:
            return self._arrays[home]
        name, *others = stored.names
        if not others:
            return take_row(self._arrays[home], home.names.index(name))
        held = {own.names: array for own, array in self._arrays.items() if own.where == stored.where}
        return Stacks(Layout.of(held), held.values()).stacked(stored.names)

    def sharding_of(self, stored: SavedArray) -> NamedSharding:
        """Where a stored array is to lie: as the one with the same entries does, or each row as the first one."""
        if self._homes[stored.entries[0]].names == stored.names:
            return self.array(stored).sharding
        sharding = self.array(dataclasses.replace(stored, names=stored.names[:1])).sharding
        return stack_sharding(sharding) if len(stored.names) > 1 else sharding

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._homes)


def check_alike(path: Path, found: Entries, wanted: Entries, *, params_only: bool) -> None:
    """Refuse a saved state that is not like the one to fill."""
    if lines := _unlike(found, wanted):
        raise ValueError(
            f"Checkpointer: {path} does not fit the model and the optimizer of this step.\n\n"
            + "\n".join(lines)
            + "\n\n"
            + "".join(differs_by(name, has(found), has(wanted)) for name, has in _OPTIONS.items())
            + "Restore it with the model and optimizer that wrote it"
            + ("." if params_only else ", or params_only=True for another optimizer.")
        )


def _has_average(entries: Entries) -> bool:
    return any(re.fullmatch(r"opt_state(\['[^']*'\])?\.ema", where) for where, _ in entries)


def _is_narrow(entries: Entries) -> bool:
    """Tell whether moments are in bfloat16 and the model is not."""
    return {where == TENSORS for where, name in entries if entries.type_of((where, name))[1] == "bfloat16"} == {False}


_OPTIONS = {"ema": _has_average, "moment_dtype": _is_narrow}


def _unlike(found: Entries, wanted: Entries) -> list[str]:
    have, need = dict.fromkeys(found), dict.fromkeys(wanted)
    places = collections.Counter[tuple[str, str]]()
    for entry in need | have:
        place = entry[entry[0] == TENSORS]
        if entry not in have or entry not in need:
            fault = "missing in the checkpoint" if entry in need else "in the checkpoint, not in the state to fill"
        elif (own := found.type_of(entry)) == (other := wanted.type_of(entry)):
            continue
        elif own[0] == other[0] and entry[0] != TENSORS:
            fault = f"{own[1]} in the checkpoint, must be {other[1]}"
        else:
            place, fault = _show(entry), f"{own[1]} {own[0]} in the checkpoint, must be {other[1]} {other[0]}"
        places[place, fault] += 1
    return [f"  {place}{f' of {num} entries' * (num > 1)}: {fault}" for (place, fault), num in places.items()]


def _show(entry: tuple[str, str]) -> str:
    where, name = entry
    return name if where == TENSORS else f"{where} of {name}" if name else where


def targets(found: list[SavedArray], wanted: Entries) -> dict[SavedArray, jax.ShapeDtypeStruct]:
    """Shape and sharding of each saved array: it lies as its first entry does."""
    return {s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=wanted.sharding_of(s)) for s in found}


def _put(array: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array as it was read onto its shards; a random key from its words."""
    array = jax.device_put(array, struct.sharding)
    if not jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return array
    impl = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), struct)  # which takes no structs
    return jax.random.wrap_key_data(array, impl=impl[0])


def make_orbax() -> "ocp.AsyncCheckpointer":
    import orbax.checkpoint as ocp

    # Replicas on the devices of one process cannot share the work: cut into slices, they only take longer to copy.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))


def to_save(arrays: Mapping[SavedArray, jax.Array]) -> "ocp.args.PyTreeSave":
    """Arguments of orbax for a save. Arrays without elements, which orbax refuses, are in the description alone."""
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave({stored.label: array for stored, array in arrays.items() if stored.num_bytes})


def read_arrays(
    orbax: "ocp.AsyncCheckpointer", path: Path, structs: Mapping[SavedArray, jax.ShapeDtypeStruct]
) -> dict[SavedArray, jax.Array]:
    """Arrays of a checkpoint, each onto its shards."""
    import orbax.checkpoint as ocp

    given = {stored.label: struct for stored, struct in structs.items() if stored.num_bytes}
    if not given:  # which orbax refuses
        return {stored: _empty(struct) for stored, struct in structs.items()}
    restore_args = ocp.checkpoint_utils.construct_restore_args(given)
    with reading(str(path)):
        found = orbax.restore(
            path, args=ocp.args.PyTreeRestore(item=given, restore_args=restore_args, partial_restore=True)
        )
    return {s: found[s.label] if s.num_bytes else _empty(struct) for s, struct in structs.items()}


def _empty(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements."""
    return jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)


HEAD = "state.json"

FORMAT = 2

_STEP = re.compile(r"step_(\d+)")


def step_path(directory: Path, step: int) -> Path:
    """Directory of the checkpoint of a step."""
    return directory / f"step_{step:08}"


def find_steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint in a directory, in order."""
    names = {path.name for path in directory.glob("step_*")}
    found = sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)
    return [step for step in found if step_path(directory, step).name in names]


@dataclasses.dataclass(frozen=True)
class Head:
    """Description of a checkpoint, without its arrays.

    Attributes:
        step: Number of steps taken.
        num_batches: Number of batches seen.
        unsaved: Names of the buffers that are not in the module's `state_dict`.
        wide: Names of the entries that are int64 in torch, whatever they are here.
        metrics: Numbers that were kept with it.
        mesh: Sizes of the mesh axes that it was split over.
        notes: More that was kept with it, as JSON has it.
        random: Settings of JAX by which the run drew its random numbers.
        stored: Its arrays.
    """

    step: int
    num_batches: int
    unsaved: tuple[str, ...]
    wide: tuple[str, ...]
    metrics: dict[str, float]
    mesh: dict[str, int]
    stored: list[SavedArray]
    notes: dict[str, Any]
    random: dict[str, str | bool]


def _as(kind: Any, found: Any) -> Any:
    """What JSON has of a value, as one of its type: the inverse of `dataclasses.asdict`."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return cast(Any, kind)(**{name: _as(hints[name], value) for name, value in found.items()})
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is dict:
        return {name: _as(inner[1], value) for name, value in found.items()}
    if outer in (list, tuple) and isinstance(found, list):
        return outer(_as(inner[0], one) for one in cast(list[Any], found))
    if kind is not Any and (not isinstance(found, kind) or (kind is int and isinstance(found, bool))):
        raise TypeError(f"{found!r:.50} is no {kind}")
    if kind is int and not 0 <= found < 2**63:  # all of a description are counts
        raise TypeError(f"{found!r:.50} is no count")
    return found


RANDOM = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64")
"""Settings of JAX on which the random numbers of a key depend."""


def random_settings() -> dict[str, str | bool]:
    """The present values of `RANDOM`."""
    return {name: getattr(jax.config, name) for name in RANDOM}


def check_random(path: Path, saved: Mapping[str, str | bool]) -> None:
    """Refuse a state whose run would draw other random numbers here."""
    now = random_settings()
    if differing := [name for name, value in saved.items() if now.get(name) != value]:
        lines = [f"  {name}: {saved[name]!r} in the checkpoint, {now.get(name)!r} here" for name in differing]
        remedy = "; ".join(f"jax.config.update({name!r}, {saved[name]!r})" for name in differing)
        raise ValueError(
            f"Checkpointer: {path} was written under other settings of JAX, and the run would go on with other random "
            "numbers (dropout and its kin).\n\n"
            + "\n".join(lines)
            + f"\n\nSet at the start of the program: {remedy}. Or "
            "restore with params_only=True, which begins anew."
        )


def head_of(state: TrainState, metrics: Mapping[str, float], notes: Mapping[str, Any]) -> Head:
    """Describe the checkpoint of a state; waits for the state."""
    sharding = state.step.sharding
    return Head(
        step=int(state.step),
        num_batches=int(state.num_batches),
        unsaved=state.unsaved,
        wide=state.wide,
        metrics={name: float(value) for name, value in metrics.items()},
        mesh=dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {},
        stored=list(flatten(parts_of(state))),
        notes=dict(notes),
        random=random_settings(),
    )


def write_head(directory: Path, head: Head) -> None:
    """The inverse of `read_head`."""
    found = {"format": FORMAT, **dataclasses.asdict(head)}
    (directory / HEAD).write_text(json.dumps(found), encoding="utf-8")


def read_head(directory: Path) -> Head:
    """Read what a checkpoint says of itself."""
    try:
        with reading(HEAD):
            found = dict[str, Any](read_json(directory / HEAD))
            if (number := found.pop("format")) != FORMAT:
                raise ValueError(f"format {number!r}, must be {FORMAT}")
            head: Head = _as(Head, found)
            entries = [entry for stored in head.stored for entry in stored.entries if stored.num_bytes >= 0]
            if len(set(entries)) < len(entries):
                raise ValueError("an entry is stored twice")
            return head
    except (FileNotFoundError, Unreadable) as error:
        reason = error if isinstance(error, Unreadable) else f"it has no {HEAD}"
        raise Unreadable(f"{directory} is not a checkpoint of this version of torch_shard: {reason}.") from error
