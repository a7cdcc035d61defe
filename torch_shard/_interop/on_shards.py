"""How a user's own JAX function runs: split over a mesh, where each device has its part of the arrays."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.axes import manual_axes
from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind
from torch_shard._interop.closure import CLOSURE, MoreInputs, Reader
from torch_shard._interop.jax_function import precision_of
from torch_shard._sharding import check_mesh, describe_mesh, find_spec_faults


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
        """Refuse specs that are none, or that do not go together."""
        check_kind("check_vma", self.check_vma, bool)
        try:
            precision_of(self.matmul_precision)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{caller()}: matmul_precision: {error}") from error
        if (self.in_specs is None) != (self.out_specs is None):
            raise ValueError(f"{caller()}: in_specs and out_specs go together: give both, or neither.")
        if self.mesh is not None:
            check_mesh(self.mesh)
            if self.in_specs is None:
                raise ValueError(f"{caller()}: a mesh needs in_specs and out_specs, which say how it is used.")
        for argument, specs in (("in_specs", self.in_specs), ("out_specs", self.out_specs)):
            for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
                if not _is_spec(spec):
                    raise TypeError(
                        f"{caller()}: {argument} holds jax.sharding.PartitionSpec, got {spec!r:.99}. P() leaves an "
                        "array whole."
                    )
                faults = find_spec_faults(spec, (0,) * len(spec), self.mesh) if self.mesh is not None else ()
                for fault, remedy in faults:
                    raise ValueError(f"{caller()}: {argument}: {fault}. {remedy}")

    def run(self, fn: Callable[..., PyTree], values: Sequence[PyTree], names: Sequence[str], whose: str) -> PyTree:
        """The results of `fn` on these arguments, on its own part of them on each device of the mesh."""
        mesh = self.mesh if self.mesh is not None or CLOSURE.split is None else CLOSURE.split.mesh
        with Reader((), ()).active(), precision_of(self.matmul_precision):
            try:
                if self.in_specs is None or mesh is None:
                    return fn(*values)
                return self._on_shards(fn, values, names, mesh, whose=whose)
            except MoreInputs as request:
                shape = tuple(request.tensors[0].shape)
                raise NotImplementedError(
                    f"{whose} reaches a torch tensor of shape {shape} by itself, which would be a constant of the "
                    "program. Pass it as an argument."
                ) from None

    def _on_shards(
        self, fn: Callable[..., PyTree], values: Sequence[PyTree], names: Sequence[str], mesh: Mesh, *, whose: str
    ) -> PyTree:
        if outer := manual_axes():
            raise NotImplementedError(
                f"{whose} has in_specs, and is called within a function that is mapped over {', '.join(outer)} "
                "already, where it gets shards. Register it without in_specs for this function."
            )
        leaves, tree = jax.tree.flatten(list(values))
        specs = self._specs(values, names, mesh, whose)
        given = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if _is_array(leaf)]

        def local(*shards: jax.Array) -> PyTree:
            arrays = iter(shards)
            return fn(*jax.tree.unflatten(tree, [next(arrays) if _is_array(leaf) else leaf for leaf in leaves]))

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(spec for _, spec in given),
            out_specs=self.out_specs,
            check_vma=self.check_vma,
        )
        return mapped(*(leaf for leaf, _ in given))

    def _specs(self, values: Sequence[PyTree], names: Sequence[str], mesh: Mesh, whose: str) -> list[PyTree]:
        """A spec for each leaf of the arguments."""
        found: list[PyTree] = []
        faults: list[str] = []
        for position, (name, value) in enumerate(zip(names, values, strict=True)):
            leaves = jax.tree.leaves(value)
            own = self.in_specs
            if not _is_spec(own):
                own = own[position] if position < len(own) else None
            specs = [None] * len(leaves) if own is None else _spread(own, value, name, whose)
            for leaf, spec in zip(leaves, specs, strict=True):
                if not _is_array(leaf):
                    continue
                if spec is None:
                    faults.append(f"{name} {leaf.shape}: an array that in_specs has no spec for. P() leaves it whole.")
                    continue
                pairs = find_spec_faults(spec, leaf.shape, mesh)
                faults += [f"{name} {leaf.shape}: {fault}. {remedy}" for fault, remedy in pairs]
            found += specs
        if faults:
            raise ValueError(
                f"{whose}: arguments do not fit in_specs on mesh {describe_mesh(mesh)}:\n\n"
                + "\n".join(f"  {fault}" for fault in faults)
            )
        return found


def _spread(specs: PyTree, value: PyTree, name: str, whose: str) -> list[PyTree]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(specs, value, is_leaf=_is_spec), is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"{whose}: in_specs of {name} must be one spec, or have the structure of it: {error}"
        ) from error


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)
