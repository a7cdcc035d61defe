"""Entries of a module by name: trainable and frozen parameters, buffers, ties; and how to run it with others."""

# What a module holds, PyTorch keeps in attributes with an underscore, and annotates in part.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import copy
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree

LossFn = Callable[..., PyTree]


@dataclasses.dataclass(frozen=True)
class Holdings:
    """The tensors of a module by `state_dict` name, each once: a tie goes by the first of its names."""

    trainable: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Trainable and frozen parameters."""
        return {**self.trainable, **self.frozen}

    @property
    def kinds(self) -> tuple[dict[str, torch.Tensor], ...]:
        """The trainable ones, the frozen ones, the buffers."""
        return self.trainable, self.frozen, self.buffers

    @property
    def all(self) -> dict[str, torch.Tensor]:
        """Every tensor, in the order trainable, frozen, buffers."""
        return {**self.params, **self.buffers}

    def training(self, names: Collection[str] | None) -> "Holdings":
        """The same, where only these parameters are trained; with None all that are trainable."""
        if names is None:
            return self

        trainable: dict[str, torch.Tensor] = {}
        frozen: dict[str, torch.Tensor] = {}
        for name, param in self.params.items():
            is_trained = name in self.trainable and name in names
            (trainable if is_trained else frozen)[name] = param
        return Holdings(trainable, frozen, self.buffers)


def holdings(module: nn.Module) -> Holdings:
    """The parameters and buffers of a module (non-persistent buffers too)."""
    trainable: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, param in module.named_parameters():
        (trainable if param.requires_grad else frozen)[name] = param
    return Holdings(trainable, frozen, dict(module.named_buffers()))


def unsaved_buffers(module: nn.Module) -> tuple[str, ...]:
    """The names of buffers that a `state_dict` leaves out under every name that they have."""
    # A buffer that two modules share may be persistent in one of them only, so that the object decides, not the name.
    saved_ids: set[int] = set()
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if name not in submodule._non_persistent_buffers_set:
                saved_ids.add(id(buffer))

    return tuple(name for name, buffer in module.named_buffers() if id(buffer) not in saved_ids)


def group_ties(values: Mapping[str, PyTree], *, by_identity: bool) -> list[list[str]]:
    """Group names by tensor. A `state_dict` detaches, so there a tie is one view of one storage."""
    groups: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        if by_identity:
            key: Hashable = id(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            # data_ptr() is 0 for every meta tensor.
            storage = value.untyped_storage()._cdata
            key = storage, value.storage_offset(), value.shape, value.stride(), value.dtype
        else:
            # Arrays and shapes are values: two names of one are no tie.
            key = name
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each under all of its names."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def tied_names(module: nn.Module) -> set[str]:
    """The names of a module's tensors that have several."""
    names: set[str] = set()
    for tie in group_ties(named_tensors(module), by_identity=True):
        if len(tie) > 1:
            names.update(tie)
    return names


def shared_storage(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two names whose tensors are views of one memory, whether or not their elements overlap; for fakes too.

    Args:
        tensors: As in `Holdings.all`; those on the jax device are left out.
    """
    name_of_storage: dict[int, str] = {}
    for name, tensor in tensors.items():
        has_memory = tensor.layout is torch.strided and tensor.numel() and tensor.device.type in ("cpu", "meta")
        if not has_memory:
            continue

        first = name_of_storage.setdefault(tensor.untyped_storage()._cdata, name)
        if first != name:
            return first, name
    return None


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two names whose tensors overlap in memory without being one tensor, so that a write to one shows in the other.

    Args:
        tensors: As in `Holdings.all`; those on the jax device are left out.
    """
    spans: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        span = memory_span(tensor)
        if span is not None:
            spans.append((*span, name))

    # Sorted by where they begin, spans overlap if any two neighbours do.
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < end:
            return first, second
    return None


def memory_span(value: torch.Tensor | np.ndarray) -> tuple[int, int] | None:
    """Where a tensor or an array lies in the memory of the host; None if it has no element there."""
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value) if value.size else None

    if value.device.type != "cpu" or value.layout is not torch.strided:
        return None
    start = value.data_ptr()
    if not value.numel() or not start:
        return None

    last = 0
    for size, stride in zip(value.shape, value.stride(), strict=True):
        last += (size - 1) * stride
    return start, start + (last + 1) * value.element_size()


def with_values(module: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A deep copy of a module that holds other values.

    Args:
        module: Left as it is; its tensors are not copied.
        values: One tensor for each name of `holdings`; ties, `requires_grad`, attributes and training flags are the
            module's.
    """
    # `deepcopy` takes what its memo has for an object in place of copying it.
    memo: dict[int, object] = {}
    for name, tensor in holdings(module).all.items():
        # JAX may have held an int64 in 32 bits.
        value = values[name].to(tensor.dtype)
        memo[id(tensor)] = _as_kind_of(tensor, value)

    # The old weight_norm and pruning keep what they computed in an attribute, and torch copies leaves only.
    for submodule in module.modules():
        for attribute in vars(submodule).values():
            if isinstance(attribute, torch.Tensor) and attribute.grad_fn is not None:
                memo[id(attribute)] = attribute.detach().clone()

    # With gradients on, the parameters of a scripted module would be copied to tensors that are no leaves.
    with torch.no_grad():
        copied = copy.deepcopy(module, memo)

    _put_values(module, copied, memo)
    return copied


def _put_values(module: nn.Module, copied: nn.Module, memo: Mapping[int, object]) -> None:
    """Put the values into a copy of the module: its class may have a `__deepcopy__` that does not ask the memo."""
    copied_tensors = named_tensors(copied)
    copied_modules = dict(cast(Iterator[tuple[str, nn.Module]], copied.named_modules()))

    for name, original in named_tensors(module).items():
        value = cast(torch.Tensor, memo[id(original)])
        tensor = copied_tensors.get(name)
        if tensor is None or tensor is original:
            raise ValueError(
                f"{caller()}: copy.deepcopy({type(module).__name__}) gives a module "
                + (f"without {name}" if tensor is None else f"that shares {name} with it")
                + ", by a __deepcopy__ that is not PyTorch's own. Let it copy parameters and buffers, or delete it."
            )
        if tensor is value or value.is_meta:
            continue

        if tensor.device == value.device:
            tensor.data.copy_(value)
        else:
            tensor.data = value
            put_into_scripted(copied_modules, name, tensor)
        tensor.requires_grad_(original.requires_grad)

    modules = dict(cast(Iterator[tuple[str, nn.Module]], module.named_modules()))
    for path, submodule in copied_modules.items():
        submodule.training = modules.get(path, submodule).training


def put_into_scripted(modules: Mapping[str, nn.Module], name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where a scripted module has an entry: it holds tensors of C++, not the objects of Python.

    Args:
        modules: All modules by path, of which some may be scripted; in others nothing changes.
        name: Of the entry.
        tensor: Of any device.
    """
    path, _, leaf = name.rpartition(".")
    owner: Any = modules[path]
    if isinstance(owner, torch.jit.ScriptModule):
        setattr(owner, leaf, tensor)


def gradient_hooks(params: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The hooks on the gradients of parameters, by the numbers that torch gives them; each hook has its own."""
    # This is asked at each step, and `__torch_function__` would cost a call of Python for each attribute.
    with torch._C.DisableTorchFunctionSubclass():
        hooks = list(map(operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), params))
    if not any(map(any, hooks)):
        return ()

    numbers: list[tuple[int, ...]] = []
    for position, (backward_hooks, accumulate_hooks) in enumerate(hooks):
        if backward_hooks or accumulate_hooks:
            numbers.append((position, *(backward_hooks or ()), *(accumulate_hooks or ())))
    return tuple(numbers)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on parameters whose places others are to take, which would lose them."""
    hooked = [name for name, param in module.named_parameters() if gradient_hooks([param])]
    if hooked:
        raise NotImplementedError(
            f"{caller()}: {', '.join(hooked)} have hooks, which the tensors that take their places would lack, and the "
            "gradients would be others. Register the hooks afterwards."
        )


def refuse_load_hooks(module: nn.Module) -> None:
    """Refuse modules that change a `state_dict` before they load it, where entries are read one by one.

    Raises:
        NotImplementedError: There are some; all are listed. Those of PyTorch's own, which rename what older versions
            wrote, are no harm: old names are errors by themselves.
    """
    hooked: list[str] = []
    for path, submodule in cast(Iterator[tuple[str, nn.Module]], module.named_modules()):
        hooks = cast(dict[int, Callable[..., object]], submodule._load_state_dict_pre_hooks).values()
        # PyTorch wraps a hook that wants the module.
        functions = [getattr(hook, "hook", hook) for hook in hooks]
        if not all(function.__module__.startswith("torch.") for function in functions):
            hooked.append(path or type(module).__name__)

    if hooked:
        raise NotImplementedError(
            f"{caller()}: {', '.join(hooked)} have hooks that change a state_dict before it is loaded, "
            "which would not run. Load it by load_state_dict on the CPU, and place the model then."
        )


OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


class TensorPlaces:
    """The places of a module's tensors: entries, under all names of a tie, and plain attributes.

    They are found once, so that to replace the entries one by one costs no walk through the whole module for each.
    """

    def __init__(self, module: nn.Module) -> None:
        # By the tensor's id: the attributes that have it, by (id of the module, name of the attribute).
        self._places: dict[int, dict[tuple[int, str], nn.Module]] = {}
        for submodule in module.modules():
            for name in vars(submodule).keys() - OF_EVERY_MODULE:
                for tensor in _tensors_in(vars(submodule)[name]):
                    self._places.setdefault(id(tensor), {})[id(submodule), name] = submodule

    def replace(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Put other tensors in the places of these.

        Returns:
            What is in their places now: a parameter stays a parameter, with its `requires_grad` and its attributes.
        """
        # The old tensors are kept alive with their ids, or a new one might get the id of one that is gone.
        replacements = {id(old): (old, _as_kind_of(old, value)) for old, value in pairs}
        places: dict[tuple[int, str], nn.Module] = {}
        for old_id in replacements:
            places.update(self._places.get(old_id, {}))

        for (_, name), submodule in places.items():
            vars(submodule)[name] = _replaced(vars(submodule)[name], replacements)

        # A recurrent net has weak references to its weights beside the attributes.
        for submodule in dict.fromkeys(places.values()):
            if isinstance(submodule, nn.RNNBase):
                submodule._init_flat_weights()

        new_tensors: list[torch.Tensor] = []
        for old_id, (_, value) in replacements.items():
            self._places.setdefault(id(value), {}).update(self._places.pop(old_id, {}))
            new_tensors.append(value)
        return new_tensors


def _as_kind_of(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    return marked_like(old, nn.Parameter(value, requires_grad=old.requires_grad))


def marked_like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new tensor, with the attributes that a user has given to the old one."""
    for name, mark in vars(old).items():
        if not _OF_TENSORS.fullmatch(name):
            vars(new)[name] = mark
    return new


def entry_places(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]]:
    """The places of parameters and buffers, each under all of its names: a dict, the key there, the tensor if any."""
    places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
    for submodule in module.modules():
        for entries in (submodule._parameters, submodule._buffers):
            tensors = cast(dict[str, torch.Tensor | None], entries)
            places += [(tensors, name, tensor) for name, tensor in tensors.items()]
    return places


def place_of(module: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    """The dict that holds the parameter or buffer of that name, and its key there."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters if leaf in owner._parameters else owner._buffers, leaf  # pyright: ignore[reportReturnType]


# What fakes and tensors of the jax device keep for themselves; the rest are marks of the user's, for optimisers say.
_OF_TENSORS = re.compile(
    r"_storage|_same_as|_original|_moved_from|_jax_counterpart|_is_param|_?fake_device|fake_mode|constant|real_tensor|pytype"
    r"|dispatch_keys|_\w+_memo(_vc|_epoch)?"
)


def _tensors_in(value: PyTree) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple or isinstance(value, list | dict):
        items = cast(Iterable[PyTree], value.values() if isinstance(value, dict) else value)
        for item in items:
            yield from _tensors_in(item)


def _replaced(value: PyTree, new: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> PyTree:
    if isinstance(value, torch.Tensor):
        return new[id(value)][1] if id(value) in new else value
    if type(value) is tuple:
        return tuple(_replaced(item, new) for item in cast(tuple[PyTree, ...], value))

    # A list or a dict is written to where it is: others may hold it too.
    if isinstance(value, list | dict):
        container = cast(dict[object, PyTree], value)
        places = list(container) if isinstance(value, dict) else range(len(container))
        for place in places:
            item = container[place]
            replacement = _replaced(item, new)
            if replacement is not item:
                container[place] = replacement
    return cast(PyTree, value)
