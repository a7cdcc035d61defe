"""The experts of Llama 4: each on the tokens that chose it.

Its model gives every expert every token, times a score that is zero but for the chosen ones: 16 or 128 times the
arithmetic. Of zeros its experts, which have no biases, make zeros without gradients, so that the chosen are all that
counts. A score multiplies what an expert is given, and not what it gives: each choice is a token of its own here.

Shapes: T tokens, K choices of each, D model.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_shard._common.overrides import digest_of, instead_of_attribute
from torch_shard._lowering.ops.experts import NAMES, apply_experts, fits, is_hooked

_MODEL, _ROUTER, _EXPERTS = "transformers.models.llama4.modeling_llama4", "1f606d05", "05556746"


@instead_of_attribute(f"{_MODEL}.Llama4TextMoe", "forward", "558256dc")
def mixture(original: Callable[..., Any], moe: Any, hidden_states: torch.Tensor) -> Any:
    """The same, where router and experts are, to the letter, those that were read here."""
    x_TD = hidden_states.reshape(-1, moe.hidden_dim)
    if not _is_known(moe, x_TD):
        return original(moe, hidden_states)
    scores, logits = moe.router(x_TD)
    chosen_TK = logits.topk(moe.top_k, dim=1).indices  # as the router has them
    given = (x_TD[:, None] * scores.gather(1, chosen_TK)[..., None]).flatten(0, 1)
    out_TD = moe.shared_expert(x_TD)
    out_TD.add_(moe.experts(given, chosen_TK.reshape(-1, 1)).unflatten(0, chosen_TK.shape).sum(1))
    return out_TD, logits


@instead_of_attribute(f"{_MODEL}.Llama4TextExperts", "forward", _EXPERTS)
def experts(original: Callable[..., Any], module: Any, x: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
    """Of rows with their experts; of rows in the order of all experts, as others give them, as it is."""
    if ids is None:
        return original(module, x)
    about = NAMES[type(module.act_fn).__name__], (), False, True
    return apply_experts(about, (x, ids, torch.ones_like(ids, dtype=x.dtype)), [module.gate_up_proj, module.down_proj])


def _is_known(moe: Any, x_TD: torch.Tensor) -> bool:
    module, router = moe.experts, moe.router
    sources = [inspect.unwrap(type(each).forward) for each in (router, module)]
    return (
        [digest_of(getattr(source, "__code__", None)) for source in sources] == [_ROUTER, _EXPERTS]
        and type(module.act_fn).__name__ in NAMES
        and not any(is_hooked(each) or "forward" in vars(each) for each in (router, module, module.act_fn))
        and fits(x_TD, [module.gate_up_proj, module.down_proj], transposed=True)
    )
