"""Reasons to start a capture again, knowing more.

A reason that is found while the user's code runs is noted and nothing is raised: the code runs on to its end on fakes,
which is harmless, and what was captured is thrown away. Then the reason teaches the groups of layers what is known now.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch_shard._scan.siblings import Siblings


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
    """A tensor that a layer left behind is used after all.

    Attributes:
        group: Of the layer.
        call: Which call of the group the layer was captured from.
        number: Of the tensor in the record of this call.
    """

    group: Siblings
    call: int
    number: int

    def learn(self, groups: list[Siblings]) -> None:
        """Let it be another result."""
        self.group.kinds[self.call] += (self.number,)
        self.group.used.clear()  # there are more results now


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
