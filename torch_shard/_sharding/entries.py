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
        chosen = {name: p for name, p in self.trainable.items() if name in names}
        return Holdings(chosen, {n: p for n, p in self.params.items() if n not in chosen}, self.buffers)


def holdings(module: nn.Module) -> Holdings:
    """The parameters and buffers of a module (non-persistent buffers too)."""
    params = dict(module.named_parameters())
    return Holdings(
        trainable={name: p for name, p in params.items() if p.requires_grad},
        frozen={name: p for name, p in params.items() if not p.requires_grad},
        buffers=dict(module.named_buffers()),
    )


def unsaved_buffers(module: nn.Module) -> tuple[str, ...]:
    """The names of buffers that a `state_dict` leaves out under every name that they have."""
    saved = {
        id(m._buffers[name]) for m in module.modules() for name in {*m._buffers.keys()} - m._non_persistent_buffers_set
    }
    return tuple(name for name, buffer in module.named_buffers() if id(buffer) not in saved)


def group_ties(values: Mapping[str, PyTree], *, by_identity: bool) -> list[list[str]]:
    """Group names by tensor. A `state_dict` detaches, so there a tie is one view of one storage."""
    groups: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        key: Hashable = name  # arrays and shapes are values, so two names of one are no tie
        if by_identity:
            key = id(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata  # data_ptr() is 0 for every meta tensor
            key = storage, value.storage_offset(), value.shape, value.stride(), value.dtype
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each under all of its names."""
    params, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {**dict(params), **dict(buffers)}


def tied_names(module: nn.Module) -> set[str]:
    """The names of a module's tensors that have several."""
    ties = group_ties(named_tensors(module), by_identity=True)
    return {name for names in ties if len(names) > 1 for name in names}


def shared_storage(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two names whose tensors are views of one memory, whether or not their elements overlap; for fakes too.

    Args:
        tensors: As in `Holdings.all`; those on the jax device are left out.
    """
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type in ("cpu", "meta"):
            first = seen.setdefault(tensor.untyped_storage()._cdata, name)
            if first != name:
                return first, name
    return None


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two names whose tensors overlap in memory without being one tensor, so that a write to one shows in the other.

    Args:
        tensors: As in `Holdings.all`; those on the jax device are left out.
    """
    spans = sorted((*span, name) for name, tensor in tensors.items() if (span := memory_span(tensor)))
    pairs = itertools.pairwise(spans)
    return next(((first[2], second[2]) for first, second in pairs if second[0] < first[1]), None)


def memory_span(value: torch.Tensor | np.ndarray) -> tuple[int, int] | None:
    """Where a tensor or an array lies in the memory of the host; None if it has no element there."""
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value) if value.size else None
    if value.device.type != "cpu" or value.layout is not torch.strided or not (value.numel() and value.data_ptr()):
        return None
    last = sum((num - 1) * stride for num, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def with_values(module: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A deep copy of a module that holds other values.

    Args:
        module: Left as it is; its tensors are not copied.
        values: One tensor for each name of `holdings`; ties, `requires_grad`, attributes and training flags are the
            module's.
    """
    memo: dict[int, object] = {}
    for name, tensor in holdings(module).all.items():
        value = values[name].to(tensor.dtype)  # JAX may have held an int64 in 32 bits
        memo[id(tensor)] = _as_kind_of(tensor, value)
    for m in module.modules():  # the old weight_norm and pruning keep what they computed, which torch cannot copy
        computed = [v for v in vars(m).values() if isinstance(v, torch.Tensor) and v.grad_fn is not None]
        memo.update((id(v), v.detach().clone()) for v in computed)
    with torch.no_grad():  # else the parameters of scripted modules are no leaves
        copied = copy.deepcopy(module, memo)
    found = named_tensors(copied)
    of_copy = dict(cast(Iterator[tuple[str, nn.Module]], copied.named_modules()))
    for name, tensor in named_tensors(module).items():  # a `__deepcopy__` of its own may not ask for what is here
        value, there = cast(torch.Tensor, memo[id(tensor)]), found.get(name)
        if there is None or there is tensor:
            raise ValueError(
                f"{caller()}: copy.deepcopy({type(module).__name__}) gives a module "
                + (f"without {name}" if there is None else f"that shares {name} with it")
                + ", by a __deepcopy__ that is not PyTorch's own. Let it copy parameters and buffers, or delete it."
            )
        if there is value or value.is_meta:
            continue
        if there.device == value.device:
            there.data.copy_(value)
        else:
            there.data = value
            put_into_scripted(of_copy, name, there)
        there.requires_grad_(tensor.requires_grad)
    modules = dict(cast(Iterator[tuple[str, nn.Module]], module.named_modules()))
    for name, m in of_copy.items():
        m.training = modules.get(name, m).training
    return copied


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
    with torch._C.DisableTorchFunctionSubclass():  # which costs a call of Python for each attribute
        hooks = list(map(operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), params))
    if not any(map(any, hooks)):
        return ()
    return tuple((at, *(found[0] or ()), *(found[1] or ())) for at, found in enumerate(hooks) if any(found))


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on parameters whose places others are to take, which would lose them."""
    if hooked := [name for name, p in module.named_parameters() if gradient_hooks([p])]:
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
    hooked = [
        name or type(module).__name__
        for name, m in cast(Iterator[tuple[str, nn.Module]], module.named_modules())
        for hook in cast(dict[int, Callable[..., object]], m._load_state_dict_pre_hooks).values()
        if not getattr(hook, "hook", hook).__module__.startswith("torch.")
    ]
    if hooked:
        raise NotImplementedError(
            f"{caller()}: {', '.join(dict.fromkeys(hooked))} have hooks that change a state_dict before it is loaded, "
            "which would not run. Load it by load_state_dict on the CPU, and place the model then."
        )


OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


class TensorPlaces:
    """The places of a module's tensors: entries, under all names of a tie, and plain attributes.

    They are found once, so that to replace the entries one by one costs no walk through the whole module for each.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[int, dict[tuple[int, str], nn.Module]] = {}
        for m in module.modules():
            for name in vars(m).keys() - OF_EVERY_MODULE:
                for tensor in _tensors_in(vars(m)[name]):
                    self._found.setdefault(id(tensor), {})[id(m), name] = m

    def replace(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Put other tensors in the places of these.

        Returns:
            What is in their places now: a parameter stays a parameter, with its `requires_grad` and its attributes.
        """
        new = {id(old): (old, _as_kind_of(old, value)) for old, value in pairs}
        places = {place: m for key in new for place, m in self._found.get(key, {}).items()}
        for (_, name), m in places.items():
            vars(m)[name] = _replaced(vars(m)[name], new)
        for m in {id(m): m for m in places.values() if isinstance(m, nn.RNNBase)}.values():
            m._init_flat_weights()  # weak references to what it held
        for key, (_, value) in new.items():
            self._found.setdefault(id(value), {}).update(self._found.pop(key, {}))
        return [value for _, value in new.values()]


def _as_kind_of(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    return marked_like(old, nn.Parameter(value, requires_grad=old.requires_grad))


def marked_like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new tensor, with the attributes that a user has given to the old one."""
    vars(new).update({name: mark for name, mark in vars(old).items() if not _OF_TENSORS.fullmatch(name)})
    return new


def entry_places(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]]:
    """The places of parameters and buffers, each under all of its names: a dict, the key there, the tensor if any."""
    held = [cast(dict[str, torch.Tensor | None], d) for m in module.modules() for d in (m._parameters, m._buffers)]
    return [(entries, name, tensor) for entries in held for name, tensor in entries.items()]


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
    if isinstance(value, list | dict):
        held = cast(dict[object, PyTree], value)  # or a list, which is written to by position
        pairs = list(held.items() if isinstance(value, dict) else enumerate(cast(list[PyTree], value)))
        for key, item in pairs:
            if (replaced := _replaced(item, new)) is not item:
                held[key] = replaced
    return cast(PyTree, value)
