"""Repeated layers: numbered siblings that look alike, and which of their entries are stored together.

That they look alike is why a capture tries to make one program of them, and why they are stored stacked; that they are
one program is proved by the capture (see `intercept`).
"""

import abc
import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from torch_shard._entries import named_tensors, tied_names
from torch_shard._sharding import Kept, Layout, Stages

MOST_KINDS = 4
"""So many different programs may the calls of one group be."""

LEAST = 3
"""So many alike siblings are worth a loop."""


@dataclasses.dataclass(eq=False)
class Siblings:
    """Modules of one container that may be one program.

    Attributes:
        path: Of the container.
        members: Their paths, by `id` of the module, in order.
        refused: Why each is captured by itself, if it is.
        kinds: By the numbers of the calls that begin a kind of their own: the numbers, in the record of such a call, of
            tensors that it left behind (in a cache, a list) and that are used.
        used: Which results the loss depends on, of those with a gradient, by the numbers of the calls; all, if unknown.
        bundled: Whether the parameters of each are one input of the capture.
    """

    path: str
    members: dict[int, str]
    refused: str | None = None
    kinds: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=lambda: {0: ()})
    used: dict[int, tuple[bool, ...]] = dataclasses.field(default_factory=dict)
    bundled: bool = True

    def refuse(self, why: str) -> None:
        """Let each member be captured by itself; the first reason stays."""
        self.refused = self.refused or why

    def add_kind(self, number: int, left: tuple[int, ...] = ()) -> None:
        """Let a call begin a kind of its own, which leaves tensors with these numbers behind."""
        self.kinds[number] = left
        if len(self.kinds) > MOST_KINDS:
            self.refuse(f"its layers are more than {MOST_KINDS} different programs")


def find_siblings(
    module: nn.Module, specs: Mapping[str, Sequence[object]], least: int, path: str = ""
) -> Iterator[Siblings]:
    """Numbered children (of `ModuleList`, `Sequential` and their like) that look alike, outermost first.

    They need not stand next to each other: alike are those with the same classes under the same relative names, and for
    each entry the same shape, dtype, spec and kind (trainable, frozen or buffer).
    """
    named = list(module._modules.items())  # a scripted module has no other way to them
    children = {f"{path}{name}": child for name, child in named if child is not None}
    grouped: set[str] = set()
    if [name for name, _ in named] == [str(number) for number in range(len(named))]:
        looks = {at: _look(at, child, specs) for at, child in children.items()}
        for look in dict.fromkeys(found for found in looks.values() if found is not None):
            members = {id(children[at]): at for at, found in looks.items() if found == look}
            if len(members) >= least:
                grouped |= set(members.values())
                yield Siblings(path.rstrip("."), members)
        if grouped and (alone := {id(child): at for at, child in children.items() if at not in grouped}):
            yield Siblings(path.rstrip("."), alone, "its classes, tensors or their splits differ from its siblings'")
    for at, child in children.items():
        if at not in grouped:
            yield from find_siblings(child, specs, least, f"{at}.")


def _look(path: str, module: nn.Module, specs: Mapping[str, Sequence[object]]) -> Hashable | None:
    """A key that alike modules agree in; None for what cannot be a program of its own."""
    inner = list(module.named_modules(remove_duplicate=False))
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return None
    hooked = any(m._backward_hooks or m._backward_pre_hooks for name, m in inner if name)
    if hooked or next(module.parameters(), None) is None:
        return None
    classes = tuple((name, type_before_parametrizations(m), m.training) for name, m in inner)
    return classes, tuple(
        (n, type(t), t.shape, t.dtype, t.requires_grad, _padded(specs.get(f"{path}.{n}"), t.ndim))
        for n, t in named_tensors(module).items()
    )


def _padded(spec: Sequence[object] | None, ndim: int) -> Hashable:
    return None if spec is None else tuple(spec) + (None,) * (ndim - len(spec))


def stack_layout(
    model: nn.Module,
    names: Iterable[str],
    groups: Iterable[Siblings],
    kept: Mapping[str, Kept] | None = None,
    *,
    stages: Stages | None = None,
) -> Layout:
    """Find what is stored together: each entry of alike siblings. A tensor under several names stands alone."""
    tied = tied_names(model)
    stacks = []
    for group in groups:
        paths = list(group.members.values())
        if group.refused is None:
            if stages is not None and tuple(paths) == stages.layers:
                paths = [paths[i] for i in stages.order(len(paths))]
            relative = named_tensors(model.get_submodule(paths[0]))
            stacks += [tuple(f"{path}.{name}" for path in paths) for name in relative]
    return Layout.of((stack for stack in stacks if not tied.intersection(stack)), names, kept, stages=stages)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The trainable parameters of a repeated layer as one input of the capture of the whole, by name.

    There, only the layer's own operator may read them, so one tensor stands for all of them: its gradient is the
    layer's, and what autograd does to it, adding, it does to each. A capture of 48 layers then has about 50 inputs. In
    the compiled program they are what they were: bundles exist in captures alone.

    Captures of 48 layers without bundles took 1.78 times as long for the GPT of the benchmarks (16 parameters a layer,
    2.5 s to 4.5 s) and 1.15 times as long for a Llama of Hugging Face (9 a layer, 4.8 s to 5.6 s; each the best of
    five, taken in turn in one process): PyTorch's tracer spends about 0.5 ms on each input, gradient and output in each
    of its passes.
    """

    names: tuple[str, ...]


GraphInput = str | Bundle
"""An input of a capture: one entry of the model by its name, or a bundle of them."""


def names_of(given: GraphInput) -> tuple[str, ...]:
    """The entries that an input stands for."""
    return given.names if isinstance(given, Bundle) else (given,)


def graph_inputs(
    model: nn.Module,
    names: Iterable[str],
    groups: Iterable[Siblings],
    *,
    trainable: Mapping[str, torch.Tensor],
    apart: Collection[str],
) -> list[GraphInput]:
    """The inputs of a capture: names by themselves, and at the first of its names each bundle."""
    apart = tied_names(model).union(apart)
    bundles: dict[str, Bundle] = {}
    for path in (path for group in groups if group.bundled and not group.refused for path in group.members.values()):
        own = (f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters())
        mine = tuple(name for name in own if name in trainable and name not in apart)
        bundles |= dict.fromkeys(mine, Bundle(mine))
    return list(dict.fromkeys(bundles.get(name, name) for name in names))


# Reasons to start a capture again, knowing more.
#
# A reason that is found while the user's code runs is noted and nothing is raised: the code runs on to its end on
# fakes, which is harmless, and what was captured is thrown away. Then the reason teaches the groups of layers what is
# known now.


class Restart(abc.ABC):
    """A reason to start the capture again."""

    @abc.abstractmethod
    def learn(self, groups: list[Siblings]) -> None:
        """Note on the groups of the capture what is known now."""


class Abandoned(Exception):
    """Ends a capture for which a restart is noted, once the user's code has run to its end."""


@dataclasses.dataclass(frozen=True)
class Refused(Restart):
    """The layers of a group, or of all groups, cannot be regions."""

    group: Siblings | None
    why: str

    def learn(self, groups: list[Siblings]) -> None:
        """Let each be captured by itself."""
        for group in [self.group] if self.group else groups:
            group.refuse(self.why)


@dataclasses.dataclass(frozen=True)
class NewKind(Restart):
    """A call is another program than those before."""

    group: Siblings
    number: int

    def learn(self, groups: list[Siblings]) -> None:
        """Let it begin a kind of its own."""
        self.group.add_kind(self.number)


@dataclasses.dataclass(frozen=True)
class Unbundled(Restart):
    """Parameters of layers are used outside of them."""

    def learn(self, groups: list[Siblings]) -> None:
        """Let each be an input of its own."""
        for group in groups:
            group.bundled = False


@dataclasses.dataclass(frozen=True)
class LeftBehind(Restart):
    """Tensors that layers left behind are used after all.

    Attributes:
        tensors: Of each the group of its layer, which call of the group the layer was captured from, and the tensor's
            number in the record of this call.
    """

    tensors: dict[tuple[Siblings, int, int], None]

    def learn(self, groups: list[Siblings]) -> None:
        """Let them be further results."""
        for group, call, number in self.tensors:
            group.kinds[call] += (number,)
            group.used.clear()  # there are more results now


class SeenCall(NamedTuple):
    """What was seen of one call.

    Attributes:
        group: Of the layer.
        number: Which call of the group it is.
        first: Which call of the group its layer was captured from.
        used: On which results of it the loss depends.
    """

    group: Siblings
    number: int
    first: int
    used: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Unused(Restart):
    """The loss depends on other results of layers than was assumed.

    Attributes:
        calls: Those of which it was seen what the loss depends on.
    """

    calls: Sequence[SeenCall]

    def learn(self, groups: list[Siblings]) -> None:
        """Let the others have no cotangents; calls that differ in this are different programs."""
        known = {(group, first, used) for group, number, first, used in self.calls if number == first}
        for group, number, first, used in self.calls:
            group.used[number] = used
            if (kind := (group, first, used)) not in known:
                known.add(kind)
                group.add_kind(number, group.kinds[first])
