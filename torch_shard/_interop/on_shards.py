"""How a user's own JAX function runs: split over a mesh, where each device has its part of the arrays."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from torch_shard._common.axes import manual_axes
from torch_shard._common.caller import caller
from torch_shard._common.convert import spread_prefix
from torch_shard._common.types import PyTree
from torch_shard._interop.closure import CLOSURE, MoreInputs, Reader
from torch_shard._interop.jax_function import precision_of
from torch_shard._sharding import check_mesh


@dataclasses.dataclass(frozen=True)
class Split:
    """How a kernel is run: over a mesh as `jax.shard_map` is told, by arguments in the order of its parameters.

    Attributes:
        in_specs: One spec for all arrays, or one or a pytree of them for each argument; None to leave it whole.
        out_specs: Those of the results.
        mesh: By default that of the step.
        check_vma: Whether JAX tracks what varies over which axes.
        matmul_precision: Of the products in it; None for torch's.
    """

    in_specs: PyTree
    out_specs: PyTree
    mesh: Mesh | None
    check_vma: bool
    matmul_precision: str | None

    def check(self) -> None:
        """Refuse what does not go together; specs that do not fit are refused by JAX."""
        precision_of(self.matmul_precision)
        if (self.in_specs is None) != (self.out_specs is None) or (self.in_specs is None and self.mesh is not None):
            raise ValueError(f"{caller()}: in_specs and out_specs go together, and a mesh needs both.")
        if self.mesh is not None:
            check_mesh(self.mesh)

    def run(self, fn: Callable[..., PyTree], values: Sequence[PyTree], whose: str) -> PyTree:
        """The results of `fn` on these arguments, on its own part of them on each device of the mesh."""
        mesh = self.mesh if self.mesh is not None or CLOSURE.split is None else CLOSURE.split.mesh
        with Reader((), ()).active(), precision_of(self.matmul_precision):
            try:
                if self.in_specs is None or mesh is None:
                    return fn(*values)
                return self._on_shards(fn, values, mesh, whose)
            except MoreInputs as request:
                shape = tuple(request.tensors[0].shape)
                raise NotImplementedError(
                    f"{whose} reaches a torch tensor of shape {shape} by itself, which would be a constant of the "
                    "program. Pass it as an argument."
                ) from None

    def _on_shards(self, fn: Callable[..., PyTree], values: Sequence[PyTree], mesh: Mesh, whose: str) -> PyTree:
        if outer := manual_axes():
            raise NotImplementedError(
                f"{whose} has in_specs, and is called within a function that is mapped over {', '.join(outer)} "
                "already, where it gets shards. Register it without in_specs for this function."
            )
        leaves, tree = jax.tree.flatten(list(values))
        own = self.in_specs
        if isinstance(own, tuple | list):  # those of the last arguments may be missing
            own = [*own[: len(values)], *[None] * (len(values) - len(own))]
        specs = spread_prefix(own, tree)
        given = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if _is_array(leaf)]
        for leaf, spec in given:
            if spec is None:
                raise ValueError(
                    f"{whose} has no spec in in_specs for an array of shape {leaf.shape}. P() leaves it whole."
                )

        def local(*shards: jax.Array) -> PyTree:
            arrays = iter(shards)
            return fn(*jax.tree.unflatten(tree, [next(arrays) if _is_array(leaf) else leaf for leaf in leaves]))

        local.__name__ = whose  # in errors of JAX
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(spec for _, spec in given),
            out_specs=self.out_specs,
            check_vma=self.check_vma,
        )
        return mapped(*(leaf for leaf, _ in given))


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)
