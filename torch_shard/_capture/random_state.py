"""The state of torch's random numbers within a capture: a position in the stream of the program."""

import dataclasses

import torch

from torch_shard._capture.data_dependence import num_draws, skip_draws
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.overrides import instead_of_attribute


@dataclasses.dataclass(frozen=True)
class RandomState:
    """Result of `torch.get_rng_state` in a capture: a position in the stream of random numbers."""

    position: int


@instead_of_attribute(torch, "get_rng_state")
def get_rng_state() -> RandomState:
    """The position of the capture under way."""
    return RandomState(num_draws())


@instead_of_attribute(torch, "set_rng_state")
def set_rng_state(state: object) -> None:
    """Go back to a position, so that what is computed again draws the same numbers."""
    if not isinstance(state, RandomState):
        raise NotImplementedError(
            f"{current_user_line()}\nHere torch.set_rng_state is given a state from outside of the captured function, "
            "whose stream JAX cannot follow. Take it with torch.get_rng_state within the function."
        )
    skip_draws(state.position - num_draws())


@instead_of_attribute(torch, "manual_seed")
@instead_of_attribute(torch, "seed")
def refuse_seed(*args: object, **kwargs: object) -> object:
    """`torch.manual_seed` and `torch.seed` in a capture."""
    raise NotImplementedError(
        f"{current_user_line()}\nHere torch is seeded within a captured function. The random numbers of a compiled "
        "program come from its own key (step.init(seed=...), or torch.manual_seed before an adapter is called); to "
        "draw the same numbers twice, use torch.get_rng_state and torch.set_rng_state within the function."
    )
