"""Gradient accumulation: a batch taken in several microbatches, one after the other, within one program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from torch_shard._capture import Spec
from torch_shard._common.caller import caller
from torch_shard._common.dtypes import dtype_of_sums
from torch_shard._common.specs import describe_mesh, describe_spec
from torch_shard._common.types import PyTree
from torch_shard._device import BatchLayout
from torch_shard._loss.batch import BatchSignature
from torch_shard._loss.loss_program import LossOutputs, LossProgram
from torch_shard._loss.pipelined import PipelinedLoss
from torch_shard._sharding import ResolvedPlan, Stacks, constrain_stacks

ArrayT = TypeVar("ArrayT", jax.Array, torch.Tensor)


class Microbatches:
    """Microbatches of a batch, and a program's run over them.

    Every device keeps the rows that it has: of a leaf of `B` rows over `d` shards, microbatch `k` of `n` takes the
    `k`-th `n`-th of each shard, so that each is spread over the whole mesh and no row moves. Scalars are shared.
    """

    def __init__(self, num: int, layout: BatchLayout) -> None:
        self.num, self._layout = num, layout

    def check(self, leaves: Sequence[torch.Tensor | ArrayLike], paths: Sequence[str]) -> None:
        """Refuse a batch that cannot be split into microbatches."""
        if self.num == 1:
            return

        shapes: dict[str, tuple[int, ...]] = {}
        faults: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            shape = tuple(np.shape(leaf))
            if shape:
                shapes[path] = shape
                faults += self._faults(path, shape)

        sizes = {shape[0] for shape in shapes.values()}
        if len(sizes) > 1:
            faults = [f"  {path} {shape}: {shape[0]} rows" for path, shape in shapes.items()]
            remedy = (
                "Every leaf but the scalars is split by its leading dim, so these must agree. Keep a tensor that is "
                "not part of the batch in a buffer, or let loss_fn close over it."
            )
        elif shapes:
            remedy = (
                "Choose a batch size that divides, and drop the last incomplete batch (DataLoader(drop_last=True))."
            )
        else:
            faults = ["  It has only scalars."]
            remedy = "There is nothing to split: leave accumulate_steps out."
        if faults:
            layout = self._layout
            raise ValueError(
                f"{caller()}: the batch cannot be split into accumulate_steps={self.num} microbatches on mesh "
                f"{describe_mesh(layout.mesh)}.\n\n" + "\n".join(faults) + f"\n\n{remedy}"
            )

    def _faults(self, path: str, shape: tuple[int, ...]) -> list[str]:
        shards = self._num_shards(shape)
        if shape[0] and shape[0] % (self.num * shards) == 0:
            return []
        spec = describe_spec(self._layout.sharding(len(shape)).spec)
        needed = f"{self.num * shards} = accumulate_steps={self.num} * {shards} shards"
        return [f"  {path} {shape}: dim 0 = {shape[0]} is not a positive multiple of {needed} (batch_spec {spec})."]

    def _num_shards(self, shape: tuple[int, ...]) -> int:
        """Over how many shards the layout splits the leading dim."""
        # JAX divides only what is divisible, and any number of shards divides the number of devices.
        num_devices = self._layout.mesh.size
        shard_shape = self._layout.sharding(len(shape)).shard_shape((num_devices, *shape[1:]))
        return num_devices // shard_shape[0]

    def signature(self, batch: BatchSignature) -> BatchSignature:
        """Signature of one microbatch of a batch."""
        leaves: list[object] = []
        for leaf in batch.leaves:
            if isinstance(leaf, Spec) and leaf.shape:
                num_rows, *row_shape = leaf.shape
                leaf = dataclasses.replace(leaf, shape=(num_rows // self.num, *row_shape))
            leaves.append(leaf)
        return dataclasses.replace(batch, leaves=tuple(leaves))

    def run(self, program: LossProgram, plan: ResolvedPlan) -> tuple[Callable[..., LossOutputs], list[str]]:
        """`program.run` for a whole batch: the mean of the microbatches' losses, and its gradients.

        Sums of gradients are taken in float32 at least, each where the plan has its parameter.
        Buffers, and parameters that forward writes, go from one microbatch to the next. Metrics: the mean of a
        floating-point scalar; all else with a leading dim of microbatches. With it lines that say how it goes through
        the stages of a plan, if that has some.
        """
        if plan.stages is not None:
            return self._through_stages(program, plan)
        if self.num == 1:
            return program.run, []

        def constrain(sums: Stacks) -> Stacks:
            placed = (plan.of_group(group, sums.layout) for group in sums.layout.groups)
            return constrain_stacks(sums, placed, self._layout.data_axes)

        def run(
            key: jax.Array, tensors: Stacks, batch: Sequence[jax.Array], closure: Sequence[jax.Array]
        ) -> LossOutputs:
            microbatches = self._microbatches(batch, program.num_given)
            trained = tensors.part(program.grads)
            first_carried = tensors.part([*program.written, *program.buffers])

            def one(carry: PyTree, xs: PyTree) -> PyTree:
                carried, sums = carry
                index, rows = xs
                leaves = [whole if part is None else part for whole, part in zip(batch, rows, strict=True)]
                out = program.run(jax.random.fold_in(key, index), tensors.updated(carried), leaves, closure)

                grads = Stacks.from_dict(out.grads, sums.layout)
                sums = constrain(Stacks(sums.layout, map(jnp.add, sums.arrays, grads.arrays)))
                carried = carried.updated({**out.written, **out.buffers})
                return (carried, sums), (out.loss, out.metrics)

            zeros = jax.tree.map(lambda a: jnp.zeros_like(a, dtype_of_sums(a.dtype)), trained)
            carry, outputs = jax.lax.scan(one, (first_carried, zeros), (jnp.arange(self.num), microbatches))
            carried, sums = carry
            losses, metrics = outputs
            out = LossOutputs(
                loss=losses,
                metrics=metrics,
                grads=sums,
                buffers=carried.part(program.buffers),
                written=carried.part(program.written),
            )
            return self._means(out, trained)

        return run, []

    def _microbatches(self, batch: Sequence[jax.Array], num_given: int) -> list[jax.Array | None]:
        """Each leaf as `(n, ...)`, None for scalars; the last `num_given` are so already."""
        num_leaves = len(batch) - num_given
        leaves = batch[:num_leaves]
        computed_on_host = batch[num_leaves:]
        if self.num == 1:
            return [x[None] if x.ndim else None for x in leaves] + [x[None] for x in computed_on_host]

        layouts = self._layout.of_leaves([array.shape for array in leaves])
        split = [self._split(x, layout) if x.ndim else None for x, layout in zip(leaves, layouts, strict=True)]
        return [*split, *computed_on_host]

    def _through_stages(self, program: LossProgram, plan: ResolvedPlan) -> tuple[Callable[..., LossOutputs], list[str]]:
        """The same, for layers over the stages of a pipeline."""
        loss = PipelinedLoss(program, plan, self.num, self._layout.data_axes)

        def run(
            key: jax.Array, tensors: Stacks, batch: Sequence[jax.Array], closure: Sequence[jax.Array]
        ) -> LossOutputs:
            microbatches = self._microbatches(batch, program.num_given)
            leaves = [x if part is None else part for x, part in zip(batch, microbatches, strict=True)]

            # One microbatch draws what the batch draws without a pipeline.
            keys = key[None]
            if self.num > 1:
                keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(self.num))
            out = loss.run(keys, tensors, leaves, closure)
            return self._means(out, tensors.part(program.grads))

        return run, loss.report

    def _means(self, out: LossOutputs, trained: Stacks) -> LossOutputs:
        """The outputs of a batch, of the losses and metrics of its microbatches and the sums of their gradients."""
        sums = Stacks.from_dict(out.grads, trained.layout)
        return dataclasses.replace(
            out,
            loss=_mean(out.loss),
            metrics=jax.tree.map(self._metric, out.metrics),
            grads=jax.tree.map(lambda total, like: total.astype(like.dtype), sums, trained),
        )

    def _metric(self, stacked: jax.Array) -> jax.Array:
        if self.num == 1:
            return stacked[0]
        is_float_scalar = stacked.ndim == 1 and jnp.issubdtype(stacked.dtype, jnp.floating)
        return _mean(stacked) if is_float_scalar else stacked

    def on_host(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The microbatches of the leaves of a batch that lie on the CPU."""
        if self.num == 1:
            return [list(tensors)]

        stacked = [self._rows(tensor) if tensor.ndim else tensor.expand(self.num) for tensor in tensors]
        return [[rows[number].contiguous() for rows in stacked] for number in range(self.num)]

    def _rows(self, array: ArrayT) -> ArrayT:
        """`(B, ...)` to `(n, B / n, ...)`: of each shard's rows the k-th part is in microbatch k."""
        num_shards = self._num_shards(tuple(array.shape))
        row_shape = array.shape[1:]
        by_shard = array.reshape(num_shards, self.num, -1, *row_shape)
        return by_shard.swapaxes(0, 1).reshape(self.num, -1, *row_shape)

    def _split(self, array: jax.Array, layout: BatchLayout) -> jax.Array:
        """`(B, ...)` to `(n, B / n, ...)`, each microbatch spread as the batch was; compiles to no communication."""
        rows = self._rows(array)
        spec = PartitionSpec(None, *layout.sharding(array.ndim).spec)
        return jax.lax.with_sharding_constraint(rows, NamedSharding(self._layout.mesh, spec))


def _mean(stacked: jax.Array) -> jax.Array:
    return stacked.mean(0, dtype=dtype_of_sums(stacked.dtype)).astype(stacked.dtype)
