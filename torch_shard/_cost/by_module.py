"""Costs of a program by the module that they are for."""

import dataclasses
from collections.abc import Callable, Iterable

from torch_shard._common.printed import starred
from torch_shard._cost.total import Cost

OPTIMIZER, LOSS, COMPILER = "(optimizer)", "(loss)", "(not attributed)"


@dataclasses.dataclass
class ModuleCost:
    """What a module costs one device, forward and backward.

    Attributes:
        path: Of the module, `model.layers.*` for the layers of a loop; or `(optimizer)`, `(loss)`, for what is of no
            module, or `(not attributed)`.
        collectives: For each kind, how many there are, each time counted.
        received: Bytes by each kind of them.
        flops: Of products.
        memory_bytes: Read from the device's memory and written to it.
        cycles: By XLA:TPU's estimate, without communication; zero on other devices.
        constrained: Why the step lays out values of it on the mesh, as `step.constraints` says it.
    """

    path: str
    collectives: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    received: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    flops: float = 0.0
    memory_bytes: float = 0.0
    cycles: int = 0
    constrained: tuple[str, ...] = ()

    @property
    def received_bytes(self) -> float:
        """From other devices, by all kinds of collectives."""
        return sum(self.received.values())

    def add(self, cost: Cost) -> None:
        """Count what one instruction costs."""
        if cost.collective is not None:
            kind = cost.collective.kind
            self.collectives[kind] = self.collectives.get(kind, 0) + int(cost.times)
            self.received[kind] = self.received.get(kind, 0.0) + cost.received_bytes
        self.flops += cost.flops
        self.memory_bytes += cost.memory_bytes
        self.cycles += cost.cycles or 0


class ModulePaths:
    """Finds the modules of a model in the labels of a program."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = {starred(path) for path in paths if path}

    def find(self, label: str) -> str:
        """The path of the module in a label, or what else it is for."""
        found = ""
        parts = label.split(":")[0].split("/")  # XLA lists the labels of what it combines
        for part in map(_unmapped, parts):
            longer = f"{found}.{part}" if found else part
            if starred(longer) in self._known:
                found = longer
        if found:
            return found
        if OPTIMIZER.strip("()") in parts:
            return OPTIMIZER
        return LOSS if "jit(" in label else COMPILER

    def by_module(self, costs: Iterable[Cost], why: Callable[[str], tuple[str, ...]]) -> list[ModuleCost]:
        """The costs of each module, in the order of their first instructions, and why it is constrained."""
        found: dict[str, ModuleCost] = {}
        for cost in costs:
            path = self.find(cost.label)
            if path not in found:
                found[path] = ModuleCost(path, constrained=why("" if path == LOSS else path))
            found[path].add(cost)
        return list(found.values())


def _unmapped(part: str) -> str:
    """A part of a label without what `jax.vmap` puts around it: the layers of a pipeline are mapped over its stages."""
    return part.removeprefix("vmap(").removesuffix(")") if part.startswith("vmap(") else part
