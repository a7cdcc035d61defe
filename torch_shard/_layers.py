"""Repeated layers: which entries of a module are the same entry of structurally equal siblings."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from jax.sharding import NamedSharding
from torch import nn

from torch_shard._module import Holdings
from torch_shard._stacks import Group, Layout


def find_stacks(model: nn.Module, held: Holdings, shardings: Mapping[str, NamedSharding]) -> Layout:
    """Which entries can be stored as rows of one array.

    Among the children of a container that are numbered from 0 (`ModuleList`, `Sequential` and their like), those are
    grouped that hold the same: the same classes under the same relative names, and for each relative name the same
    shape, dtype, sharding and kind (trainable, frozen or buffer). They need not stand next to each other. Of nested
    containers the outermost with equal children counts. A tensor under several names stands alone.

    Args:
        model: Only its structure is read.
        held: Its entries.
        shardings: By name.

    Returns:
        A layout of all entries, in the order of `held.all`. No group mixes kinds.
    """
    describe = _Describe(model, held, shardings)
    return Layout.of(_find_groups(model, "", describe), held.all)


class _Describe:
    """What has to be equal for two children to be alike."""

    def __init__(self, model: nn.Module, held: Holdings, shardings: Mapping[str, NamedSharding]) -> None:
        self.entries: dict[str, Hashable] = {}
        for kind, tensors in (("trainable", held.trainable), ("frozen", held.frozen), ("buffer", held.buffers)):
            for name, t in tensors.items():
                spec = tuple(shardings[name].spec)
                padded = spec + (None,) * (t.ndim - len(spec))
                self.entries[name] = (kind, type(t), tuple(t.shape), t.dtype, padded)
        self.tied = _tied(model)

    def __call__(self, path: str, child: nn.Module) -> tuple[Hashable, list[str]]:
        """What is the same in a child that is alike, and the relative names of what can be stacked."""
        classes = tuple((name, type(m)) for name, m in child.named_modules(remove_duplicate=False))
        names = [name for name, _ in _all_entries(child)]
        alone = [path + name in self.tied for name in names]
        entries = tuple((n, None if tied else self.entries[path + n]) for n, tied in zip(names, alone, strict=True))
        return (classes, entries), [n for n, tied in zip(names, alone, strict=True) if not tied]


def _all_entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _tied(model: nn.Module) -> set[str]:
    """The names of tensors that have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in _all_entries(model):
        names.setdefault(id(tensor), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def _find_groups(module: nn.Module, path: str, describe: _Describe) -> Iterator[Group]:
    named = list(module._modules.items())  # a scripted module has no other way to them
    children = {f"{path}{name}.": child for name, child in named if child is not None}
    if [name for name, _ in named] == [str(number) for number in range(len(named))]:
        alike: dict[Hashable, list[str]] = {}
        for at, child in children.items():
            alike.setdefault(describe(at, child)[0], []).append(at)
        for members in (m for m in alike.values() if len(m) > 1):
            _, names = describe(members[0], children[members[0]])
            yield from (tuple(at + name for at in members) for name in names)
            for at in members:
                del children[at]
    for at, child in children.items():
        yield from _find_groups(child, at, describe)
