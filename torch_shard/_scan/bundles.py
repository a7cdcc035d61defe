"""The trainable parameters of a repeated layer as one input of the capture of the whole.

There, only the layer's own operator may read them, so one flat tensor for all of a dtype will do: its gradient is the
layer's, and what autograd does to it, adding, it does to each. A capture of 48 layers then has 48 inputs instead of
700. In the compiled program they are what they were: bundles exist in captures alone.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from torch_shard._scan.siblings import Siblings, tied_names


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Tensors that are one input.

    Attributes:
        names: Names of the tensors.
        numel: Number of elements of all together.
        dtype: Dtype of each of them.
    """

    names: tuple[str, ...]
    numel: int
    dtype: torch.dtype


Unit = str | Bundle


def names_of(unit: Unit) -> tuple[str, ...]:
    """The entries that a unit stands for."""
    return unit.names if isinstance(unit, Bundle) else (unit,)


def units_of(
    model: nn.Module,
    names: Iterable[str],
    groups: Iterable[Siblings],
    *,
    trainable: Mapping[str, torch.Tensor],
    apart: Collection[str],
) -> list[Unit]:
    """The inputs of a capture: names by themselves, and at the first of its names each bundle.

    Args:
        model: Only its structure is read.
        names: Of all entries, in order.
        groups: Repeated layers, of which each is a bundle for each dtype.
        trainable: What may be bundled.
        apart: Names of what may not.
    """
    apart = tied_names(model).union(apart)
    bundles: dict[str, Bundle] = {}
    for path in (path for group in groups if group.bundled and not group.refused for path in group.members.values()):
        own = {f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()}
        mine = {name: trainable[name] for name in own if name in trainable and name not in apart}
        for dtype in {t.dtype for t in mine.values()}:
            same = tuple(sorted(name for name, t in mine.items() if t.dtype == dtype))
            bundle = Bundle(same, sum(math.prod(mine[name].shape) for name in same), dtype)
            bundles |= dict.fromkeys(same, bundle)
    return list(dict.fromkeys(bundles.get(name, name) for name in names))
