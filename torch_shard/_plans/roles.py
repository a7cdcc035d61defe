"""Which dim of each entry tensor parallelism splits: by what its layer is, where it stands, and what it is called.

Megatron's scheme (Shoeybi et al., 2019): of two products in a row the first is split by its output (a *column* layer),
the second by its input (a *row* layer), so that nothing is sent between them; whole heads on one device; an embedding
by its vocabulary. Whatever the choice, the numbers are the same.
"""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from torch_shard._plans.layers import (
    LORA,
    Product,
    base_of,
    count_heads,
    experts_of,
    is_norm,
    is_table,
    layers_of,
    product_of,
)

Side = Literal["column", "row", "whole"]


def words(text: str) -> frozenset[str]:
    """Names, by spaces."""
    return frozenset(text.split())


COLUMNS = words(
    """
    q k v query key value q_proj k_proj v_proj qkv qkv_proj query_key_value in_proj c_attn Wqkv wq wk wv to_q to_k
    to_v to_kv to_qkv kv_proj q_b_proj kv_b_proj gate_proj g_proj up_proj gate_up_proj fc1 fc_in w1 w3 wi wi_0 wi_1
    lin1 linear1 dense_h_to_4h c_fc intermediate.dense
    """
)
FUSED = words("qkv qkv_proj in_proj c_attn Wqkv to_qkv to_kv kv_proj")
"""Several projections of the whole width in one, one after the other; of `query_key_value` each head has all three."""

ROWS = words(
    """
    o o_proj out_proj wo to_out c_proj down_proj fc2 fc_out w2 lin2 linear2 dense_4h_to_h output.dense
    attention.dense self_attention.dense attn.proj out_lin
    """
)
LOW_RANK = words("q_a_proj kv_a_proj kv_a_proj_with_mqa")
ROUTER = "a router, whose scores all devices need"
ROUTERS = words("gate router")


@dataclass(frozen=True)
class Role:
    """What tensor parallelism does with one entry.

    Attributes:
        dim: The dim that is split; None if it stays whole.
        reason: Why.
        side: Of a product: how it is split.
        heads: Each piece holds so many heads, which are better not cut; 0 if it is not known to hold any.
        pieces: The split dim is so many pieces, of which each device is to have its part: of a fused projection.
        is_vocabulary: The split dim has as many rows as the table of words, and may be padded.
    """

    dim: int | None
    reason: str
    side: Side = "whole"
    heads: int = 0
    pieces: int = 1
    is_vocabulary: bool = False


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by name; adapters have none, for they follow their base layer."""
    layers = [(path, layer) for path, layer in layers_of(model) if LORA not in path]
    most_rows = max((p.shape[0] for _, m in layers if is_table(m) for p in m.parameters()), default=0)
    sides, found = _Sides(model), dict[str, Role]()
    for path, layer in layers:
        held = dict(layer.named_parameters(recurse=False))
        for name, role in _roles(path, layer, held, sides, most_rows):
            by_words = role.dim is not None and held[name].shape[role.dim] == most_rows
            found[f"{path}.{name}" if path else name] = replace(role, is_vocabulary=by_words)
    return found


def _roles(
    path: str, layer: nn.Module, held: Mapping[str, torch.Tensor], sides: "_Sides", most_rows: int
) -> Iterator[tuple[str, Role]]:
    if experts := experts_of(layer):
        yield from _of_experts(layer, experts)
        yield from ((name, Role(None, "one value for each expert")) for name in held if name not in experts)
    elif (product := product_of(layer)) is not None:
        yield from _of_product(path, product, held, sides)
    elif isinstance(layer, nn.MultiheadAttention):
        pieces = {"in_proj_weight": 3, "in_proj_bias": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
        why = f"column: {layer.num_heads} heads"
        for name in held:
            num = pieces.get(name, 0)  # none: the bias of keys and values that are added to all others
            yield name, Role(0, why, "column", layer.num_heads, num) if num else Role(None, "small", "column")
    elif is_table(layer):
        for name, p in held.items():
            is_large = 4 * p.shape[0] >= most_rows
            why = "an embedding, by its vocabulary" if is_large else f"a table of {p.shape[0]} rows"
            yield name, Role(0 if is_large else None, why)
    elif is_norm(layer) or "Router" in type(layer).__name__:
        yield from ((name, Role(None, "a norm" if is_norm(layer) else ROUTER)) for name in held)
    else:
        why = f"no rule of tensor parallelism for {type(layer).__name__}"
        yield from ((name, Role(None, why)) for name in held)


def _of_product(
    path: str, product: Product, held: Mapping[str, torch.Tensor], sides: "_Sides"
) -> Iterator[tuple[str, Role]]:
    side, why = sides.of(path)
    pieces = sides.pieces(path) if side == "column" else 1
    heads = sides.heads(path) // pieces if side != "whole" else 0
    for name, p in held.items():
        if name == "weight":
            dim = {"column": product.out_dim, "row": product.in_dim, "whole": None}[side]
            yield name, Role(dim, why, side, heads, pieces)
        elif side == "column" and p.shape == (product.num_out,):
            yield name, Role(0, f"bias of a {why}", side, heads, pieces)
        else:
            yield name, Role(None, "added once, after the sum" if side == "row" else f"of a {why}", side)


def _of_experts(layer: nn.Module, experts: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Role]]:
    """The inner features of each expert: rows of what leads in, columns of what leads out."""
    leading_out = {name for name in experts if any(word in name for word in ("down", "w2", "out"))}
    transposed = _is_transposed(layer, experts, leading_out)
    for name, p in experts.items():
        leads_out = name in leading_out
        if p.ndim == 3:
            dim = 2 if leads_out != transposed else 1
            yield name, Role(dim, "experts: " + ("a row" if leads_out else "a column") + " layer for each")
        else:
            yield name, Role(None if leads_out or p.ndim < 2 else 1, "experts: a bias for each")


def _is_transposed(layer: nn.Module, experts: Mapping[str, torch.Tensor], leading_out: Collection[str]) -> bool:
    """Whether the matrices of experts are (in, out): of what leads in and what leads out, the outer features agree."""
    shapes = {name: p.shape for name, p in experts.items() if p.ndim == 3}
    into = next((shape for name, shape in shapes.items() if name not in leading_out), None)
    out = next((shape for name, shape in shapes.items() if name in leading_out), None)
    if into is None or out is None or (into[2] == out[1]) == (into[1] == out[2]):
        return bool(getattr(layer, "is_transposed", False))
    return into[1] == out[2]


class _Sides:
    """How each product of a model is split."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._products = {base_of(n): p for n, m in layers_of(model) if LORA not in n and (p := product_of(m))}
        self._turn: dict[str, int] = {}
        for _, group in itertools.groupby(self._products, lambda path: path.rpartition(".")[0]):
            alike = [p for p in group if self._products[p].num_in == self._products[p].num_out]
            self._turn |= {path: number for number, path in enumerate(alike)}
        self._before = dict(itertools.pairwise(reversed(self._products)))
        self._of_input = _at_inputs(self._products)

    def of(self, path: str) -> tuple[Side, str]:
        """The side, and why in the words of a noun phrase."""
        path = base_of(path)
        product = self._products.get(path)
        if product is None:
            return "whole", "layer that is no product"
        words = [word for word in path.split(".") if not word.isdigit()]
        name, pair = ".".join(words[-1:]), ".".join(words[-2:])
        if name in LOW_RANK or name in ROUTERS:
            return "whole", "projection to a low rank" if name in LOW_RANK else ROUTER
        if name in COLUMNS or pair in COLUMNS or product.groups > 1:
            return "column", "column layer"
        if name in ROWS or pair in ROWS:
            return "row", "row layer"
        if path in self._of_input:
            return "whole", "convolution of the input"
        if product.num_out != product.num_in:
            wider = product.num_out > product.num_in
            if not wider and self._ends_stream(path):
                return "whole", "head that narrows, behind a row layer"
            return ("column", "column layer, as it widens") if wider else ("row", "row layer, as it narrows")
        first = self._turn[path] % 2 == 0
        return ("column", "column layer, first of a pair") if first else ("row", "row layer, second of a pair")

    def _ends_stream(self, path: str) -> bool:
        """Whether it reads what a row layer elsewhere gives.

        As a row layer too it would split that by features, and with it the whole stream of the layers before, which
        each of them would have to gather.
        """
        before = self._before.get(path)
        if before is None or self._products[path].is_kernel or _parent(before) == _parent(path):
            return False
        return self._products[before].num_out == self._products[path].num_in and self.of(before)[0] == "row"

    def pieces(self, path: str) -> int:
        """So many projections are in one."""
        product, name = self._products.get(base_of(path)), base_of(path).rpartition(".")[2]
        if product is None or product.groups > 1:
            return 1
        if name == "gate_up_proj":
            return 2 if product.num_out % 2 == 0 else 1
        times = product.num_out // product.num_in if name in FUSED and product.num_out % product.num_in == 0 else 1
        return times if times in (2, 3) else 1

    def heads(self, path: str) -> int:
        """So many heads are in the split dim; 0 if none are known."""
        path = base_of(path)
        product, (parent, _, name) = self._products[path], path.rpartition(".")
        if product.groups > 1:
            return product.groups
        length = product.num_out if self.of(path)[0] == "column" else product.num_in
        return count_heads(self._model.get_submodule(parent), name, product, length)


def _at_inputs(products: Mapping[str, Product]) -> frozenset[str]:
    """Convolutions of what a model is given (pixels, patches, spectra), and one beside it that takes its result.

    A step runs convolutions on rows, with whole kernels. Split by channels, their biases would split the stream behind
    them by features, which each layer would have to gather.
    """
    first, made = dict[str, Product](), set[int]()
    for path, product in products.items():
        if product.is_kernel and product.groups == 1 and product.num_in not in made:
            first[path] = product
        made.add(product.num_out)
    pairs = [pair for pair in itertools.pairwise(products) if pair[0] in first and _parent(pair[0]) == _parent(pair[1])]
    second = [path for before, path in pairs if _takes(products[path], first[before])]
    return frozenset({*first, *second})


def _takes(convolution: Product, before: Product) -> bool:
    """Whether it may be a convolution of what another gives."""
    return convolution.is_kernel and convolution.groups == 1 and convolution.num_in == before.num_out


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
