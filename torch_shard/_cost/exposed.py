"""Communication that a TPU waits for: what the compiler's schedule does not hide behind arithmetic.

The program is followed in the order of its schedule, with one clock of arithmetic (XLA:TPU's `estimated_cycles`) and
one for the links of each group of devices. A collective that is started and ended apart travels while the clock goes
on; one that is not apart, or not done when its result is needed, is waited for.
"""

import collections
import dataclasses
from collections.abc import Mapping

from torch_shard._cost.collectives import axes_of_group, group_of, identity, travelling
from torch_shard._cost.hlo import Hlo, Instruction
from torch_shard._cost.total import Walk

BYTES_PER_CYCLE = {"TPU v4": 95, "TPU v5 lite": 67, "TPU v5": 114, "TPU v6 lite": 128}
"""That a device receives along one axis of the torus, both ways together, by kind of device.

Source: "Inter-chip interconnect" of each in Google Cloud's documentation, over the frequency of its cores.
"""

_ONE_BY_ONE = ("-done", "-update")


def exposed_by_axis(text: str, device_kind: str, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Cycles that one device waits for others, by the axes of the mesh, by comma, over which they lie.

    None for a kind of device whose links are not known.

    Args:
        text: As `jax.stages.Compiled.as_text()` gives it.
        device_kind: As JAX names the device.
        sizes: Of the mesh's axes, in order.
    """
    rate = BYTES_PER_CYCLE.get(device_kind)
    if rate is None:
        return None
    hlo, found = Hlo(text), collections.Counter[str]()
    for group, cycles in _Schedule(hlo, rate).run(hlo.entry).waited.items():
        found[", ".join(axes_of_group(group, sizes))] += int(cycles)
    return dict(found)


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
        end = self.free[group] = max(self.now, self.free.get(group, 0.0)) + cycles
        self.ends[name] = end, group

    def wait(self, name: str) -> None:
        """Wait until it is there."""
        end, group = self.ends.pop(name, (0.0, ""))
        if (late := end - self.now) > 0:
            self.now += late
            self.waited[group] += late


class _Schedule:
    def __init__(self, hlo: Hlo, rate: float) -> None:
        self.hlo, self._rate, self._walk = hlo, rate, Walk(hlo)

    def run(self, computation: str, around: frozenset[str] = frozenset()) -> _Clock:
        """Follow a computation, through which some chains pass that began before it and end behind it."""
        clock, instructions = _Clock(around=around), self.hlo.computations[computation]
        last = {chain: i for i, instr in enumerate(instructions) for chain, _ in self._travels(instr)}
        for number, instruction in enumerate(instructions):
            self._step(clock, instruction, number, last)
        for name in list(clock.ends):
            clock.wait(name)
        return clock

    def _step(self, clock: _Clock, instruction: Instruction, number: int, last: dict[str, int]) -> None:
        op = instruction.op
        if inner := self.hlo.inner(instruction):
            for called, times in inner:
                passed = self.run(called, clock.around.union(clock.ends))
                clock.now += times * passed.now
                for group, cycles in passed.waited.items():
                    clock.waited[group] += times * cycles
            return
        if op.endswith(_ONE_BY_ONE):
            if op.endswith("-done"):
                clock.wait(next(iter(instruction.operands), ""))
            return
        travels = [travel for travel in self._travels(instruction) if travel[0] not in clock.around]
        for chain, moved in travels:
            if chain not in clock.ends:
                clock.start(chain, *moved)
        clock.now += self._walk.cycles(instruction) or 0
        if not op.endswith("-start"):
            for chain, _ in travels:
                if last[chain] == number:
                    clock.wait(chain)

    def _travels(self, instruction: Instruction) -> list[tuple[str, tuple[str, float]]]:
        """What goes over the wire: a name, by which its end is known, its group of devices, and cycles."""
        found = list[tuple[str, tuple[str, float]]]()
        for inner, moved in travelling(self.hlo, instruction):
            key, ways = identity(inner), 1 if inner.kind == "collective-permute" else 2  # of a ring
            # of a part of a chain, the name of the chain; else that of the instruction in the schedule
            name = ":".join(map(str, key)) if "chain" in key else instruction.name
            found.append((name, (group_of(inner), moved.num_bytes * 2 / ways / self._rate)))
        return found
