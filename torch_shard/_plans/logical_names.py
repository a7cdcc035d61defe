"""Logical names of the dims of torch's layers: those that MaxText gives its own."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Collection, Iterator

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
    roles = roles_of(model)
    tables = [(path, m) for path, m in layers_of(model) if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    rows = {m.num_embeddings for path, m in tables if roles[f"{path}.weight" if path else "weight"].dim == 0}
    found: dict[str, Dims] = {}
    for path, layer in layers_of(model):
        if LORA not in path:
            for name, dims in _of_layer(path, layer, roles, rows):
                found[f"{path}.{name}" if path else name] = dims
    return {name: tuple(_as_known(dim, known) for dim in dims) for name, dims in found.items()}


def _held(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters(recurse=False))


def _of_layer(path: str, layer: nn.Module, roles: dict[str, Role], rows: set[int]) -> Iterator[tuple[str, Dims]]:
    prefix = f"{path}." if path else ""
    product = product_of(layer)
    if experts := experts_of(layer):
        yield from _of_experts(experts, {name: roles[prefix + name] for name in experts})
    elif is_table(layer):
        for name in _held(layer):
            is_vocabulary = roles[prefix + name].dim == 0
            yield name, ("vocab", "embed_vocab") if is_vocabulary else (None, "embed")
    elif is_norm(layer):
        yield from ((name, ("norm",)) for name, p in _held(layer).items() if p.ndim == 1)
    elif product is not None and product.groups == 1 and layer.get_parameter("weight").ndim == 2:
        out, summed = _of_product(path, roles[f"{prefix}weight"], product.num_out in rows)
        yield "weight", (out, summed) if product.out_dim == 0 else (summed, out)
        yield from ((name, (out,)) for name, p in _held(layer).items() if p.shape == (product.num_out,))
    elif path.rpartition(".")[2] in ROUTERS or "Router" in type(layer).__name__:
        for name, p in _held(layer).items():
            yield name, _ROUTER if p.ndim == 2 else (None,) * p.ndim


def _of_product(path: str, role: Role, fits_vocabulary: bool) -> tuple[Dim, Dim]:
    """The features of a product, and what it sums over."""
    path = base_of(path)
    parent, _, last = path.rpartition(".")
    if last in _LAST:
        out, summed = _LAST[last]
        return out, summed
    if last in ROUTERS:
        return _ROUTER
    if last in _HEADS or (fits_vocabulary and role.side == "column"):
        return "vocab", "embed_vocab"
    is_attention = role.heads > 0 or "att" in parent.rpartition(".")[2].lower()
    inner: Dim = ("heads", "kv") if is_attention else "mlp"
    return {"column": (inner, "embed"), "row": ("embed", inner), "whole": (None, "embed")}[role.side]


def _of_experts(experts: dict[str, torch.Tensor], roles: dict[str, Role]) -> Iterator[tuple[str, Dims]]:
    """Experts in one tensor, (experts, features, features); biases are named as what they are added to."""
    for name, p in experts.items():
        if p.ndim == 3:
            yield name, ("exp", "mlp_moe", "embed_moe") if roles[name].dim == 1 else ("exp", "embed_moe", "mlp_moe")
        elif p.ndim == 2:
            yield name, ("exp", "activation_embed" if roles[name].dim is None else "activation_mlp")


def _as_known(dim: Dim, known: Collection[str]) -> Dim:
    if isinstance(dim, tuple):
        return tuple(str(_as_known(name, known)) for name in dim)
    return OLDER[dim] if dim in OLDER and dim not in known else dim
