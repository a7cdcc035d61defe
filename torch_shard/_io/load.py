"""Weights from files onto the mesh: every shard reads its own slice, once all has been found to fit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import host_array
from torch_shard._common.dtypes import has_x64
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_kind, check_path, unwrapped
from torch_shard._device import put, wrap_array
from torch_shard._entries import TensorPlaces, holdings, refuse_hooks, refuse_load_hooks
from torch_shard._io.formats import Index, TensorFile, held_tensors, open_safetensors, open_torch, read_part, read_runs
from torch_shard._io.match import Allowed, Match, Rename, TargetEntry
from torch_shard._io.training import Restoring, open_training
from torch_shard._sharding import PlanFn, ShardingPlan, check_mesh, plan_for

Source = str | os.PathLike[str]


@public
def load_safetensors(
    path: Source,
    model_or_names: torch.nn.Module | Mapping[str, PyTree],
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    allow_missing: Allowed = (),
    allow_unused: Allowed = (),
) -> PyTree:
    """Load safetensors straight onto their shards: each reads its own slice, and nothing is whole on host or device.

    All names, shapes, dtypes and the plan are checked before anything moves. Of several processes, each reads what its
    own devices hold.

    Args:
        path: A file; an index of many (`model.safetensors.index.json`, as Hugging Face has it); or a directory with
            one of these.
        model_or_names: A module on any device, which is filled in place and keeps ties, `requires_grad` and
            non-persistent buffers; on the meta device nothing is ever allocated twice. Or a mapping from names to
            anything with shape and dtype. The file may have any of the names of a tie; if it has several, they must
            be equal to the bit.
        mesh: The devices, with Auto axes.
        plan: Which entry is split how, as for `place`, or a function of `(model, mesh)`.
        rename: What a name of the file is in the model, as a dict (other names stay) or a function; None drops it.
        dtype: What floating-point entries become, slice by slice, such as `torch.bfloat16`. Without it, file and model
            must agree (64-bit integers are 32-bit in JAX unless `jax_enable_x64` is on). Non-persistent buffers keep
            theirs.
        allow_missing: Names or globs, as in a `ShardingPlan`, of entries that the file may lack, or True for all. They
            keep the values that they have, and are placed.
        allow_unused: Names or globs of entries of the file that the model may lack, or True for all.

    Returns:
        The module; or a dict of jax-device tensors, without those that nothing has values of. Entries that have no
        values in the file (also non-persistent buffers) stay on the meta device if they were there; a module that
        `materialize` made with its constructor has them.

    Raises:
        FileNotFoundError: There is no such file, or an index names one that is missing.
        ValueError: A file is damaged; or, all in one error, what in the file, the model and the plan does not fit.
        TypeError: An argument is of the wrong kind.

    Example:
        >>> import tempfile, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> path = tempfile.mkdtemp()
        >>> _ = ts.export_safetensors(torch.nn.Linear(4, 2), path)
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 2)
        >>> plan = ts.ShardingPlan({"weight": P("model")}, default=P())
        >>> ts.load_safetensors(path, model, ts.make_mesh(batch=1, model=1), plan).weight.jax().sharding.spec
        P('model',)
    """
    hint = "Tensors by name are for load_torch, which takes a mapping too." if isinstance(path, Mapping) else ""
    file = open_safetensors(check_path("path", path, hint=hint))
    loader = _Loader(file, model_or_names, mesh=mesh, plan=plan, dtype=dtype)
    return loader.run(rename, allow_missing, allow_unused)


@public
def load_torch(
    path: Source | Mapping[str, torch.Tensor],
    model_or_names: torch.nn.Module | Mapping[str, PyTree],
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    allow_missing: Allowed = (),
    allow_unused: Allowed = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> PyTree:
    """Load what `torch.save` wrote straight onto its shards, as `load_safetensors` does.

    The file is read with `weights_only=True`, so that it cannot run code, and mapped, where its format allows that
    (files from before torch 1.6 are read whole).

    Args:
        path: A file with a flat state_dict; an index of many (`pytorch_model.bin.index.json`); a directory with one of
            these; or a mapping of names to CPU tensors.
        model_or_names: A module on any device, the meta device too, which is filled in place and keeps ties,
            `requires_grad` and non-persistent buffers; or a mapping from names to anything with shape and dtype.
        mesh: The devices, with Auto axes.
        plan: Which entry is split how, as for `place`, or a function of `(model, mesh)`.
        rename: What a name of the file is in the model, as a dict (other names stay) or a function; None drops it.
        dtype: What floating-point entries become, slice by slice, such as `torch.bfloat16`. Without it, file and model
            must agree. Non-persistent buffers keep theirs.
        allow_missing: Names or globs, as in a `ShardingPlan`, of entries that the file may lack, or True for all.
        allow_unused: Names or globs of entries of the file that the model may lack, or True for all.
        optimizer: An optimizer of the model's parameters, which goes on with the state of the file: of a training
            script (`{"model": ..., "optimizer": ...}`, as nanoGPT, pytorch/examples and Lightning write it), or of a
            directory of Trainer, with `optimizer.pt`. Its groups hold the loaded parameters afterwards, and a step
            that is made with it starts with its state.
        scheduler: The optimizer's scheduler, whose state is read in the same way.

    Returns:
        The module; or a dict of jax-device tensors, without those that nothing has values of. Entries that have no
        values in the file stay on the meta device if they were there.

    Raises:
        FileNotFoundError: There is no such file, or an index names one that is missing.
        ValueError: A file is damaged or holds something else than tensors by name; or, all in one error, what in the
            file, the model and the plan does not fit.
        TypeError: An argument is of the wrong kind.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> weights = torch.nn.Linear(4, 2).state_dict()  # or the path of a file
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 2)
        >>> plan = ts.ShardingPlan({"weight": P("model")}, default=P())
        >>> ts.load_torch(weights, model, ts.make_mesh(batch=1, model=1), plan).weight.jax().sharding.spec
        P('model',)
    """
    if optimizer is not None or scheduler is not None:
        check_kind("optimizer", optimizer, torch.optim.Optimizer, hint="The scheduler's optimizer is needed too.")
        check_kind("model_or_names", model_or_names, torch.nn.Module, hint="An optimizer has parameters of a module.")
        kept = open_training(check_path("path", path, hint="The optimizer's state is read from a file."))
        loader = _Loader(kept.weights, model_or_names, mesh=mesh, plan=plan, dtype=dtype)
        module = cast(torch.nn.Module, model_or_names)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        loader.restoring = Restoring(cast(torch.optim.Optimizer, optimizer), scheduler, kept, names)
    else:
        file = held_tensors(path) if isinstance(path, Mapping) else open_torch(check_path("path", path))
        loader = _Loader(file, model_or_names, mesh=mesh, plan=plan, dtype=dtype)
    return loader.run(rename, allow_missing, allow_unused)


class _Loader:
    """One load: check all, then read entry by entry.

    Attributes:
        restoring: An optimizer that takes up its state along with the weights.
    """

    restoring: Restoring | None = None

    def __init__(
        self,
        file: TensorFile,
        target: torch.nn.Module | Mapping[str, PyTree],
        *,
        mesh: Mesh,
        plan: ShardingPlan | PlanFn,
        dtype: torch.dtype | None,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{caller()}: dtype must be a floating-point torch.dtype such as torch.bfloat16, got {dtype}."
            )
        check_mesh(mesh)
        check_kind("model_or_names", target, torch.nn.Module | Mapping)
        plan = plan_for(plan, target, mesh)
        if isinstance(target, torch.nn.Module):
            refuse_hooks(target)
            refuse_load_hooks(target)
        self._file, self._dtype = file, dtype
        self._given = target
        self._target: Any = unwrapped(target) if isinstance(target, torch.nn.Module) else target
        self._match = Match(file, self._target, mesh, dtype)
        try:
            self._shardings, self._plan_fault = dict(plan.resolve(self._target, mesh)), ""
        except ValueError as error:
            self._shardings, self._plan_fault = {}, str(error)

    def run(
        self, rename: Rename | None, allow_missing: Allowed, allow_unused: Allowed
    ) -> torch.nn.Module | dict[str, torch.Tensor]:
        check_kind("rename", rename, Mapping | Callable | None)
        if callable(rename):
            check_call("rename", rename, "name")
        for option, given in (("allow_missing", allow_missing), ("allow_unused", allow_unused)):
            check_kind(option, given, Iterable | bool, hint="Give names or globs, or True for all.")
        match = self._match
        match.run(rename, allow_missing, allow_unused)
        self._raise(match.faults)
        self._raise([fault for entry in match.each() for fault in self._find_value_faults(entry)])
        if not isinstance(self._target, torch.nn.Module):
            return self._make_tree()
        return self._fill_module() if self.restoring is None else self._fill_both(self.restoring)

    def _fill_both(self, restoring: Restoring) -> torch.nn.Module:
        """Fill the module, and its optimizer: both, or neither of them."""
        before = dict(self._target.named_parameters())
        restoring.load()
        filled = self._fill_module()
        now = dict(self._target.named_parameters())
        restoring.adopt({param: now[name] for name, param in before.items()})
        return filled

    def _raise(self, faults: list[str]) -> None:
        if faults or self._plan_fault:
            parts = [f"{caller()}: {self._file.shown} cannot be loaded as asked; nothing was."] * bool(faults)
            parts += ["\n".join(f"  {fault}" for fault in faults)] * bool(faults)
            raise ValueError("\n\n".join([*parts, *([self._plan_fault] if self._plan_fault else [])]))

    def _find_value_faults(self, entry: TargetEntry) -> Iterator[str]:
        """Faults that only bytes tell, of those that this process reads: ties apart, integers that JAX cannot hold."""
        if not entry.sources:
            return
        (first, *others), parts = entry.sources, self._parts(entry)
        for other in others:
            if not all(_are_equal(self._file, first, other, part) for part in parts):
                yield (
                    f"{first} and {other} are one tensor in the model ({' and '.join(entry.names)} are tied), but "
                    f"differ in the file. Untie them in the model, or drop one: rename={{{other!r}: None}}."
                )
        dtype = self._file.stored[first].dtype
        if dtype in (torch.int64, torch.uint64) and not has_x64():
            try:
                for part in parts:
                    for _, values in read_runs(self._file, first, part):
                        host_array(values)
            except OverflowError as error:
                yield f"{first}: {error}"

    def _parts(self, entry: TargetEntry) -> set[Index]:
        """The parts of an entry that this process holds."""
        indices: Any = self._shardings[entry.key].addressable_devices_indices_map(entry.shape)
        return {_bounds(index, entry.shape) for index in indices.values()}

    def _read(self, entry: TargetEntry) -> jax.Array:
        """The array of an entry; replicas share what is read once."""
        name = entry.sources[0]

        @functools.cache
        def read(part: Index) -> np.ndarray:
            return host_array(read_part(self._file, name, part, self._match.read_dtype(name)))

        return jax.make_array_from_callback(
            entry.shape, self._shardings[entry.key], lambda index: read(_bounds(index, entry.shape))
        )

    def _arrays(self) -> Iterator[tuple[TargetEntry, jax.Array]]:
        before = None
        for entry in self._match.each():
            if entry.sources:
                array = self._read(entry)
                jax.block_until_ready(before)  # so that the host holds two entries at most that are under way
                yield entry, array
                before = array

    def _keep(self, name: str, value: object) -> torch.Tensor | None:
        """An entry that the file lacks, with the values that it has, if any."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if name in self._match.entries and self._dtype is not None and value.is_floating_point():
                value = value.to(self._dtype)
            return value if value.device.type == "meta" else wrap_array(put(value, self._shardings[name]))
        return wrap_array(put(value, self._shardings[name])) if isinstance(value, jax.Array | np.ndarray) else None

    def _fill_module(self) -> torch.nn.Module:
        held = holdings(self._target).all  # by the first of its names; each is let go once it is replaced
        places = TensorPlaces(self._target)
        for entry, array in self._arrays():
            places.replace([(held.pop(entry.key), wrap_array(array))])
        for name in list(held):
            tensor = held.pop(name)
            places.replace([(tensor, self._keep(name, tensor))])  # pyright: ignore[reportArgumentType]
        return self._given  # pyright: ignore[reportReturnType]

    def _make_tree(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for entry, array in self._arrays():
            found |= dict.fromkeys(entry.names, wrap_array(array))
        for name, value in self._target.items():
            if name not in found and (kept := self._keep(name, value)) is not None and kept.device.type != "meta":
                found[name] = kept
        return {name: found[name] for name in self._target if name in found}


def _bounds(index: Any, shape: tuple[int, ...]) -> Index:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _are_equal(file: TensorFile, name: str, other: str, part: Index) -> bool:
    """Tell whether the same part of two tensors is equal to the bit."""
    if file.stored[name] != file.stored[other]:
        return False
    pairs = zip(read_runs(file, name, part), read_runs(file, other, part), strict=True)
    return all(torch.equal(_bytes(first), _bytes(second)) for (_, first), (_, second) in pairs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
