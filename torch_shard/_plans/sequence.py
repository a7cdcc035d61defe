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
from torch_shard._plans.decisions import Axes, Decision, names_of, places_with_globs
from torch_shard._plans.layers import LORA, experts_of, is_norm, is_table, layers_of, product_of
from torch_shard._plans.roles import roles_of
from torch_shard._sharding import Padded, axes_of

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
    stream = _Stream(model, blocks, sharded)
    found = dict.fromkeys(stream.split(), split) | dict.fromkeys(stream.whole(), whole)
    found |= dict.fromkeys(stream.inner(), inner)
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
        if any(is_norm(child) for child in block.children()) or _norms_within(block):
            yield path, block


def _norms_within(block: nn.Module) -> bool:
    """Whether parts of it have norms, as those of BERT have, and it is no list itself."""
    return any(is_norm(part) for child in block.children() for part in child.children())


class _Stream:
    """The places of a residual stream: names of modules, and of arguments of their `forward`."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], sharded: Collection[str]) -> None:
        self._model, self._blocks = model, blocks
        self._roles = {n.removesuffix(".weight"): r for n, r in roles_of(model).items() if n.endswith(".weight")}
        self._moe = [_parent(path) for path, layer in layers_of(model) if experts_of(layer)]
        self._attention = [path for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        self._rows, self._columns = (
            [path for path in self._products(side) if path in sharded] for side in ("row", "column")
        )
        num_words = {p.shape[0] for path in self._vocabularies() for p in model.get_submodule(path).parameters()}
        products = {path: product for path, layer in layers_of(model) if (product := product_of(layer)) is not None}
        heads = [path for path in products if path in sharded and not _is_in(path, blocks)]
        self._heads = [path for path in heads if products[path].num_out in num_words]

    def split(self) -> list[str]:
        """Where it is split along the sequence."""
        around = {_parent(_parent(path)) for path in self._blocks}
        norms = [path for path, layer in self._model.named_modules() if is_norm(layer)]
        return [
            *self._vocabularies(),
            *(path for path in norms if _parent(path) in around or _parent(path) in self._blocks),
            *self._rows,
            *(f"{path}:return.0" for path in self._attention),
        ]

    def whole(self) -> list[str]:
        """Where layers need all of it."""
        found = [self._input(path) for path in (*self._heads, *self._moe)]
        for parent in dict.fromkeys(map(_parent, self._columns)):
            siblings = [path for path in self._columns if _parent(path) == parent]
            if len(siblings) == 1:
                found.append(self._input(siblings[0]))
            elif parent not in self._blocks:  # one gather for all of them, and one sum of their gradients
                found.append(self._input(parent))
        return found

    def inner(self) -> list[str]:
        """Where features are split, between a column and a row layer."""
        return [*self._columns, *self._heads, *map(self._input, self._rows)]

    def _products(self, side: str) -> list[str]:
        """Of one side, in blocks; not those of experts, to whom tokens come in one row."""
        asked = [path for path, role in self._roles.items() if role.side == side and LORA not in path]
        within = [path for path in asked if _is_in(path, self._blocks)]
        return [path for path in within if not _is_in(path, [*self._moe, *self._attention])]

    def _vocabularies(self) -> list[str]:
        """The tables of tokens, which begin the stream: those that the model names, or that have the most rows."""
        with contextlib.suppress(AttributeError, NotImplementedError):  # of transformers, where a model has some
            table = cast(Any, self._model).get_input_embeddings()
            if is_table(table):
                return [path for path, m in self._model.named_modules() if m is table]
        rows = {path: p.shape[0] for path, m in layers_of(self._model) if is_table(m) for p in m.parameters()}
        return [path for path, num in rows.items() if num == max(rows.values())]

    def _input(self, path: str) -> str:
        first = next(iter(inspect.signature(self._model.get_submodule(path).forward).parameters))
        return f"{path}:{first}"


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_in(path: str, places: Iterable[str]) -> bool:
    return any(path.startswith(f"{place}.") for place in places)
