"""Names of a file matched with entries of a model, and all that keeps the one from filling the other."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import caller
from torch_shard._common.dtypes import jax_dtype, torch_dtype
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._entries import unsaved_buffers
from torch_shard._io.formats import Stored, TensorFile
from torch_shard._sharding import ShardingPlan, make_matcher

Rename = Mapping[str, str | None] | Callable[[str], str | None]

Allowed = bool | str | Iterable[str]

_NUM_HINTS = 20  # the closest name is searched among all names


@dataclasses.dataclass
class TargetEntry:
    """An entry of a model: one tensor, under all its names.

    Attributes:
        key: The first name of its tensor, by which `holdings` has it.
        names: A tie has several.
        shape: Global shape.
        dtype: None where only a shape was given.
        sources: Its names in the file that fill it.
    """

    key: str
    names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    sources: list[str] = dataclasses.field(default_factory=list)


class Match:
    """The names of a file and of a model, side by side.

    Attributes:
        entries: Of the model, those that a `state_dict` has, by each of their names.
        faults: What does not fit, a line each.
    """

    def __init__(
        self, file: TensorFile, target: torch.nn.Module | Mapping[str, PyTree], mesh: Mesh, dtype: torch.dtype | None
    ) -> None:
        self._file, self._dtype, self.faults = file, dtype, list[str]()
        unsaved = unsaved_buffers(target) if isinstance(target, torch.nn.Module) else ()
        self.entries: dict[str, TargetEntry] = {}
        ties: dict[str, TargetEntry] = {}
        for name, found in ShardingPlan({}, default=PartitionSpec()).resolve(target, mesh).entries.items():
            key = found.tied_to or name
            if key not in unsaved:
                entry = ties.setdefault(key, TargetEntry(key, [], found.shape, self._dtype_of(name, found.dtype)))
                entry.names.append(name)
                self.entries[name] = entry

    def _dtype_of(self, name: str, dtype: Any) -> torch.dtype | None:
        """That of a target as torch has it; None where any will do."""
        if isinstance(dtype, torch.dtype | None):
            return dtype
        try:
            return torch_dtype(dtype)
        except TypeError:
            if self._dtype is None:
                self.faults.append(f"{name}: {dtype} is no dtype of torch. Read it as dtype=torch.float32.")
            return None

    def each(self) -> list[TargetEntry]:
        """The entries, each once, in the order of the file; those that it lacks come last."""
        order = {name: number for number, name in enumerate(self._file.stored)}
        entries = {id(entry): entry for entry in self.entries.values()}.values()
        return sorted(entries, key=lambda entry: min((order[n] for n in entry.sources), default=len(order)))

    def run(self, rename: Rename | None, allow_missing: Allowed, allow_unused: Allowed) -> None:
        """Find the partner of each name, and note what has none or does not fit."""
        unused = self._pair(self._renamed(rename))
        missing = [entry for entry in self.each() if not entry.sources]
        may_lack = self._allowed("allow_missing", allow_missing, self.entries)
        may_leave = self._allowed("allow_unused", allow_unused, self._file.stored)
        missing = [entry for entry in missing if may_lack.isdisjoint(entry.names)]
        unused = {name: wanted for name, wanted in unused.items() if name not in may_leave}
        close = _Closest(unused.values()), _Closest(entry.key for entry in missing)
        for name, wanted in unused.items():
            shown = name if name == wanted else f"{name} (renamed {wanted})"
            self.faults.append(
                f"{shown} {_type(self._file.stored[name])}: the model has no such name{close[1](wanted)}."
            )
        for entry in missing:
            tied = f" (tied to {', '.join(entry.names[1:])})" if entry.names[1:] else ""
            self.faults.append(f"{entry.key}{tied} {_type(entry)}: the file lacks it{close[0](entry.key)}.")
        if unused or missing:
            self.faults.append("rename= maps names of the file to those of the model, allow_unused= and "
                               "allow_missing= take globs of what may stay without a partner.")  # fmt: skip
        for entry in self.each():
            for name in entry.sources:
                self.faults += [f"{name} {_type(self._file.stored[name])}: {f}" for f in self._misfits(name, entry)]

    def read_dtype(self, name: str) -> torch.dtype:
        """In which dtype a tensor of the file is read."""
        found = self._file.stored[name].dtype
        return self._dtype if self._dtype is not None and found.is_floating_point else found

    def _renamed(self, rename: Rename | None) -> dict[str, str]:
        """New names by names of the file, without those that are dropped."""
        if isinstance(rename, Mapping):
            for name in rename:
                if name not in self._file.stored:
                    hint = _Closest(self._file.stored)(str(name))
                    self.faults.append(f"rename has {name!r}, which is no name of the file{hint}.")
            wanted = {name: rename.get(name, name) for name in self._file.stored}
        else:
            wanted = {name: rename(name) if rename else name for name in self._file.stored}
        if odd := {name: new for name, new in wanted.items() if not isinstance(new, str | None)}:
            raise TypeError(f"{caller()}: rename must give strings, or None to drop a name, but gives {odd}.")
        first: dict[str, str] = {}
        for name, new in wanted.items():
            if new is not None and first.setdefault(new, name) != name:
                self.faults.append(f"{first[new]} and {name} would both become {new}. Drop one: rename it to None.")
        return {name: new for new, name in first.items()}

    def _pair(self, renamed: dict[str, str]) -> dict[str, str]:
        """Give each entry its names in the file, and return the names that are left, with what they became."""
        unused: dict[str, str] = {}
        for name, wanted in renamed.items():
            if wanted in self.entries:
                self.entries[wanted].sources.append(name)
            else:
                unused[name] = wanted
        return unused

    def _allowed(self, option: str, given: Allowed, names: Iterable[str]) -> set[str]:
        names = list(names)
        if isinstance(given, bool):
            return set(names) if given else set()
        found: set[str] = set()
        for pattern in [given] if isinstance(given, str) else given:
            check_kind(f"a pattern of {option}", pattern, str)
            hits = set(filter(make_matcher(pattern), names))
            if not hits:
                self.faults.append(f"{option} has {pattern!r}, which matches nothing. Correct it, or leave it out.")
            found |= hits
        return found

    def _misfits(self, name: str, entry: TargetEntry) -> list[str]:
        stored, wanted, read = self._file.stored[name], entry.dtype, self.read_dtype(name)
        faults = [] if stored.shape == entry.shape else [f"the model has {entry.key} in shape {entry.shape}."]
        try:
            held = jax_dtype(read)
        except TypeError as error:
            return [*faults, f"{error} Floating-point entries take another with dtype=torch.bfloat16."]
        are_floats = wanted is not None and wanted.is_floating_point and stored.dtype.is_floating_point
        if held.kind in "fc" and held.itemsize != read.itemsize:
            faults.append(
                f"{read} needs 64 bits, and JAX has them switched off. Read it as dtype=torch.float32, or "
                "jax.config.update('jax_enable_x64', True) at the start."
            )
        elif wanted is not None and jax_dtype(self._dtype if are_floats and self._dtype else wanted) != held:
            remedy = f"Read it as dtype={wanted}" if are_floats else "Convert the file"
            faults.append(f"the model has {entry.key} as {wanted}. {remedy}, or change the model's dtype.")
        return faults


class _Closest:
    """The closest of some names, for the first few questions."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self._left = list(names), _NUM_HINTS

    def __call__(self, name: str) -> str:
        self._left -= 1
        close = difflib.get_close_matches(name, self._names, n=1) if self._left >= 0 else []
        return f". The closest name without a partner is {close[0]}" if close else ""


def _type(value: Stored | TargetEntry) -> str:
    return f"{value.shape} {value.dtype or ''}".rstrip()
