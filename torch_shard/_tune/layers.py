"""Models with fewer of their repeated layers: where layers are proved to be one program, two sizes say all others."""

# PyTorch annotates some of its functions in part; optax has no stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import collections
import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, cast

import optax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from torch_shard._capture import Precision
from torch_shard._common.types import PyTree
from torch_shard._loss import HostValues, flatten_batch, loss_program
from torch_shard._scan import LayerOptions
from torch_shard._sharding import LossFn, ShardingPlan, holdings, with_values


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Layers that a capture has proved to be one program, over and over.

    Attributes:
        loops: For each loop, the paths of the layers of each iteration. All have the same number of iterations.
    """

    loops: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def num(self) -> int:
        """Of iterations."""
        return len(self.loops[0])

    @property
    def num_layers(self) -> int:
        """Of all loops."""
        return sum(len(iteration) for loop in self.loops for iteration in loop)

    def dropped(self, num: int) -> frozenset[str]:
        """Paths of the layers that a model with so many iterations lacks."""
        return frozenset(path for loop in self.loops for iteration in loop[num:] for path in iteration)

    def stand_ins(self, num: int) -> dict[str, str]:
        """For each layer that is dropped, the one of the last iteration left that does the same."""
        pairs = ((loop[num - 1], iteration) for loop in self.loops for iteration in loop[num:])
        return {path: kept for last, iteration in pairs for path, kept in zip(iteration, last, strict=True)}


def find_repeats(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, precision: Precision, *, mesh: Mesh
) -> Repeats | None:
    """Capture a loss with its repeated layers as regions, and read which are proved to be one program.

    Args:
        model: Read, not changed.
        loss_fn: Its loss.
        batch: Tensors or shapes.
        precision: What the loss is computed in.
        mesh: Any, with an axis `batch`.

    Returns:
        None where nothing repeats, loops have different lengths, or a layer runs several times with one set of
        parameters.
    """
    leaves, signature = flatten_batch(batch)
    program = loss_program(
        model,
        loss_fn,
        signature,
        precision=precision,
        train=True,
        layers=LayerOptions(scan="auto", remat="none"),
        values=HostValues(leaves, signature, dict(model.named_buffers()).__getitem__),
        plan=ShardingPlan({}, default=PartitionSpec()).resolve(model, mesh),
    )
    loops = () if program.rolled is None else program.rolled.loops
    layers = {False: list[tuple[tuple[str, ...], ...]](), True: list[tuple[tuple[str, ...], ...]]()}
    for loop in loops:
        paths = (tuple(i.layer for i in iteration if i.layer is not None) for iteration in loop.iterations)
        layers[loop.is_backward].append(tuple(paths))
    forward = layers[False]
    all_paths = [path for loop in forward for iteration in loop for path in iteration]
    again = {path for loop in layers[True] for iteration in loop for path in iteration}
    if len(set(map(len, forward))) != 1 or len(set(all_paths)) < len(all_paths) or again != set(all_paths):
        return None
    return Repeats(tuple(forward)) if all(_is_numbered(model, path) for path in all_paths) else None


def _is_numbered(model: nn.Module, path: str) -> bool:
    """Whether a layer stands among children 0, 1, 2 and so on, of which one may be taken out."""
    children = model.get_submodule(path.rpartition(".")[0])._modules
    return list(children) == [str(number) for number in range(len(children))]


@dataclasses.dataclass(frozen=True)
class Shorter:
    """A copy of a model on the meta device, with fewer iterations of its loops.

    Attributes:
        module: The copy. The user's model is left as it is.
        optimizer: Of torch, for the parameters of the copy; one of optax as it was.
        names: For each module of the whole model, by its path, the path of the one here that does the same.
        left: Paths of the whole model's layers that are here, too.
    """

    module: nn.Module
    optimizer: optax.GradientTransformation | torch.optim.Optimizer
    names: Mapping[str, str]
    left: frozenset[str]


def shorten(
    model: nn.Module, optimizer: optax.GradientTransformation | torch.optim.Optimizer, repeats: Repeats, num: int
) -> Shorter:
    """Make a copy with so many iterations of each loop.

    Args:
        model: Of any device.
        optimizer: Its optimizer.
        repeats: Its loops.
        num: At least one.
    """
    held = holdings(model)
    made = with_values(model, {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in held.all.items()})
    copies = holdings(made).params
    pairs = {id(tensor): copies[name] for name, tensor in held.params.items()}
    dropped, stand_ins = repeats.dropped(num), repeats.stand_ins(num)
    renamed = dict[str, str]()
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in dropped):
        container = made.get_submodule(parent)
        left = [name for name in container._modules if _join(parent, name) not in dropped]
        renamed |= {_join(parent, name): _join(parent, str(at)) for at, name in enumerate(left)}
        modules = [container._modules[name] for name in left]
        container._modules.clear()
        container._modules.update({str(at): module for at, module in enumerate(modules)})
    names = {path: _renamed(path, stand_ins, renamed) for path, _ in model.named_modules()}
    here = frozenset(path for loop in repeats.loops for iteration in loop for path in iteration) - dropped
    return Shorter(made, _for_params(optimizer, pairs, set(map(id, made.parameters()))), names, here)


def _for_params(
    optimizer: optax.GradientTransformation | torch.optim.Optimizer,
    pairs: Mapping[int, torch.Tensor],
    left: set[int],
) -> optax.GradientTransformation | torch.optim.Optimizer:
    """An optimizer of torch for the copies of its parameters that are left, as if it had not stepped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    made = copy.copy(optimizer)
    groups = cast(list[dict[str, Any]], optimizer.param_groups)
    copies = [[pairs[id(p)] for p in group["params"] if id(p) in pairs] for group in groups]
    kept = [[p for p in own if id(p) in left] for own in copies]
    made.param_groups = [{**group, "params": own} for group, own in zip(groups, kept, strict=True) if own]
    made.state = collections.defaultdict(dict)
    return made


def _renamed(path: str, *steps: Mapping[str, str]) -> str:
    """A path with the part of it that has another name put in its place."""
    for names in steps:
        ends = [found.start() for found in re.finditer(r"\.|$", path)]
        known = next((end for end in ends if path[:end] in names), None)
        path = path if known is None else names[path[:known]] + path[known:]
    return path


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
