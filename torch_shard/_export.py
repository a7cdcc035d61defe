"""From shards to files that PyTorch and Hugging Face read, a tensor at a time."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils

from torch_shard._common.convert import to_host
from torch_shard._common.dtypes import torch_dtype
from torch_shard._common.validate import check_directory, check_path
from torch_shard._device.placement import refuse_meta
from torch_shard._device.tensor import JaxTensor
from torch_shard._sharding.entries import holdings, unsaved_buffers
from torch_shard._sharding.plan import group_ties
from torch_shard._sharding.stacked import Stacks
from torch_shard._tensor_files import Stored
from torch_shard._tensor_writer import SHARD_BYTES, Export, write_torch
from torch_shard._train.state import TrainState


def export_safetensors(
    state: Any,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write weights as safetensors, in torch's names and layouts, as `from_pretrained` and `load_file` read them.

    A tensor at a time is whole on the host. The export takes the place of an older one when it is whole, and not
    before. Every process must call it; the first one writes.

    Args:
        state: A `TrainState`; a module on any device; or a mapping of names to tensors or arrays. Of a tie the first
            name is written, of buffers those that a `state_dict` has.
        path: A file `*.safetensors`, or a directory, in which it becomes `model.safetensors`.
        max_shard_bytes: What does not fit into one file of so many bytes is written as several, with an index:
            `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`.
        metadata: Strings for the header, beside `format: pt`.

    Returns:
        The path of the file, or of the index of several.

    Raises:
        TypeError: It is none of these, or the metadata are no strings.
        ValueError: A tensor has no values (on the meta device) or a dtype that safetensors lack; or the state was
            donated to a step.
        NotADirectoryError: `path` is a file of another kind.

    Example:
        >>> import tempfile, torch, torch_shard as ts
        >>> path = ts.export_safetensors(torch.nn.Linear(4, 2), tempfile.mkdtemp())
        >>> path.name
        'model.safetensors'
    """
    strings = {"format": "pt", **(metadata or {})}
    if not all(isinstance(text, str) for pair in strings.items() for text in pair):
        raise TypeError(f"export_safetensors: metadata must map strings to strings, got {metadata}.")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"export_safetensors: max_shard_bytes must be a positive int, got {max_shard_bytes!r}.")
    path = check_path("export_safetensors", "path", path)
    if path.suffix != ".safetensors":
        check_directory("export_safetensors", "path", path)
    values, structs = _collect("export_safetensors", state)
    stored = {name: Stored(tuple(s.shape), _dtype_of(state, name, s)) for name, s in structs.items()}
    export = Export(path, stored, max_shard_bytes, strings)
    _write_once(export.write, (_to_cpu(values[name]).to(stored[name].dtype) for name in export.names))
    return export.result


def export_torch(state: Any, path: str | os.PathLike[str]) -> Path:
    """Write weights as a state_dict by `torch.save`; the whole of them is on the host at once.

    Args:
        state: As for `export_safetensors`.
        path: A file. It takes the place of an older one when it is whole.

    Returns:
        The path.

    Raises:
        TypeError: As `export_safetensors`.
        ValueError: A tensor has no values (on the meta device).
    """
    path = check_path("export_torch", "path", path)
    values, structs = _collect("export_torch", state)
    tensors = (_to_cpu(values[name]).to(_dtype_of(state, name, struct)) for name, struct in structs.items())
    _write_once(lambda found: write_torch(path, dict(zip(structs, found, strict=True))), tensors)
    return path


def _collect(caller: str, state: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The values, and shape and dtype of those that are to be written: each tensor under one name."""
    if isinstance(state, torch.nn.Module):
        values, unsaved = holdings(state).all, unsaved_buffers(state)
    elif isinstance(state, TrainState):
        if state.step.is_deleted():
            raise ValueError(f"{caller}: this state was donated to a step. Export what the step returned.")
        values, unsaved = state.tensors, state.unsaved
    elif isinstance(state, Mapping):
        values, unsaved = state, ()
    else:
        raise TypeError(f"{caller}: expected a TrainState, a module or a mapping, got {type(state).__name__}.")
    odd = [repr(name) for name in values if not isinstance(name, str) or name == "__metadata__" or not _is_text(name)]
    if odd:
        raise TypeError(f"{caller}: {', '.join(odd)} cannot be names in a file. Names must be other strings.")
    by_name = jax.tree.map(_struct, values) if isinstance(values, Stacks) else values
    structs = {name: _struct(value) for name, value in by_name.items()}
    odd = [f"{name} is a {type(v).__name__}" for name, v in structs.items() if not hasattr(v, "dtype")]
    if odd:
        raise TypeError(f"{caller}: names must lead to tensors or arrays, but {', '.join(odd)}.")
    names = (group[0] for group in group_ties(structs, by_identity=False))
    written = {name: structs[name] for name in names if name not in unsaved}
    refuse_meta(caller, written)
    return values, written


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _struct(value: Any) -> Any:
    """An array's shape and dtype: what is a row of a stack need not be cut out for that."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array | np.ndarray) else value


def _dtype_of(state: Any, name: str, struct: Any) -> torch.dtype:
    """An entry's dtype in torch, where JAX may hold it in fewer bits."""
    if isinstance(state, TrainState) and name in state.wide:
        return torch.int64
    return struct.dtype if isinstance(struct.dtype, torch.dtype) else torch_dtype(struct.dtype)


def _to_cpu(value: Any) -> torch.Tensor:
    """The global value of a tensor or array, which other processes may hold parts of."""
    if isinstance(value, torch.Tensor) and not isinstance(value, JaxTensor):
        return value.detach().cpu()
    array = value.jax() if isinstance(value, JaxTensor) else value
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return to_host(array)


def _write_once(write: Callable[[Iterator[torch.Tensor]], Any], tensors: Iterator[torch.Tensor]) -> None:
    """Let the first process write; all of them go through the tensors, which gathers those on several processes."""
    if jax.process_count() == 1:
        write(tensors)
        return
    failure = None
    try:
        if jax.process_index() == 0:
            write(tensors)
    except Exception as error:
        failure = error
    for _ in tensors:
        pass
    went_well = multihost_utils.broadcast_one_to_all(np.array(failure is None))
    if failure is not None:
        raise failure
    if not went_well:
        raise RuntimeError("The first process could not write the weights; its own error says why.")
