"""Mamba-2's mixer with the parts of its fused projection apart: gate, values, B and C, and steps.

The library makes one product and cuts it into parts of four sizes, which no split of its rows over devices lines up
with: XLA would send parts of it about, forward and backward. Of rows of one weight there is a product for each part,
and each is split by its own heads. The convolution is by channel, so that its parts are apart too.

Shapes: B batch, T steps, D model.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_shard._common.overrides import digest_of, instead_of_attribute
from torch_shard._lowering.ops.experts import is_hooked

_CALLED = {
    "causal_conv1d_fn": "f932149b",
    "apply_mask_to_padding_states": "ac70fe11",
    "mamba2_chunk_scan": "8f419870",
}
"""Functions of the library that the mixer calls, and the digests of their sources."""

_LINEAR = nn.Linear.forward


@instead_of_attribute("transformers.models.mamba2.modeling_mamba2.Mamba2Mixer", "forward", "3506f116")
def mixer(
    original: Callable[..., Any],
    mixer: Any,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The same in training and evaluation, where all that is called is, to the letter, what was read here."""
    library = getattr(inspect.unwrap(original), "__globals__", {})
    if cache is not None or not _is_known(original, mixer, library):
        return original(mixer, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
    convolve, masked, scan = (library[name] for name in _CALLED)
    inner, state = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    channels, batch_and_length = [inner, 2 * state], hidden_states.shape[:2]

    x_BTD = masked(hidden_states, attention_mask)
    rows = [inner, *channels, mixer.num_heads]
    gate, *convolved, dt = (F.linear(x_BTD, *part) for part in _parts(mixer.in_proj, rows))
    taps = _parts(mixer.conv1d, channels)
    values, keys = (
        masked(convolve(x.mT, weight.squeeze(1), bias, activation=mixer.activation, **kwargs).mT, attention_mask)
        for x, (weight, bias) in zip(convolved, taps, strict=True)
    )
    B, C = (x.view(*batch_and_length, mixer.n_groups, -1) for x in keys.split([state, state], -1))
    out = scan(
        values.reshape(*batch_and_length, mixer.num_heads, mixer.head_dim),
        dt,
        -torch.exp(mixer.A_log.float()),
        B,
        C,
        chunk_size=mixer.chunk_size,
        D=mixer.D,
        dt_bias=mixer.dt_bias,
        dt_softplus=True,
        **kwargs | {"dt_limit": mixer.time_step_limit},
    )
    return mixer.out_proj(mixer.norm(out.reshape(*batch_and_length, -1), gate).to(hidden_states.dtype))


def _parts(layer: Any, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias of each part of what a layer gives."""
    biases = [None] * len(sizes) if layer.bias is None else layer.bias.split(sizes)
    return list(zip(layer.weight.split(sizes), biases, strict=True))


def _is_known(original: Any, mixer: Any, library: dict[str, Any]) -> bool:
    """Tell whether nobody would notice that the projection is not called as a module."""
    projection = mixer.in_proj
    return (
        digest_of(getattr(inspect.unwrap(original), "__code__", None)) == "c215be34"
        and all(digest_of(inspect.unwrap(library[name]).__code__) == digest for name, digest in _CALLED.items())
        and type(projection) is nn.Linear
        and nn.Linear.forward is _LINEAR  # else a plan may split what modules of this class give
        and not (is_hooked(projection) or "forward" in vars(projection) or hasattr(projection, "_hf_hook"))
    )
