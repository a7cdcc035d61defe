"""Communication that a TPU waits for: what the compiler's schedule does not hide behind arithmetic.

The program is followed in the order of its schedule, with one clock of arithmetic (XLA:TPU's `estimated_cycles`) and
one for the links of each group of devices. A collective that is started and ended apart travels while the clock goes
on; one that is not apart, or not done when its result is needed, is waited for.
"""

import collections
import dataclasses
from collections.abc import Iterator

from jax.sharding import Mesh

from torch_shard._cost.chips import Links
from torch_shard._cost.hlo import Hlo, Instruction, axes_of_group, group_of, identity, members_of, travelling
from torch_shard._cost.total import Walk


def exposed_by_axis(text: str, mesh: Mesh) -> dict[str, int] | None:
    """Cycles that one device waits for others, by the axes of the mesh, by comma, over which they lie.

    None for a kind of device whose compiler counts no cycles.

    Args:
        text: As `jax.stages.Compiled.as_text()` gives it.
        mesh: Of the program's devices.
    """
    links = Links(list(mesh.devices.flat))
    if links.chip.clock is None:
        return None

    hlo = Hlo(text)
    waited = _Schedule(hlo, links).run(hlo.entry).waited
    by_axis = collections.Counter[str]()
    for group, cycles in waited.items():
        by_axis[", ".join(axes_of_group(group, mesh.shape))] += int(cycles)
    return dict(by_axis)


@dataclasses.dataclass
class _Clock:
    """What has passed in one computation.

    Attributes:
        around: Chains that began before it and end behind it: each iteration of a loop takes a part of theirs.
        now: Cycles, with those that were waited for.
        waited: Those, by the group of devices.
        free: When the links of a group of devices are free again.
        ends: When what was started is done, and of which group it is, by its name.
    """

    around: frozenset[str] = frozenset()
    now: float = 0.0
    waited: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict[str, float](float))
    free: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    ends: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict[str, tuple[float, str]])

    def start(self, name: str, group: str, cycles: float) -> None:
        """Let something travel."""
        # The links of a group carry one collective after the other.
        begin = max(self.now, self.free.get(group, 0.0))
        end = begin + cycles
        self.free[group] = end
        self.ends[name] = end, group

    def wait(self, name: str) -> None:
        """Wait until it is there."""
        end, group = self.ends.pop(name, (0.0, ""))
        late = end - self.now
        if late > 0:
            self.now += late
            self.waited[group] += late


class _Schedule:
    def __init__(self, hlo: Hlo, links: Links) -> None:
        self.hlo, self._links, self._walk = hlo, links, Walk(hlo, links.chip)

    def run(self, computation: str, around: frozenset[str] = frozenset()) -> _Clock:
        """Follow a computation, through which some chains pass that began before it and end behind it."""
        clock = _Clock(around=around)
        instructions = self.hlo.computations[computation]

        # A collective that was cut into a chain is done with the last part of it.
        last: dict[str, int] = {}
        for number, instruction in enumerate(instructions):
            for chain, _, _ in self._travels(instruction):
                last[chain] = number

        for number, instruction in enumerate(instructions):
            self._step(clock, instruction, number, last)
        for name in list(clock.ends):
            clock.wait(name)
        return clock

    def _step(self, clock: _Clock, instruction: Instruction, number: int, last: dict[str, int]) -> None:
        op = instruction.op
        inner = self.hlo.inner(instruction)
        if inner:
            for called, times in inner:
                # What began before a loop travels on while it runs, and is no wait within.
                passed = self.run(called, clock.around.union(clock.ends))
                clock.now += times * passed.now
                for group, cycles in passed.waited.items():
                    clock.waited[group] += times * cycles
            return

        if op.endswith("-done"):
            clock.wait(instruction.operands[0])
        if op.endswith(("-done", "-update")):
            return

        travels = [travel for travel in self._travels(instruction) if travel[0] not in clock.around]
        for chain, group, cycles in travels:
            if chain not in clock.ends:
                clock.start(chain, group, cycles)
        clock.now += self._walk.cycles(instruction) or 0

        # What has no `-done` of its own is waited for at once, or at the end of its chain.
        if not op.endswith("-start"):
            for chain, _, _ in travels:
                if last[chain] == number:
                    clock.wait(chain)

    def _travels(self, instruction: Instruction) -> Iterator[tuple[str, str, float]]:
        """What goes over the wire: a name, by which its end is known, its group of devices, and cycles."""
        for inner, collective in travelling(self.hlo, instruction):
            key = identity(inner)
            group = group_of(inner)
            # Of a part of a chain, the name of the chain; else that of the instruction in the schedule, to which a
            # `-done` refers.
            name = ":".join(map(str, key)) if "chain" in key else instruction.name
            yield name, group, collective.num_bytes * self._cycles_per_byte(group)

    def _cycles_per_byte(self, group: str) -> float:
        """Of what a device of a group receives."""
        is_pairs = group.startswith("source_target_pairs")
        rate = self._links.rate_of_pairs if is_pairs else self._links.rate
        return (self._links.chip.clock or 0.0) / rate(members_of(group))
