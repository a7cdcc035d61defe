"""What a layer is: a product, a table, experts in one tensor, a norm; and how many heads its features are."""

# PyTorch annotates some of its functions in part; attributes of users' modules are anything.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    if isinstance(layer, nn.Linear) or hasattr(layer, "out_features"):
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
    held = dict(layer.named_parameters(recurse=False))
    num = getattr(layer, "num_experts", None) or getattr(layer, "n_experts", None)
    matrices = [p for p in held.values() if p.ndim == 3]
    is_experts = bool(matrices) and ("expert" in type(layer).__name__.lower() or num == matrices[0].shape[0])
    return {n: p for n, p in held.items() if p.shape[0] == matrices[0].shape[0]} if is_experts else {}


def count_heads(parent: nn.Module, name: str, product: Product, length: int) -> int:
    """How many heads so many features of a projection are, where the module that it stands in has some; 0 if not."""
    count = _number_in(parent, HEAD_COUNTS)
    if name in _OF_OTHER_WIDTHS:
        return count if count and length % count == 0 else 0
    width, narrow = _number_in(parent, HEAD_WIDTHS), min(product.num_in, product.num_out)
    if not width and count and narrow % count == 0:
        width = narrow // count
    width *= _VECTORS.get(name, 1)
    return length // width if width and length % width == 0 else 0


def _number_in(module: nn.Module, names: Sequence[str]) -> int:
    """The first of these attributes that is a positive number; 0 if none is."""
    held = (getattr(module, name, None) for name in names)
    return next((number for number in held if isinstance(number, int) and number > 0), 0)


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
