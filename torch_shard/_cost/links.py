"""How fast devices of a TPU slice receive from one another: by the links that a group has for itself.

Chips lie on a torus. Along each of its axes over which a group extends, a chip of the group receives by two links if
the group closes a ring, and by one if it ends; chips that lie further apart share the links between them with others.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from torch_shard._cost.chips import Chip, chip_of


class Links:
    """The network of the devices of a mesh.

    Args:
        devices: In the order of their numbers in a program.
    """

    def __init__(self, devices: Sequence[object]) -> None:
        self.chip: Chip = chip_of(devices[0])
        places: list[Any] = [getattr(device, "coords", None) for device in devices]
        self._places: list[tuple[int, ...]] = [] if None in places else [tuple(place) for place in places]
        self._sizes = [max(dim) - min(dim) + 1 for dim in zip(*self._places, strict=True)]

    def rate(self, groups: Sequence[Sequence[int]]) -> float:
        """Bytes per second that each device of a group receives, of which the first stands for all."""
        if not self._places or not groups or max(groups[0]) >= len(self._places):
            return self.chip.link
        along = zip(*(self._places[member] for member in groups[0]), strict=True)
        return sum(itertools.starmap(self._rate_along, zip(along, self._sizes, strict=True))) or self.chip.link

    def rate_of_pairs(self, pairs: Sequence[Sequence[int]]) -> float:
        """The same of what each device sends to one other, by the shortest way that there is among the pairs."""
        if not self._places or not pairs or max(map(max, pairs)) >= len(self._places):
            return self.chip.link / 2
        return self.chip.link / 2 / max(1, min(self._distance(*pair) for pair in pairs))

    def _rate_along(self, places: Sequence[int], size: int) -> float:
        """Along one axis of the torus."""
        found = sorted(set(places))
        if len(found) == 1:
            return 0.0
        apart = min(after - before for before, after in itertools.pairwise(found))
        is_ring = size % self.chip.ring == 0 and len(found) * apart == size
        return self.chip.link * (1.0 if is_ring else 0.5) / apart

    def _distance(self, source: int, target: int) -> int:
        steps = (abs(a - b) for a, b in zip(self._places[source], self._places[target], strict=True))
        return sum(
            min(step, size - step) if size % self.chip.ring == 0 else step
            for step, size in zip(steps, self._sizes, strict=True)
        )
