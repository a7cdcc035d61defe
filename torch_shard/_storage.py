"""What tensors on the jax device share when they alias each other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Storage:
    """What tensors that alias each other share: an array, or a way to read and write a part of another storage."""

    def __init__(self, value: Any) -> None:
        self.value = value  # a jax.Array, or a ShapeDtypeStruct before the first write
        self.shape, self.dtype = tuple(value.shape), value.dtype

    @property
    def is_written(self) -> bool:
        """Whether there are values yet."""
        return isinstance(self.value, jax.Array)

    def read(self) -> jax.Array:
        if isinstance(self.value, jax.ShapeDtypeStruct):
            self.value = jnp.zeros(self.shape, self.dtype)
        return self.value

    def write(self, value: jax.Array) -> None:
        value = jnp.asarray(value, self.dtype)
        self.value = value if value.shape == self.shape else jnp.broadcast_to(value, self.shape)


class ViewStorage(Storage):
    """A view: reads through the view operator; writes to the elements of the base that the operator selects."""

    def __init__(self, base: Storage, view: Callable[[Any], Any]) -> None:
        self.base, self.view = base, view
        self.dtype = base.dtype
        self.shape = tuple(jax.eval_shape(view, jax.ShapeDtypeStruct(base.shape, base.dtype)).shape)

    @property
    def is_written(self) -> bool:
        return self.base.is_written

    def read(self) -> jax.Array:
        return self.view(self.base.read())

    def write(self, value: jax.Array) -> None:
        places = self.view(jnp.arange(int(np.prod(self.base.shape))).reshape(self.base.shape))
        value = jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape)
        flat = self.base.read().reshape(-1).at[places.reshape(-1)].set(value.reshape(-1))
        self.base.write(flat.reshape(self.base.shape))
