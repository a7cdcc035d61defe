"""Names of torchax's modes. The jax device needs none, so they change nothing; programs written for torchax run on."""

import contextlib


def enable_globally() -> None:
    """Accepted for programs written for torchax: tensors on the jax device always work."""


def disable_globally() -> None:
    """Accepted for programs written for torchax; see `enable_globally`."""


def jax_device() -> contextlib.AbstractContextManager[None]:
    """A scope for eager work on jax-device tensors, which needs none; see `enable_globally`."""
    return contextlib.nullcontext()
