"""Tensors that a callable reaches by itself: who traces it reads them anew, as inputs of the trace."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture import ModuleFlags, is_literal
from torch_shard._common.patching import having
from torch_shard._device import to_array
from torch_shard._lowering import Program, RowSplit


class Closure(threading.local):
    """Readers of tensors that a callable reaches by itself: inside `jax.jit` they must be inputs, not constants."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self.split: RowSplit | None = None
        """How the rows of the batch lie in the step that calls into JAX."""

    def within(self, split: RowSplit | None) -> contextlib.AbstractContextManager[None]:
        """Let what a step calls know how rows lie: a function of the user's cannot hand it on."""
        return having(self, split=split)

    @property
    def token(self) -> object:
        """The call from a capture into JAX that is being traced, or None."""
        return self.readers[-1].token if self.readers else None

    @property
    def traces(self) -> bool:
        """Whether a trace is under way whose programs will run without Python."""
        return self.token is not None or any(not reader.is_partial for reader in self.readers)

    def read(self, program: Program[Any]) -> list[jax.Array]:
        """The current values of the tensors that a captured callable closes over."""
        if self.readers:
            self.readers[-1].modules.append(program.graph.modules)
            self.readers[-1].programs.append(program)
        return self.values(program.graph.closure)

    def values(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """The current values of these tensors: inputs of the trace under way, if there is one."""
        return self.readers[-1].values(tensors) if self.readers else [_read(t) for t in tensors]

    def held(self) -> tuple[tuple[torch.Tensor, ...], list[jax.Array]]:
        """All tensors that are inputs of the trace under way, and their values in it."""
        return self.readers[-1].held() if self.readers else ((), [])


CLOSURE = Closure()


class MoreInputs(Exception):
    """A trace met tensors that have to become inputs of the program."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class Reader:
    """Reads closed-over tensors from the inputs of a trace, and notes what the trace depends on.

    Args:
        tensors: The closed-over tensors.
        values: Their values in the trace.
        token: Of a call from a capture into JAX. Such a call is traced several times, also when the capture is over
            and its modules hold other tensors again: the programs of the first time serve every time.
        partial: Whether the reader around this one has the other tensors.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        values: Sequence[jax.Array],
        token: object = None,
        *,
        partial: bool = False,
    ) -> None:
        self.token = CLOSURE.token if token is None else token
        self._tensors = tuple(tensors)
        self._values = {id(t): v for t, v in zip(tensors, values, strict=True)}
        self.is_partial, self._around = partial, CLOSURE.readers[-1:]
        of = self._around[0] if partial and self._around else None
        self.modules: list[ModuleFlags] = of.modules if of else []
        self.programs: list[Program[Any]] = of.programs if of else []
        self.has_views = False
        """True once a view of a torch callable ran, for which JAX must not reuse a trace."""

    def held(self) -> tuple[tuple[torch.Tensor, ...], list[jax.Array]]:
        """The tensors that it reads, and their values."""
        return self._tensors, [self._values[id(t)] for t in self._tensors]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """The inputs that stand for these tensors."""
        missing = [t for t in tensors if id(t) not in self._values and not is_literal(t)]
        if missing and not self.is_partial:
            raise MoreInputs(missing)
        others = self._around[0].values(missing) if self._around else map(_read, missing)
        known = self._values | dict(zip(map(id, missing), others, strict=True))
        return [known[id(t)] if id(t) in known else _read_literal(t) for t in tensors]

    @contextlib.contextmanager
    def active(self) -> Iterator["Reader"]:
        """Read for the traces within."""
        CLOSURE.readers.append(self)
        try:
            yield self
        finally:
            CLOSURE.readers.pop()


def _read(tensor: torch.Tensor) -> jax.Array:
    return to_array(tensor, rounds=True)


def _read_literal(tensor: torch.Tensor) -> jax.Array:
    with _disable_current_modes():  # of a capture around this one, to which the tensor has no value
        return _read(tensor)
