"""Placements of `torch.distributed.tensor` as specs of activations, beside how the batch is split."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torch_shard._sharding import axes_of, describe_spec, make_matcher


@dataclass(frozen=True)
class Layouts:
    """What placements mean.

    Attributes:
        tp: The axis of the mesh that they split over.
        batch_spec: How activations are split over the other axes.
        ndim: The rank of activations, or of those of some modules by name or glob.
    """

    tp: str
    batch_spec: PartitionSpec
    ndim: int | Mapping[str, int]

    def find_faults(self, model: nn.Module, mesh: Mesh) -> list[str]:
        """Say what is wrong with these arguments."""
        asked = self.ndim if isinstance(self.ndim, Mapping) else {}
        names = [name for name, _ in model.named_modules()]
        ranks = [*asked.values()] if isinstance(self.ndim, Mapping) else [self.ndim]
        faults = [f"ndim={num!r} must be a positive integer." for num in ranks if num < 1]
        faults += [f'ndim["{key}"] matches no module.' for key in asked if not any(map(make_matcher(key), names))]
        taken = [axis for axis in axes_of(self.batch_spec) if axis == self.tp or axis not in mesh.shape]
        return faults + [
            f'batch_spec={describe_spec(self.batch_spec)} names "{axis}", which is '
            + (
                f'tp="{axis}". Activations are split over it as the styles say.'
                if axis == self.tp
                else "no axis of the mesh."
            )
            for axis in taken
        ]

    def rank(self, path: str, module: nn.Module, argument: str) -> int:
        """How many dims an activation has: numbers of rows, which an embedding takes, have one less."""
        asked = self.ndim.items() if isinstance(self.ndim, Mapping) else ()
        common = 3 if isinstance(self.ndim, Mapping) else self.ndim
        found = next((num for key, num in asked if make_matcher(key)(path)), common)
        return max(found - 1, 1) if isinstance(module, nn.Embedding) and argument else found

    def spec_of(self, placement: Placement, rank: int) -> PartitionSpec | str:
        """The spec of an activation, or why there is none."""
        parts = [*self.batch_spec, *(None for _ in range(rank))][:rank]
        if isinstance(placement, Replicate):
            return PartitionSpec(*parts)
        if type(placement) is not Shard:
            return f"asks for {placement}, which is how values are before they are summed, and no way to be split"
        if not -rank <= placement.dim < rank:
            return f"asks for {placement}, and ndim says that it has {rank} dims"
        part = parts[placement.dim]
        parts[placement.dim] = self.tp if part is None else (*axes_of((part,)), self.tp)
        return PartitionSpec(*parts)
