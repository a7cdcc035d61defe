"""Random keys for eager work on the jax device; compiled steps carry theirs in their state."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike

Key: TypeAlias = jax.Array | None
"""A random key, or None where nothing is drawn."""


class _Generator:
    """The stream of keys for random numbers on the jax device; `torch.manual_seed` restarts it."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._count = 0
        self.given: Key = None
        """The key of the next random number, in place of one of the stream."""

    def seed(self, seed: int | None) -> None:
        self._seed, self._count = seed, 0

    def _place(self) -> list[int]:
        seed = torch.initial_seed() if self._seed is None else self._seed
        return [seed % 2**64, self._count]

    @property
    def state(self) -> torch.Tensor:
        """Seed and position, to come back to; a checkpoint draws the same numbers again."""
        return torch.from_numpy(np.array(self._place(), np.uint64).view(np.uint8))

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._seed, self._count = cast(tuple[int, int], state.cpu().numpy().copy().view(np.uint64).tolist())

    def next_seed(self) -> np.ndarray:
        """Two fresh words of key data, uint32."""
        words = np.random.SeedSequence(self._place()).generate_state(2)
        self._count += 1
        return words


GENERATOR = _Generator()


def next_key() -> "jax.Array":
    """A fresh random key."""
    return wrap_seed(GENERATOR.next_seed()) if GENERATOR.given is None else GENERATOR.given


def wrap_seed(seed: ArrayLike) -> "jax.Array":
    """The random key of two words of key data."""
    return cast(jax.Array, jax.random.wrap_key_data(jnp.asarray(seed, jnp.uint32), impl="threefry2x32"))


class NeedsKey(ValueError):
    """A callable draws random numbers, and was called without a key."""


def fold_axes(key: "jax.Array", axes: Iterable[str]) -> "jax.Array":
    """Another random key for each index along these named axes."""
    for axis in axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key
