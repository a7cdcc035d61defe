"""Which values of a function were there before it ran."""

import gc


class ThereBefore:
    """The objects that are there now: `value in there_before` tells later whether a value was.

    They are kept alive meanwhile, so that none has the address of another.
    """

    def __init__(self) -> None:
        self._objects = gc.get_objects()
        self._ids = set(map(id, self._objects))

    def __contains__(self, value: object) -> bool:
        if id(value) in self._ids:
            return True
        # A dict of plain values is not known to the collector. One that was there is held by something that was.
        return not gc.is_tracked(value) and any(id(holder) in self._ids for holder in gc.get_referrers(value))

    def hold(self, value: object) -> bool:
        """Tell whether something that was there holds a value now."""
        return any(id(holder) in self._ids for holder in gc.get_referrers(value))
