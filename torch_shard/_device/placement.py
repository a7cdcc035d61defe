"""Entries of a state_dict onto the mesh and back, one at a time; host batches onto the mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from torch_shard._common.caller import caller, public
from torch_shard._common.convert import flatten, host_array, struct_of, to_host
from torch_shard._common.specs import axes_of, describe_mesh, describe_spec
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, named, unwrapped
from torch_shard._device.tensor import JaxTensor, whole_on_host, wrap_array
from torch_shard._entries import TensorPlaces, holdings, refuse_hooks
from torch_shard._sharding import (
    Context,
    PlanFn,
    ShardingPlan,
    Stacks,
    check_mesh,
    find_spec_faults,
    make_matcher,
    plan_for,
    refuse_compile_only,
    row_sharding,
)


def put(value: torch.Tensor | ArrayLike, sharding: NamedSharding, *, rounds: bool = False) -> jax.Array:
    """A tensor or array onto its shards; a CPU tensor is read shard by shard, and never aliased."""
    refuse_compile_only(sharding.mesh)
    if isinstance(value, JaxTensor):
        value = value.jax()
    if isinstance(value, jax.Array):
        return jax.device_put(value, sharding)
    host = host_array(value, rounds=rounds)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index], order="C"))


def put_rows(values: list[torch.Tensor | ArrayLike], sharding: NamedSharding) -> jax.Array:
    """Several tensors or arrays as rows of one array, which is to lie like this, each straight onto its shards."""
    refuse_compile_only(sharding.mesh)
    if any(isinstance(value, JaxTensor | jax.Array) for value in values):
        row = row_sharding(sharding)
        return jax.jit(lambda *rows: jnp.stack(rows), out_shardings=sharding)(*(put(v, row) for v in values))
    hosts = [host_array(value) for value in values]
    shape = (len(hosts), *hosts[0].shape)

    def read(index: Any) -> np.ndarray:
        return np.stack([host[index[1:]] for host in hosts[index[0]]])

    return jax.make_array_from_callback(shape, sharding, read)


def to_host_by_name(stacks: Stacks) -> dict[str, torch.Tensor]:
    """Each entry as an ordinary CPU tensor of its own, a stored array at a time."""
    found: dict[str, torch.Tensor] = {}
    for group, array in zip(stacks.layout.groups, stacks.arrays, strict=True):
        form, host = stacks.layout.forms.get(group[0]), to_cpu(array)
        host = host if form is None else form.restore(host, is_stack=len(group) > 1)
        found |= {group[0]: host} if len(group) == 1 else {n: row.clone() for n, row in zip(group, host, strict=True)}
    return {name: found[name] for name in stacks}


def refuse_meta(tensors: Mapping[str, object]) -> None:
    """Refuse entries that have no values."""
    names = [n for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.device.type == "meta"]
    if names:
        raise ValueError(
            f"{caller()}: {', '.join(names)} on the meta device, so without values. Give the model values first: "
            'materialize(model, mesh, plan, init="reset_parameters") initialises it straight on its shards, '
            "load_state_dict(..., assign=True) takes them from a state_dict. What no file has (non-persistent buffers) "
            "comes with the constructor: materialize(lambda: Model(...), mesh, plan), then load_safetensors into that."
        )


def refuse_wide(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse floating-point entries that JAX would narrow."""
    wide = (torch.float64, torch.complex128)
    names = [name for name, tensor in tensors.items() if tensor.dtype in wide]
    if names and not jax.config.values["jax_enable_x64"]:
        raise TypeError(
            f"{caller()}: {', '.join(names)} are float64 or complex128 and need 64 bits, which JAX has switched off. "
            "Convert the model (model.float()), or jax.config.update('jax_enable_x64', True) at the start."
        )


@public
def place(model_or_tree: PyTree, mesh: Mesh, plan: ShardingPlan | PlanFn) -> PyTree:
    """Put each entry of a module or a state_dict onto its shards.

    One entry moves at a time, and its old storage is let go: no second copy of the model exists.

    Args:
        model_or_tree: A module, which is changed in place and keeps ties, `requires_grad` and non-persistent
            buffers; or a mapping of names to tensors or arrays, which is left as it is.
        mesh: The devices, with Auto axes.
        plan: Which entry is split how; checked as a whole before anything moves. Or a function of `(module, mesh)`
            that says it.

    Returns:
        The module; or a dict of jax-device tensors.

    Raises:
        TypeError: An argument is of the wrong kind, or an entry needs 64 bits that JAX has switched off.
        ValueError: The plan does not fit the entries and the mesh; see `ShardingPlan.resolve`.
        OverflowError: An integer does not fit 32 bits.
        NotImplementedError: A parameter has hooks.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = ts.make_mesh(batch=1, model=1)
        >>> model = ts.place(torch.nn.Linear(4, 2), mesh, ts.ShardingPlan({"weight": P("model")}, default=P()))
        >>> model.weight.jax().sharding.spec
        P('model',)
    """
    check_kind("model_or_tree", model_or_tree, torch.nn.Module | Mapping)
    check_mesh(mesh)
    shardings = plan_for(plan, model_or_tree, mesh).resolve(model_or_tree, mesh)
    module = unwrapped(model_or_tree) if isinstance(model_or_tree, torch.nn.Module) else None
    held: dict[str, Any] = dict(model_or_tree) if module is None else holdings(module).all  # pyright: ignore
    for name in held:
        check_kind(name, held[name], torch.Tensor | jax.Array | np.ndarray)
    refuse_meta(held)
    refuse_wide({name: value for name, value in held.items() if isinstance(value, torch.Tensor)})

    def placed(name: str, value: torch.Tensor | ArrayLike) -> JaxTensor:
        with named(name):
            return wrap_array(put(value, shardings[name]))

    if module is None:
        return {name: placed(name, value) for name, value in held.items()}
    _replace_each(module, held, placed)
    return model_or_tree


@public
def gather(model_or_tree: PyTree) -> PyTree:
    """Bring a placed module, or a pytree of tensors and arrays, back to ordinary CPU tensors, an entry at a time.

    Args:
        model_or_tree: A module, changed in place; or a pytree of jax-device tensors or arrays, such as
            `state.params`.

    Returns:
        The module; or the pytree, with CPU tensors that share no memory with the arrays, by name in plain dicts.

    Raises:
        NotImplementedError: A parameter has hooks.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = ts.make_mesh(batch=1, model=1)
        >>> placed = ts.place(torch.nn.Linear(4, 2), mesh, ts.ShardingPlan({"weight": P("model")}, default=P()))
        >>> placed.weight.device.type, ts.gather(placed).weight.device.type
        ('jax', 'cpu')
    """
    if not isinstance(model_or_tree, torch.nn.Module):
        flatten(model_or_tree)  # or an error of ours
        return jax.tree.map(_gather_node, model_or_tree, is_leaf=lambda node: isinstance(node, Stacks))
    _replace_each(model_or_tree, holdings(model_or_tree).all, lambda _, tensor: to_cpu(tensor))
    return model_or_tree


def _replace_each(
    module: torch.nn.Module, held: dict[str, torch.Tensor], new: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Replace the entries of a module one by one; each is let go before the next one's turn."""
    refuse_hooks(module)
    places = TensorPlaces(module)
    for name in list(held):
        tensor = held.pop(name)
        places.replace([(tensor, new(name, tensor.detach()))])


def _gather_node(node: PyTree) -> PyTree:
    if isinstance(node, Stacks):
        return to_host_by_name(node)
    return to_cpu(node) if isinstance(node, jax.Array | torch.Tensor) else node


def to_cpu(value: torch.Tensor | jax.Array) -> torch.Tensor:
    """A torch tensor or an array as an ordinary CPU tensor; one that is on the CPU already, as it is.

    Of an array that lies on several processes each gets the whole, and all of them must ask for it.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, JaxTensor):
        return value.cpu()
    array = value.jax() if isinstance(value, JaxTensor) else value
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ValueError(f"{caller()}: an array of shape {array.shape} was donated to a step. Take what it returned.")
    return to_host(whole_on_host(array) if isinstance(array, jax.Array) else array)


MOST = 8
"""Leaves that an error lists."""


def _names(paths: list[str]) -> list[str]:
    """Names of leaves, as in `targets.0` for `batch['targets'][0]`."""
    return [re.sub(r"\['?([^]']*)'?\]", r".\1", path.removeprefix("batch")).removeprefix(".") for path in paths]


class BatchLayout:
    """Placement of the leaves of a batch: the leading dim over some axes, or as a given spec says.

    Args:
        mesh: The devices.
        spec: Of all leaves, by default the leading dim over the axes of rows; or of some by the names of their places,
            as in `{"targets.**": P()}`, and of the others the default.
        context: Over which axis leaves that have a sequence are split along it, where `spec` does not say it all.
        rows: Axes, where neither says them; by default `batch`.
    """

    def __init__(
        self,
        mesh: Mesh,
        spec: PartitionSpec | Mapping[str, PartitionSpec] | None,
        context: Context | None = None,
        *,
        rows: tuple[str, ...] | None = None,
    ) -> None:
        self.mesh = check_mesh(mesh)
        self.apart: dict[str, BatchLayout] = {}
        if isinstance(spec, Mapping):
            for glob, own in spec.items():
                check_kind("a name in batch_spec", glob, str)
                check_kind(f"batch_spec[{glob!r}]", own, PartitionSpec)
                self.apart[glob] = BatchLayout(mesh, own)
            spec = None
        self.context, self._follows_plan = context, spec is None and context is not None
        if spec is None and context is not None:
            spec = PartitionSpec(context.rows_on(mesh) or None)
        if spec is None and rows is not None:
            spec = PartitionSpec(rows)
        if spec is None and "batch" not in mesh.axis_names:
            raise ValueError(
                f"{caller()}: batches are split over the mesh axis 'batch', but mesh {describe_mesh(mesh)} has none. "
                f"Say how to split them: batch_spec=P({mesh.axis_names[0]!r}), or batch_spec=P() to replicate."
            )
        self.spec = PartitionSpec("batch") if spec is None else spec
        if faults := find_spec_faults(self.spec, (0,) * len(self.spec), mesh):
            listed = " ".join(f"{fault}. {remedy}" for fault, remedy in faults)
            raise ValueError(f"{caller()}: batch_spec on mesh {describe_mesh(mesh)}: {listed}")
        if context is not None and context.axis in self.row_axes:
            raise ValueError(
                f"{caller()}: batch_spec {describe_spec(self.spec)} splits rows over {context.axis!r}, over which the "
                "plan splits their sequence. Give rows other axes, or leave batch_spec out, which follows the plan."
            )
        self._shardings: dict[int, NamedSharding] = {}

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes over which rows are split."""
        return tuple(axes_of(tuple(self.spec)[:1]))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Those, and the one over which the sequence is split: each of their devices has tokens of its own."""
        return (*self.row_axes, *((self.context.axis,) if self.context else ()))

    def sharding(self, ndim: int) -> NamedSharding:
        """The sharding of a leaf with that many dims: the spec, cut to the rank."""
        if ndim not in self._shardings:
            self._shardings[ndim] = NamedSharding(self.mesh, PartitionSpec(*tuple(self.spec)[:ndim]))
        return self._shardings[ndim]

    def faults(self, leaves: list[PyTree], paths: list[str]) -> list[str]:
        """Say which leaves do not divide over the mesh, a line each."""
        faults: list[str] = []
        for leaf, path, layout in zip(leaves, paths, self.of_leaves([np.shape(x) for x in leaves], paths), strict=True):
            shape = tuple(np.shape(leaf))
            spec = layout.sharding(len(shape)).spec
            found = find_spec_faults(spec, shape, self.mesh)
            faults += [f"  {path} {shape}: {fault} (batch_spec {describe_spec(spec)})." for fault, _ in found]
        return faults

    def check(self, leaves: list[PyTree], paths: list[str]) -> None:
        """Refuse a batch that does not divide."""
        if faults := self.faults(leaves, paths):
            remedy = (
                "Choose a batch size that divides, and drop the last incomplete batch (DataLoader(drop_last=True))."
            )
            if len({np.shape(leaf)[0] for leaf in leaves if np.shape(leaf)}) > 1:
                of = _names(paths)[next(n for n, path in enumerate(paths) if faults[0].startswith(f"  {path} "))]
                remedy += (
                    " A leaf that does not have the rows of the batch (edges of a graph, boxes of an image) is given "
                    f'whole to all devices by its name: make_train_step(..., batch_spec={{"{of}": P()}}), '
                    'and "targets.**" names all that is within.'
                )
            raise ValueError(
                f"{caller()}: the batch cannot be split on mesh {describe_mesh(self.mesh)}.\n\n"
                + "\n".join(faults[:MOST])
                + f"\n  and {len(faults) - MOST} more" * (len(faults) > MOST)
                + f"\n\n{remedy}"
                + " Pad sequences to a length that divides." * self._follows_plan
            )

    def at(self, paths: list[str]) -> list[BatchLayout]:
        """The placement of each leaf.

        Args:
            paths: Where each stands in the batch, as in `batch['targets'][0]`.

        Raises:
            ValueError: A name of `batch_spec` finds none.
        """
        names = _names(paths)
        matchers = {glob: make_matcher(glob) for glob in self.apart}
        for glob, matches in matchers.items():
            if not any(map(matches, names)):
                listed = ", ".join(names)
                raise ValueError(
                    f"{caller()}: batch_spec has {glob!r}, which is no leaf of the batch: it has {listed}. As in a "
                    "plan, * stands for one part of a name, and ** for any number of them."
                )
        found = (next((glob for glob, matches in matchers.items() if matches(name)), None) for name in names)
        return [self if glob is None else self.apart[glob] for glob in found]

    def of_leaves(self, shapes: Sequence[tuple[int, ...]], paths: list[str] | None = None) -> list[BatchLayout]:
        """The placement of each leaf, of a batch whose sequence is split over an axis of its own too.

        The leaves with two dims, (rows, sequence), say how long the sequence is; without any, all leaves with more.
        Each leaf whose second dim is as long has a sequence.

        Raises:
            ValueError: A name of `batch_spec` finds none, or it is not clear how long the sequence is.
        """
        layouts: list[BatchLayout] = [self for _ in shapes] if paths is None else self.at(paths)
        if self.context is None or not self._follows_plan:
            return layouts
        own = {shape for shape, layout in zip(shapes, layouts, strict=True) if layout is self and len(shape) > 1}
        lengths = {shape[1] for shape in own if len(shape) == 2} or {shape[1] for shape in own}
        if len(lengths) != 1:
            listed = ", ".join(map(str, sorted(own))) or "no leaf has two dims"
            raise ValueError(
                f"{caller()}: the plan splits the sequence of the batch over {self.context.axis!r}, and the leaves do "
                f"not say with one voice how long it is, by their second dim: {listed}. Say how each is split: "
                f'batch_spec={{"input_ids": P({", ".join(map(repr, (*self.row_axes, self.context.axis)))})}}.'
            )
        split = BatchLayout(self.mesh, PartitionSpec(self.spec[0], self.context.axis))
        pairs = list(zip(shapes, layouts, strict=True))
        return [split if own is self and len(s) > 1 and {s[1]} == lengths else own for s, own in pairs]

    def sequence_dims(self, shapes: Sequence[tuple[int, ...]], paths: list[str]) -> tuple[int | None, ...]:
        """Which dim of each leaf is its sequence, split over the axis of the context; None of what has none."""
        if self.context is None:
            return (None,) * len(shapes)
        specs = [layout.sharding(len(s)).spec for s, layout in zip(shapes, self.of_leaves(shapes, paths), strict=True)]
        split = [[dim for dim, part in enumerate(spec) if self.context.axis in axes_of((part,))] for spec in specs]
        return tuple(next(iter(dims), None) for dims in split)

    def put(self, leaves: list[PyTree]) -> list[jax.Array]:
        """Leaves onto the mesh."""
        refuse_compile_only(self.mesh)
        return [self._put(leaf) for leaf in leaves]

    def structs(self, leaves: list[PyTree]) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding that leaves have on the mesh; of leaves with shapes alone, too."""
        found = [struct_of(leaf) for leaf in leaves]
        return [struct.update(sharding=self.sharding(len(struct.shape))) for struct in found]

    def _put(self, leaf: PyTree) -> jax.Array:
        array = leaf.jax() if isinstance(leaf, JaxTensor) else leaf
        if not isinstance(array, jax.Array):
            # A copy, as the caller may write to its batch while the step still runs; not by `device_put`, whose Python
            # costs twice as much.
            host = np.array(host_array(array, rounds=True), order="C")
            return jax.make_array_from_callback(host.shape, self.sharding(host.ndim), host.__getitem__)
        return jax.device_put(array, self.sharding(array.ndim))
