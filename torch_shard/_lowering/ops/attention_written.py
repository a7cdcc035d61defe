"""Attention that Hugging Face's models write out, as `scaled_dot_product_attention` has no soft caps and no sinks.

Gemma 2 bends all scores by `cap * tanh(scores / cap)`; gpt-oss gives each head a sink. Their functions are replaced
where their source is, to the letter, one that was read here, and where the mask is a known constant; the weights that
they return besides are computed as they say, and only where somebody uses them.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_shard._capture import Seen, annotated, as_captured, autocast_only, seen_through
from torch_shard._common.overrides import digest_of, instead_of_attribute, is_transformed
from torch_shard._lowering.ops.attention import WHY, Form, as_autocast_has_it, attend, refusal
from torch_shard._lowering.ops.context import gathered

_KNOWN = {"587d5b52": "soft cap", "3cb759e1": "sinks"}
"""By the first digits of the SHA-256 of their source: that of Gemma 2 and ten models more, and that of gpt-oss."""

_NOT_CONSTANT = (
    "it is written out, with a soft cap or sinks, and its mask is no constant triangle or window, but depends on the "
    "batch. Without padding, and with padding on the right that the loss leaves out, leave attention_mask away"
)

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@instead_of_attribute("transformers.utils.generic.GeneralInterface", "get")
def interface_get(interface: Any, name: str, default: Any = None) -> Any:
    """HF's table of implementations; where the model's own function is taken, ours for those that are known."""
    found = Mapping.get(interface, name, default)
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if found is not default or not isinstance(interface, getattr(modeling, "AttentionInterface", ())):
        return found
    kind = _KNOWN.get(digest_of(getattr(found, "__code__", None)))
    return found if kind is None else functools.partial(_attend, found, kind)


def _attend(
    written: Attend,
    kind: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the function of this source returns: the output (B, T, N, D), and the weights."""
    q, k, v = map(as_autocast_has_it, (query, key, value))
    cap = settings.get("softcap") if kind == "soft cap" else None
    sinks = (torch.clone(module.sinks),) if kind == "sinks" else ()  # as precision has them
    with autocast_only():
        why = _why_not(module, (q, k, v), sinks, {**settings, "cap": cap})
        mask = None if attention_mask is None else as_captured(attention_mask)  # also where a layer is captured alone
        seen = None if why else _seen(mask, (q.shape[2], k.shape[2]))
        why = why or ("" if seen else _NOT_CONSTANT)
    with annotated(**{WHY: why}):
        out, weights = written(module, *gathered(query, key, value), attention_mask, **settings)
    if seen is None:
        return out, weights
    scale = settings.get("scaling")
    scale = module.head_dim**-0.5 if scale is None else scale
    with autocast_only():
        ours = attend(Form(seen, scale, cap=cap or 0.0), (q, k, v), sinks=sinks)
    return ours.transpose(1, 2).contiguous(), weights


def _why_not(
    module: Any, qkv: tuple[torch.Tensor, ...], sinks: tuple[torch.Tensor, ...], options: Mapping[str, Any]
) -> str:
    """Say why our form would not mean the same, or would not pay; empty if it does."""
    q, k, _ = qkv
    dropout, cap, scale = (options.get(name) for name in ("dropout", "cap", "scaling"))
    if dropout and module.training:
        return (
            f"it drops weights (dropout={dropout:g}) and is written out, with a soft cap or sinks. Set its "
            "attention_dropout to 0"
        )
    if why := refusal(*qkv, grouped=True):
        return why
    is_number = isinstance(scale, float | int | None) and (cap is None or (isinstance(cap, float | int) and cap > 0))
    is_sink = all(sink.shape == q.shape[1:2] and sink.is_floating_point() for sink in sinks)
    if is_number and is_sink and k.shape[1] * module.num_key_value_groups == q.shape[1] and not is_transformed(sinks):
        return ""
    return "its soft cap, its sinks or its heads are not as kernels take them"


def _seen(mask: torch.Tensor | None, size: tuple[int, int]) -> Seen | None:
    """What is seen through a mask that is added."""
    if mask is None:
        return Seen()
    return seen_through(mask, size) if mask.is_floating_point() else None
