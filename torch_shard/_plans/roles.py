"""What a layer is (a product, a table, experts, a norm), and which dim of its entries tensor parallelism splits.

Megatron's scheme (Shoeybi et al., 2019): of two products in a row the first is split by its output (a *column* layer),
the second by its input (a *row* layer), so that nothing is sent between them; whole heads on one device; an embedding
by its vocabulary. Whatever the choice, the numbers are the same.
"""

# PyTorch annotates some of its functions in part; attributes of users' modules are anything.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_VECTORS = {"query_key_value": 3}
"""Of each head, where a projection gives more than one."""
_OF_OTHER_WIDTHS = ("q_b_proj", "kv_b_proj")
"""Projections whose heads have not the width that the module says."""
LORA = ".lora_"


@dataclass(frozen=True)
class Product:
    """A layer that multiplies by its weight.

    Attributes:
        out_dim: The dim of the weight that is summed over by nothing: that of the output.
        in_dim: The dim of the weight that is summed over.
        num_out: Features, or channels, of the output.
        num_in: Of the input.
        groups: Of a convolution; 1 else.
        is_kernel: Whether it is a convolution.
    """

    out_dim: int
    in_dim: int
    num_out: int
    num_in: int
    groups: int = 1
    is_kernel: bool = False


def product_of(layer: nn.Module) -> Product | None:
    """What a layer multiplies, if it is a product."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return None
    if isinstance(layer, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        out_dim = 1 if layer.transposed else 0
        return Product(out_dim, 1 - out_dim, layer.out_channels, layer.in_channels, layer.groups, is_kernel=True)
    if weight.ndim != 2 or is_table(layer):
        return None
    if type(layer).__name__ == "Conv1D":  # of transformers: a Linear with its weight the other way
        return Product(1, 0, weight.shape[1], weight.shape[0])
    if hasattr(layer, "out_features"):
        return Product(0, 1, weight.shape[0], weight.shape[1])
    return None


def kernels_of(model: nn.Module) -> frozenset[int]:
    """The weights of its convolutions, by id: a recipe splits their channels alone, for a kernel is used whole."""
    convolutions = (layer for layer in model.modules() if isinstance(layer, nn.modules.conv._ConvNd))  # pyright: ignore[reportPrivateUsage]
    return frozenset(id(layer.weight) for layer in convolutions)


def tables_of(model: nn.Module) -> frozenset[int]:
    """The weights in which it looks rows up by number, by id."""
    return frozenset(id(layer.weight) for layer in model.modules() if is_table(layer))


def is_table(layer: nn.Module) -> bool:
    """Whether it looks rows up by number."""
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag)


def is_norm(layer: nn.Module) -> bool:
    """Whether it scales what it normalises."""
    return "Norm" in type(layer).__name__


def experts_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that hold all experts of a layer along their first dim, if it has any."""
    parameters = dict(layer.named_parameters(recurse=False))
    matrices = [p for p in parameters.values() if p.ndim == 3]
    if not matrices:
        return {}
    num_experts = matrices[0].shape[0]
    said = getattr(layer, "num_experts", None) or getattr(layer, "n_experts", None)
    if "expert" not in type(layer).__name__.lower() and said != num_experts:
        return {}
    return {name: p for name, p in parameters.items() if p.shape[:1] == (num_experts,)}


def count_heads(parent: nn.Module, name: str, product: Product, length: int) -> int:
    """How many heads so many features of a projection are, where the module that it stands in has some; 0 if not."""
    count = _number_in(parent, HEAD_COUNTS)
    if name in _OF_OTHER_WIDTHS:
        return count if count and length % count == 0 else 0

    # With grouped queries (GQA) keys and values have fewer heads than the module says: the width of a head tells.
    width = _number_in(parent, HEAD_WIDTHS)
    narrow = min(product.num_in, product.num_out)
    if not width and count and narrow % count == 0:
        width = narrow // count
    width *= _VECTORS.get(name, 1)
    return length // width if width and length % width == 0 else 0


def _number_in(module: nn.Module, names: Sequence[str]) -> int:
    """The first of these attributes that is a positive number; 0 if none is."""
    for name in names:
        number = getattr(module, name, None)
        if isinstance(number, int) and number > 0:
            return number
    return 0


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold parameters themselves, by name, in the order of their declaration."""
    for path, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield path, layer


def base_of(path: str) -> str:
    """The name that a layer has without the wrappers of adapters around it (`q_proj.base_layer`, `q_proj.lora_A.x`)."""
    return path.split(LORA)[0].removesuffix(".base_layer")


def parent_of(path: str) -> str:
    """The name of the module around another."""
    return path.rpartition(".")[0]


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
    reader = _Reader(model)
    roles = dict[str, Role]()
    for path, layer in layers_of(model):
        if LORA in path:
            continue
        for name, p in layer.named_parameters(recurse=False):
            role = reader.role(path, layer, name, p)
            by_words = role.dim is not None and p.shape[role.dim] == reader.most_rows
            roles[f"{path}.{name}" if path else name] = replace(role, is_vocabulary=by_words)
    return roles


def _of_experts(layer: nn.Module, experts: Mapping[str, torch.Tensor], name: str) -> Role:
    """The inner features of each expert: rows of what leads in, columns of what leads out."""
    leading_out = {name for name in experts if any(word in name for word in ("down", "w2", "out"))}
    leads_out = name in leading_out
    ndim = experts[name].ndim
    if ndim != 3:
        return Role(None if leads_out or ndim < 2 else 1, "experts: a bias for each")
    # (experts, out, in), or transposed: the inner features are the outputs of what leads in.
    is_last = leads_out != _is_transposed(layer, experts, leading_out)
    return Role(2 if is_last else 1, f"experts: a {'row' if leads_out else 'column'} layer for each")


def _is_transposed(layer: nn.Module, experts: Mapping[str, torch.Tensor], leading_out: Collection[str]) -> bool:
    """Whether the matrices of experts are (in, out): of what leads in and what leads out, the outer features agree."""
    shapes = {name: p.shape for name, p in experts.items() if p.ndim == 3}
    into = next((shape for name, shape in shapes.items() if name not in leading_out), None)
    out = next((shape for name, shape in shapes.items() if name in leading_out), None)
    if into is None or out is None or (into[2] == out[1]) == (into[1] == out[2]):
        return bool(getattr(layer, "is_transposed", False))
    return into[1] == out[2]


def _of_attention(layer: nn.MultiheadAttention, name: str) -> Role:
    if name == "in_proj_weight" or name == "in_proj_bias":
        pieces = 3  # queries, keys and values, one after the other
    elif name.endswith("_proj_weight"):
        pieces = 1
    else:  # the bias of keys and values that are added to all others
        return Role(None, "small", "column")
    return Role(0, f"column: {layer.num_heads} heads", "column", layer.num_heads, pieces)


class _Reader:
    """How each parameter of a model is split, by the products around it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.most_rows = 0
        self._products = dict[str, Product]()
        for path, layer in layers_of(model):
            if is_table(layer):
                self.most_rows = max(self.most_rows, *(p.shape[0] for p in layer.parameters()))
            product = product_of(layer) if LORA not in path else None
            if product is not None:
                self._products[base_of(path)] = product

        # Of products that are as wide as they are long, in one module, each second one is a row layer.
        self._turn: dict[str, int] = {}
        for _, siblings in itertools.groupby(self._products, parent_of):
            square = [path for path in siblings if self._products[path].num_in == self._products[path].num_out]
            for number, path in enumerate(square):
                self._turn[path] = number
        self._before = dict(itertools.pairwise(reversed(self._products)))
        self._of_input = _at_inputs(self._products)

    def role(self, path: str, layer: nn.Module, name: str, p: torch.Tensor) -> Role:
        """What a parameter is in its layer."""
        experts = experts_of(layer)
        if experts:
            return _of_experts(layer, experts, name) if name in experts else Role(None, "one value for each expert")
        if product_of(layer) is not None:
            return self._of_product(base_of(path), name, p)
        if isinstance(layer, nn.MultiheadAttention):
            return _of_attention(layer, name)
        if is_table(layer):
            # Small tables (positions, kinds of tokens) cost nothing whole.
            is_large = 4 * p.shape[0] >= self.most_rows
            return (
                Role(0, "an embedding, by its vocabulary") if is_large else Role(None, f"a table of {p.shape[0]} rows")
            )
        if is_norm(layer):
            return Role(None, "a norm")
        if "Router" in type(layer).__name__:
            return Role(None, ROUTER)
        return Role(None, f"no rule of tensor parallelism for {type(layer).__name__}")

    def _of_product(self, path: str, name: str, p: torch.Tensor) -> Role:
        side, why = self._side(path)
        product = self._products[path]
        pieces = self._pieces(path) if side == "column" else 1
        heads = self._heads(path, side) // pieces if side != "whole" else 0
        if name == "weight":
            dim = {"column": product.out_dim, "row": product.in_dim, "whole": None}[side]
            return Role(dim, why, side, heads, pieces)
        if side == "column" and p.shape == (product.num_out,):
            return Role(0, f"bias of a {why}", side, heads, pieces)
        # Each device has a part of the sum of a row layer; a bias on all of them would be added as often.
        return Role(None, "added once, after the sum" if side == "row" else f"of a {why}", side)

    def _side(self, path: str) -> tuple[Side, str]:
        """How a product is split, and why in the words of a noun phrase."""
        product = self._products[path]
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
        if before is None or self._products[path].is_kernel or parent_of(before) == parent_of(path):
            return False
        return self._products[before].num_out == self._products[path].num_in and self._side(before)[0] == "row"

    def _pieces(self, path: str) -> int:
        """So many projections are in one."""
        product = self._products[path]
        name = path.rpartition(".")[2]
        if name == "gate_up_proj":
            return 2 if product.num_out % 2 == 0 else 1
        if name not in FUSED or product.groups > 1 or product.num_out % product.num_in:
            return 1
        times = product.num_out // product.num_in
        return times if times in (2, 3) else 1

    def _heads(self, path: str, side: Side) -> int:
        """So many heads are in the split dim; 0 if none are known."""
        product, (parent, _, name) = self._products[path], path.rpartition(".")
        if product.groups > 1:
            return product.groups
        length = product.num_out if side == "column" else product.num_in
        owner = nn.Module.get_submodule(self._model, parent)  # which a scripted module refuses
        return count_heads(owner, name, product, length)


def _at_inputs(products: Mapping[str, Product]) -> set[str]:
    """Convolutions of what a model is given (pixels, patches, spectra), and one beside it that takes its result.

    A step runs convolutions on rows, with whole kernels. Split by channels, their biases would split the stream behind
    them by features, which each layer would have to gather.
    """
    first, second = set[str](), set[str]()
    widths_before = set[int]()  # of all products so far: what has another width comes from outside
    before = ""
    for path, product in products.items():
        if product.is_kernel and product.groups == 1:
            is_behind_first = before in first and parent_of(before) == parent_of(path)
            if product.num_in not in widths_before:
                first.add(path)
            elif is_behind_first and product.num_in == products[before].num_out:
                second.add(path)
        widths_before.add(product.num_out)
        before = path
    return first | second
