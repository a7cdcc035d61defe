"""Logical names of the dims of torch's layers: those that MaxText gives its own."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Collection

import torch
from torch import nn

from torch_shard._plans.layers import LORA, base_of, experts_of, is_norm, is_table, layers_of, product_of
from torch_shard._plans.logical_rules import Dim
from torch_shard._plans.roles import ROUTERS, Role, roles_of

Dims = tuple[Dim, ...]

OLDER = {"embed_vocab": "embed", "embed_moe": "embed", "mlp_moe": "mlp", "q_heads": "heads", "kv_heads": "heads"}
"""What a dim was called before it had a name of its own: counts where rules do not know that."""

_LAST = {
    **dict.fromkeys(("q_a_proj",), ("q_lora_up_proj", "embed")),
    **dict.fromkeys(("kv_a_proj_with_mqa", "kv_a_proj"), ("kv_lora_up_proj", "embed")),
    **dict.fromkeys(("q_b_proj",), (("q_heads", "kv"), "q_lora")),
    **dict.fromkeys(("kv_b_proj",), (("kv_heads", "kv_head_dim"), "kv_lora")),
    **dict.fromkeys(("q", "q_proj", "wq", "query", "q_lin", "to_q"), (("q_heads", "kv"), "embed")),
    **dict.fromkeys(("k", "k_proj", "wk", "key", "k_lin", "to_k"), (("kv_heads", "kv_head_dim"), "embed")),
    **dict.fromkeys(("v", "v_proj", "wv", "value", "v_lin", "to_v"), (("kv_heads", "kv_head_dim"), "embed")),
    **dict.fromkeys(("qkv", "qkv_proj", "c_attn", "query_key_value"), (("qkv", "heads", "kv"), "embed")),
}
"""Of projections by name: their features, and what they sum over."""

_ROUTER: tuple[Dim, Dim] = (None, "embed_moe")
"""Of what chooses experts: a score for each, and what it sums over."""

_HEADS = ("lm_head", "embed_out", "output_projection")
"""Of layers that give a score to each token; others are known by having as many features as there are tokens."""


def logical_names(model: nn.Module, known: Collection[str]) -> dict[str, Dims]:
    """The names of the dims of each parameter whose layer is known, by name."""
    roles, found = roles_of(model), dict[str, Dims]()
    for path, layer in layers_of(model):
        for own, p in layer.named_parameters(recurse=False) if LORA not in path else ():
            name = f"{path}.{own}" if path else own
            if (dims := _dims_of(path, layer, p, roles[name], is_expert=own in experts_of(layer))) is not None:
                found[name] = tuple(_as_known(dim, known) for dim in dims)
    return found


def _dims_of(path: str, layer: nn.Module, p: torch.Tensor, role: Role, *, is_expert: bool) -> Dims | None:
    """The names of the dims of a parameter; biases are named as what they are added to."""
    product = product_of(layer)
    if is_expert and p.ndim == 3:  # (experts, features, features)
        return ("exp", "mlp_moe", "embed_moe") if role.dim == 1 else ("exp", "embed_moe", "mlp_moe")
    if is_expert:
        return ("exp", "activation_embed" if role.dim is None else "activation_mlp") if p.ndim == 2 else None
    if is_table(layer):
        return ("vocab", "embed_vocab") if role.dim == 0 else (None, "embed")
    if is_norm(layer):
        return ("norm",) if p.ndim == 1 else None
    if product is not None and not product.is_kernel:
        out, summed = _of_product(path, role)
        if p.ndim == 2:
            return (out, summed) if product.out_dim == 0 else (summed, out)
        return (out,) if p.shape == (product.num_out,) else None
    if path.rpartition(".")[2] in ROUTERS or "Router" in type(layer).__name__:
        return _ROUTER if p.ndim == 2 else (None,) * p.ndim
    return None


def _of_product(path: str, role: Role) -> tuple[Dim, Dim]:
    """The features of a product, and what it sums over."""
    parent, _, last = base_of(path).rpartition(".")
    if last in _LAST:
        out, summed = _LAST[last]
        return out, summed
    if last in ROUTERS:
        return _ROUTER
    if last in _HEADS or (role.is_vocabulary and role.side == "column"):
        return "vocab", "embed_vocab"
    is_attention = role.heads > 0 or "att" in parent.rpartition(".")[2].lower()
    inner: Dim = ("heads", "kv") if is_attention else "mlp"
    return {"column": (inner, "embed"), "row": ("embed", inner), "whole": (None, "embed")}[role.side]


def _as_known(dim: Dim, known: Collection[str]) -> Dim:
    if isinstance(dim, tuple):
        return tuple(str(_as_known(name, known)) for name in dim)
    return OLDER[dim] if dim in OLDER and dim not in known else dim
