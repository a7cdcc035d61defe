"""What `torch.jax` is: the functions that PyTorch asks of a device type."""

import contextlib
from typing import Any

import torch

from torch_shard._common.random import GENERATOR


class DeviceModule:
    """What torch asks of a device type. It says that no device is there: that keeps CPU torch as it is."""

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        GENERATOR.seed(seed)

    _initialized = True  # torch.utils.checkpoint then keeps the state of the generator

    def device(self, device: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return GENERATOR.state

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        GENERATOR.state = state

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
