"""Sequence parallelism: where a transformer's residual stream is split along its sequence, and where it is whole.

Between products the stream, (batch, sequence, features), is split over the axis of tensor parallelism by its sequence;
what enters a column layer is gathered, what leaves a row layer scattered (Korthikanti et al., 2022).
"""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import contextlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from jax.sharding import PartitionSpec
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.specs import axes_of
from torch_shard._plans.decisions import Axes, Decision, names_of, places_with_globs
from torch_shard._plans.roles import experts_of, is_norm, is_table, layers_of, parent_of, product_of, roles_of
from torch_shard._sharding import Padded

_OF_IMAGES = (nn.Conv2d, nn.Conv3d)


def sequence_constraints(
    model: nn.Module, decisions: Mapping[str, Decision], *, batch: Axes | None, tp: Axes
) -> dict[str, PartitionSpec]:
    """Constraints on what the layers of a transformer take and return, by name.

    Args:
        model: With repeated layers in a `ModuleList`, each with norms of its own.
        decisions: How each entry is split.
        batch: The axis of the batch.
        tp: The axis of features, and of the sequence between layers.
    """
    blocks = dict(_blocks(model))
    if not blocks:
        raise ValueError(
            f"{caller()}: sequence=True, and {type(model).__name__} has no ModuleList of layers with norms in "
            "them that take (batch, sequence, features). Leave sequence=True out, or say where the sequence is split "
            "yourself: ShardingPlan(..., activations=...)."
        )
    split, whole, inner = (PartitionSpec(batch, *parts) for parts in ((tp, None), (None, None), (None, tp)))
    sharded = {
        name.removesuffix(".weight") for name, made in decisions.items() if set(names_of(tp)) <= set(axes_of(made.spec))
    }
    found: dict[str, PartitionSpec] = {}
    for places, spec in zip(_places(model, blocks, sharded), (split, whole, inner), strict=True):
        found |= dict.fromkeys(places, spec)
    padded = [name.removesuffix(".weight") for name, made in decisions.items() if isinstance(made.form, Padded)]
    found = {place: spec for place, spec in found.items() if place not in padded or spec != inner}  # has torch's words
    return places_with_globs(found, model)


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The repeated layers that have norms, by name; not those that convolve images, nor what consists of these."""
    members = {
        f"{path}.{number}" if path else str(number): block
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for number, block in enumerate(module)
    }
    images = [path for path, block in members.items() if any(isinstance(c, _OF_IMAGES) for c in block.children())]
    for path, block in members.items():
        if any(f"{image}.".startswith(f"{path}.") for image in images):
            continue
        # parts of layers have norms too, as those of BERT
        if any(is_norm(part) for child in block.children() for part in (child, *child.children())):
            yield path, block


def _places(
    model: nn.Module, blocks: Mapping[str, nn.Module], sharded: Collection[str]
) -> tuple[list[str], list[str], list[str]]:
    """Where the stream is split along its sequence, where layers need all of it, and where features are split.

    Places are names of modules, and of arguments of their `forward`.
    """
    layers, roles = dict(layers_of(model)), roles_of(model)
    moe = [parent_of(path) for path, layer in layers.items() if experts_of(layer)]
    attention = [path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    others = [*moe, *attention]  # to experts tokens come in one row
    sides = {path: roles[f"{path}.weight"].side for path in layers if f"{path}.weight" in roles and path in sharded}
    within = {path: side for path, side in sides.items() if _is_in(path, blocks) and not _is_in(path, others)}
    rows, columns = ([path for path, side in within.items() if side == asked] for asked in ("row", "column"))
    vocabularies = _vocabularies(model)
    num_words = {p.shape[0] for path in vocabularies for p in model.get_submodule(path).parameters()}
    outer = {path: product_of(layers[path]) for path in sides if not _is_in(path, blocks)}
    heads = [path for path, product in outer.items() if product is not None and product.num_out in num_words]
    around = {*blocks, *(parent_of(parent_of(path)) for path in blocks)}
    norms = [path for path, module in model.named_modules() if is_norm(module) and parent_of(path) in around]
    split = [*vocabularies, *norms, *rows, *(f"{path}:return.0" for path in attention)]
    whole = [*heads, *moe]
    for parent in dict.fromkeys(map(parent_of, columns)):
        siblings = [path for path in columns if parent_of(path) == parent]
        if len(siblings) == 1:
            whole += siblings
        elif parent not in blocks:  # one gather for all of them, and one sum of their gradients
            whole.append(parent)
    return split, _inputs(model, whole), [*columns, *heads, *_inputs(model, rows)]


def _inputs(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """The first arguments of modules."""
    signatures = ((path, inspect.signature(model.get_submodule(path).forward)) for path in paths)
    return [f"{path}:{next(iter(signature.parameters))}" for path, signature in signatures]


def _vocabularies(model: nn.Module) -> list[str]:
    """The tables of tokens, which begin the stream: those that the model names, or that have the most rows."""
    with contextlib.suppress(AttributeError, NotImplementedError):  # of transformers, where a model has some
        table = cast(Any, model).get_input_embeddings()
        if is_table(table):
            return [path for path, module in model.named_modules() if module is table]
    rows = {path: p.shape[0] for path, layer in layers_of(model) if is_table(layer) for p in layer.parameters()}
    return [path for path, num in rows.items() if num == max(rows.values())]


def _is_in(path: str, places: Iterable[str]) -> bool:
    return any(path.startswith(f"{place}.") for place in places)
