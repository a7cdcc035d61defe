"""Keys and values of the tokens so far, as tensors of a fixed length that go into a decoder and come out of it.

Shapes: B rows, H heads of keys, L slots of the cache, D size of a head, T tokens of this call.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_shard._common.caller import caller


@functools.cache
def _layer_class() -> Any:
    """The class of a layer of the cache; transformers is imported when there is a model of it."""
    from transformers.cache_utils import StaticLayer

    class Slots(StaticLayer):
        """A cache layer whose update makes new tensors, and writes to none that it was given."""

        def __init__(self, num_slots: int, filled: torch.Tensor | int) -> None:
            super().__init__(num_slots)
            self.filled, self.keys, self.values = filled, None, None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            pairs = ((self.keys, key_states), (self.values, value_states))
            self.keys, self.values = (self._written(*pair) for pair in pairs)
            self.is_initialized = True
            return self.keys, self.values

        def _written(self, slots_BHLD: torch.Tensor | None, new_BHTD: torch.Tensor) -> torch.Tensor:
            if slots_BHLD is None:
                return torch.nn.functional.pad(new_BHTD, (0, 0, 0, self.max_cache_len - new_BHTD.shape[2]))
            at = torch.arange(new_BHTD.shape[2]) + self.filled
            return slots_BHLD.index_copy(2, at, new_BHTD)

        def get_seq_length(self) -> Any:  # the number, or in the loop a tensor
            return self.filled

    return Slots


def empty_cache(num_layers: int, num_slots: int) -> Any:
    """A cache of transformers for a first call: the first tokens go into its first slots.

    Layers with a sliding window have all slots, too: the mask says which count.
    """
    from transformers.cache_utils import Cache

    return Cache(layers=[_layer_class()(num_slots, 0) for _ in range(num_layers)])


def filled_cache(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], filled: torch.Tensor) -> Any:
    """A cache with these tensors, each (B, H, L, D), of which the first `filled` slots are in use."""
    from transformers.cache_utils import Cache

    layers: list[Any] = []
    for key, value in zip(keys, values, strict=True):
        layer = _layer_class()(key.shape[2], filled)
        layer.keys, layer.values, layer.is_initialized = key, value, True
        layers.append(layer)
    return Cache(layers=layers)


def contents(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of all layers."""
    if missing := [str(number) for number, layer in enumerate(cache.layers) if layer.keys is None]:
        raise NotImplementedError(
            f"{caller()}: layer {', '.join(missing)} of the model keeps no keys and values in the cache. Decoders "
            "whose layers all have their own attention are generated from; use model.generate for this one."
        )
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
