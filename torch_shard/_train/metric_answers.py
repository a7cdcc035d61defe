"""Answers for what scripts of torch do with a loss, and cannot do with the `jax.Array` that a step returns."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import functools
from typing import Any, cast

import jax
import torch

_HAS_STEPPED = (
    "the step that returned this array has made the backward pass and the update. Leave loss.backward() and "
    "optimizer.step() out of the loop."
)
_IS_ARRAY = (
    "metrics are arrays of JAX, still being computed. float(x) waits for the number, ts.torch_view(x) is a tensor."
)
_ANSWERS = {"backward": _HAS_STEPPED, **dict.fromkeys(("cpu", "detach", "numpy"), _IS_ARRAY)}


@functools.cache
def answer_torch_habits(kind: type[Any]) -> None:
    """Let what torch's tensors have, and arrays have not, say what to write; of `hasattr` it is still not there.

    Args:
        kind: The class of JAX's arrays, which is known once there is one.
    """
    for name, answer in _ANSWERS.items():
        if not hasattr(kind, name):
            setattr(kind, name, _missing(name, answer))

    original = torch.amp.GradScaler.scale

    @functools.wraps(original)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if isinstance(outputs, jax.Array):
            raise TypeError(
                f"GradScaler.scale: {_HAS_STEPPED} A scaler has nothing to scale: "
                "make_train_step(..., compute_dtype=torch.bfloat16) needs none."
            )
        return cast(Any, original)(scaler, outputs)

    cast(Any, torch.amp.GradScaler).scale = scale


def _missing(name: str, answer: str) -> property:
    def raise_answer(array: jax.Array) -> None:
        raise AttributeError(f"a jax.Array has no attribute {name!r}: {answer}")

    return property(raise_answer)
