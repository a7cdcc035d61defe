"""The trainable parameters of a repeated layer as one input of the capture of the whole.

There, only the layer's own operator may read them, so one tensor stands for all of them: its gradient is the layer's,
and what autograd does to it, adding, it does to each. A capture of 48 layers then has about 50 inputs. In the compiled
program they are what they were: bundles exist in captures alone.

Captures of 48 layers without bundles took 1.78 times as long for the GPT of the benchmarks (16 parameters a layer,
2.5 s to 4.5 s) and 1.15 times as long for a Llama of Hugging Face (9 a layer, 4.8 s to 5.6 s; each the best of five,
taken in turn in one process): PyTorch's tracer spends about 0.5 ms on each input, gradient and output in each of its
passes.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from torch_shard._scan.siblings import Siblings
from torch_shard._sharding import tied_names


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Tensors that are one input, by name."""

    names: tuple[str, ...]


GraphInput = str | Bundle
"""An input of a capture: one entry of the model by its name, or a bundle of them."""


def names_of(given: GraphInput) -> tuple[str, ...]:
    """The entries that an input stands for."""
    return given.names if isinstance(given, Bundle) else (given,)


def graph_inputs(
    model: nn.Module,
    names: Iterable[str],
    groups: Iterable[Siblings],
    *,
    trainable: Mapping[str, torch.Tensor],
    apart: Collection[str],
) -> list[GraphInput]:
    """The inputs of a capture: names by themselves, and at the first of its names each bundle."""
    apart = tied_names(model).union(apart)
    bundles: dict[str, Bundle] = {}
    for path in (path for group in groups if group.bundled and not group.refused for path in group.members.values()):
        own = (f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters())
        mine = tuple(name for name in own if name in trainable and name not in apart)
        bundles |= dict.fromkeys(mine, Bundle(mine))
    return list(dict.fromkeys(bundles.get(name, name) for name in names))
