"""TODO _scan.restarts."""

from torch_shard._scan.siblings import CallKind, Siblings


class Restart(BaseException):
    """The capture must start again, knowing more; no `except Exception` of a model stops it."""

    def learn(self, groups: list[Siblings]) -> None:
        """Note on the groups of the capture what is known now."""
        raise NotImplementedError


class Refused(Restart):
    """The layers of a group, or of all groups, cannot be regions."""

    def __init__(self, group: Siblings | None, why: str) -> None:
        self._group, self._why = group, why

    def learn(self, groups: list[Siblings]) -> None:
        """Each is captured by itself."""
        for group in [self._group] if self._group else groups:
            group.refuse(self._why)


class NewKind(Restart):
    """A call is another program than those before."""

    def __init__(self, group: Siblings, number: int) -> None:
        self._group, self._number = group, number

    def learn(self, groups: list[Siblings]) -> None:
        """It begins a kind of its own."""
        self._group.add_kind(self._number, CallKind())


class Unbundled(Restart):
    """Parameters of layers are used outside of them."""

    def learn(self, groups: list[Siblings]) -> None:
        """Each is an input of its own."""
        for group in groups:
            group.bundled = False
