"""The state of a training run: what it holds, which of it is stored together, and where it lies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike
from rich.filesize import decimal
from rich.text import Text

from torch_shard._common.caller import caller
from torch_shard._common.convert import host_array, struct_of
from torch_shard._common.host_memory import is_pinned, pinned
from torch_shard._common.printed import InNotebooks, aligned, starred
from torch_shard._common.specs import describe_spec
from torch_shard._common.types import PyTree
from torch_shard._common.validate import named
from torch_shard._device import put, put_rows
from torch_shard._entries import Holdings, unsaved_buffers
from torch_shard._optim import AverageState, in_optimizer, is_average, is_narrow, narrow_like, parameter_of, run_by_name
from torch_shard._scan import Siblings, stack_layout
from torch_shard._sharding import ResolvedPlan, Stacks, as_dicts, stack_dicts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TrainState(InNotebooks):
    """All that a training run carries from step to step: a pytree of sharded arrays.

    The entries of repeated layers are stored as rows of one array; `state.params[name]` is a row, and as a pytree the
    leaves are the stored arrays. `dict(state.params)` gives the plain dict of rows, and
    `dataclasses.replace(state, params=...)` takes one.

    Attributes:
        step: Number of steps taken, int32 scalar.
        params: Trainable parameters by `state_dict` name; a tie stands under the first of its names.
        frozen: Parameters with `requires_grad=False`, by name.
        buffers: Buffers by name, those that are not in the `state_dict` too.
        opt_state: State of the optimizer; moments are stored like their parameters, and sharded like them or as the
            step's `optimizer_plan` says. Of steps with `trainable=`, the state of each one's optimizer by what it
            trains.
        key: Random key of the run; step `n` draws from `jax.random.fold_in(key, n)`.
        num_batches: Number of batches seen, int32 scalar: where the run stands in its data. It is `step`, unless a
            step was skipped.
        unsaved: Names of the buffers that are not in the module's `state_dict` (`persistent=False`).
        wide: Names of the entries that are int64 in torch, and in JAX only with `jax_enable_x64`.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> state = step.init(seed=0)
        >>> sorted(state.params), state.params["weight"].shape, int(state.step)
        (['bias', 'weight'], (1, 4), 0)
    """

    step: jax.Array
    params: Mapping[str, jax.Array]
    frozen: Mapping[str, jax.Array]
    buffers: Mapping[str, jax.Array]
    opt_state: Any
    key: jax.Array
    num_batches: jax.Array
    unsaved: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    wide: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __repr__(self) -> str:
        counts = [f"{len(getattr(self, kind))} {kind}" for kind in KINDS if getattr(self, kind)]
        arrays = [leaf for leaf in jax.tree.leaves(self) if isinstance(getattr(leaf, "sharding", None), Sharding)]
        arrays = [leaf for leaf in arrays if not is_pinned(leaf.sharding)]
        size = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in arrays)
        return f"TrainState({', '.join([*self._stands(), *counts, f'{decimal(size)} a device'])})"

    def __rich__(self) -> Text:
        """What notebooks show: the line of `repr`, and the first entries as they are stored."""
        entries = [entry for kind in KINDS for entry in _stored_entries(getattr(self, kind))]
        more = [f"and {len(entries) - _SHOWN:,} more"] if len(entries) > _SHOWN else []
        return Text("\n".join([repr(self), *aligned(entries[:_SHOWN]), *more]) if entries else repr(self))

    def _stands(self) -> list[str]:
        """Where the run stands, as far as the host can know it."""
        if not isinstance(self.step, jax.Array) or isinstance(self.step, jax.core.Tracer):
            return ["of shapes"]
        return ["donated"] if self.step.is_deleted() else [f"step={int(self.step)}"]

    @property
    def tensors(self) -> Stacks:
        """Everything that the module holds, by name."""
        return Stacks.merged(self.params, self.frozen, self.buffers)


KINDS = ("params", "frozen", "buffers")

_SHOWN = 16
"""Stored entries that a notebook shows of a state."""


def _stored_entries(held: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, shape, dtype and spec of each stored array; layers in one array have a star for their number."""
    groups = held.layout.groups if isinstance(held, Stacks) else [(name,) for name in held]
    arrays = held.arrays if isinstance(held, Stacks) else held.values()
    for group, array in zip(groups, arrays, strict=True):
        name = group[0] if len(group) == 1 else starred(group[0])
        sharding = getattr(array, "sharding", None)
        spec = describe_spec(sharding.spec) if isinstance(sharding, NamedSharding) else ""
        yield name, str(jnp.shape(array)), str(getattr(array, "dtype", "")), spec


def with_key(structs: TrainState) -> TrainState:
    """A state of shapes with that of a random key, where it has that of its words; a state of arrays as it is."""
    key: Any = structs.key
    if not isinstance(key, jax.ShapeDtypeStruct) or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return structs
    wanted = jax.eval_shape(lambda: jax.random.key(0))
    made: Any = jax.ShapeDtypeStruct((), wanted.dtype, sharding=key.sharding)
    return dataclasses.replace(structs, key=made)


class StateLayout:
    """The storage of the states of one step.

    Attributes:
        params: Which trainable parameters are stored together; `frozen` and `buffers`.
        trained: Those of them that the step trains.
        shardings: A `TrainState` with the sharding of each stored array.
        updated: Where the optimiser has trainable parameters and their gradients: as its own state lies.
        structs: A `TrainState` with shape, dtype and sharding of each, the key as its words.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        held: Holdings,
        plan: ResolvedPlan,
        init_optimizer: Callable[[Any], PyTree],
        *,
        groups: list[Siblings],
        moments: ResolvedPlan | None = None,
        trained: Collection[str] | None = None,
        offloads: bool = False,
    ) -> None:
        self._offloads = offloads
        self._plan, self._init_optimizer, self._moments = plan, init_optimizer, moments or plan
        layout = stack_layout(model, held.all, groups, plan.kept, stages=plan.stages)
        self.params, self.frozen, self.buffers = map(layout.restricted, held.kinds)
        self._tensors = {n: struct_of(t) for n, t in held.all.items()}
        self.trained = self.params if trained is None else self.params.restricted(trained)
        replicated = NamedSharding(plan.mesh, PartitionSpec())
        number: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)  # a state of structs is a state to JAX
        words: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        entries = {n: struct.update(sharding=plan.entries[n].sharding) for n, struct in self._tensors.items()}
        self.structs = TrainState(
            step=number,
            **{kind: Stacks.from_dict(entries, getattr(self, kind)) for kind in KINDS},
            opt_state=self._opt_structs(replicated),
            key=words.update(sharding=replicated),
            num_batches=number,
            unsaved=unsaved_buffers(model),
            wide=tuple(name for name, tensor in held.all.items() if tensor.dtype is torch.int64),
        )
        self.shardings = jax.tree.map(lambda struct: struct.sharding, self.structs)
        self._structure: object = jax.tree.structure(self.structs)
        stored = (self._moments.of_group(group, self.trained) for group in self.trained.groups)
        self.updated = Stacks(self.trained, stored)

    def _opt_structs(self, replicated: NamedSharding) -> PyTree:
        """Stored shapes; what the optimiser keeps under a parameter's name, in its shape, lies like it.

        With `offloads`, in the host's memory: matrices and larger, in torch's own form.
        """
        params = {name: self._tensors[name] for name in self.trained.names}

        def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            name = parameter_of(path, leaf, params)
            sharding = replicated if name is None else self._moments.entries[name].sharding
            if self._offloads and name is not None and len(leaf.shape) > 1 and name not in self.trained.forms:
                sharding = sharding if is_average(path) else pinned(sharding)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        with in_optimizer("init"):
            structs = jax.eval_shape(self._init_optimizer, params)
        return stack_dicts(jax.tree_util.tree_map_with_path(placed, structs), self.trained)

    def place(
        self,
        kind: str,
        values: Mapping[str, PyTree],
        *,
        made: Callable[[Stacks], None] | None = None,
        taken: set[int] | None = None,
    ) -> Stacks:
        """Tensors or arrays by name onto their shards, rows straight to their place in the stored array.

        Args:
            kind: `params`, `frozen` or `buffers`.
            values: Each name has a value when its turn comes.
            made: Is given each stored array as soon as it is there, after which the values of its names may go.
            taken: Where the memory lies that the state has already; more is noted there. Entries whose equal values
                lie in one place (as after `load_state_dict` from another layer) get one each.
        """
        layout = getattr(self, kind)
        faults = [fault for name in layout.names if (fault := self._fault(name, values))]
        if faults or len(values) != len(layout.names):
            unknown = [f"  {name}: not among the {kind} of the model" for name in values if name not in layout.places]
            raise ValueError(f"{caller()}: {kind} of the state do not fit.\n\n" + "\n".join(faults + unknown))

        def stored() -> Iterator[jax.Array]:
            for group in layout.groups:
                form = layout.forms.get(group[0])
                rows = [values[name] if form is None else form.store(values[name]) for name in group]
                with named(group[0]):
                    array = _placed(rows, self._plan.of_group(group, layout))
                array = array if taken is None else _own(array, taken)
                if made is not None:
                    del rows
                    made(Stacks(layout.restricted(group), (array,)))
                yield array

        return Stacks(layout, stored())

    def _fault(self, name: str, values: Mapping[str, PyTree]) -> str | None:
        if name not in values:
            return f"  {name}: missing"
        wanted, found = ((s.shape, s.dtype) for s in (self._tensors[name], struct_of(values[name])))
        return None if wanted == found else f"  {name}: must be {wanted[0]} {wanted[1]}, got {found[0]} {found[1]}"

    def with_trained(self, params: Stacks, trained: Stacks) -> Stacks:
        """Parameters with new values for those that the step trains."""
        if self.trained is self.params:
            return trained
        others = params.part(name for name in self.params.names if name not in trained)
        return Stacks.from_dict(Stacks.merged(trained, others), self.params)

    def start(self, held: Mapping[str, Stacks], opt_state: PyTree, seed: int) -> TrainState:
        """The state at step 0 with these arrays."""
        words = np.asarray(jax.random.key_data(jax.random.key(seed)))
        replicated: Any = self.shardings.step
        zeros = (put(np.zeros((), np.int32), replicated) for _ in range(2))
        # `put`, where device_put would not reach the devices of other processes
        return dataclasses.replace(
            self.shardings,
            step=next(zeros),
            **held,
            opt_state=opt_state,
            key=jax.random.wrap_key_data(put(words, replicated)),
            num_batches=next(zeros),
        )

    def init_opt_state(self, params: Stacks) -> PyTree:
        """The optimiser's state for these parameters."""

        def init_opt_state(params: Stacks) -> PyTree:
            return run_by_name(self._init_optimizer, Stacks.from_dict(params, self.trained), layout=self.trained)

        return cast(PyTree, jax.jit(init_opt_state, out_shardings=self.shardings.opt_state)(params))

    def normal(self, state: TrainState) -> TrainState:
        """A state as it is stored: dicts as stacks, numbers as arrays, moments in the memory where they are kept."""
        state = as_arrays(state, self.structs)
        if jax.tree.structure(state) == self._structure:
            return dataclasses.replace(state, opt_state=self._in_memory(state.opt_state))
        if isinstance(cast(object, state.step), jax.ShapeDtypeStruct):
            return with_key(self.structs)  # shapes, from before a capture chose this layout: nothing to be moved
        changed: dict[str, Any] = {}
        held = {kind: getattr(state, kind) for kind in KINDS}
        new = {k: v for k, v in held.items() if not isinstance(v, Stacks) or v.layout != getattr(self, k)}
        kept = [array for kind, values in held.items() if kind not in new for array in values.arrays]
        taken = {address_of(array) for array in (*kept, *jax.tree.leaves(state.opt_state))} - {0}
        for kind, values in new.items():
            changed[kind] = self.place(kind, values, taken=taken)
        if jax.tree.structure(state.opt_state) != jax.tree.structure(self.shardings.opt_state):
            stored = stack_dicts(as_dicts(state.opt_state), self.trained, jnp.stack)
            self.check_opt_state(stored)
            narrow = narrow_like(stored, self.structs.opt_state)
            changed["opt_state"] = jax.device_put(narrow, self.shardings.opt_state)
        else:
            changed["opt_state"] = self._in_memory(state.opt_state)
        return dataclasses.replace(state, **changed)

    def _in_memory(self, opt_state: PyTree) -> PyTree:
        """The optimizer's state, perhaps of a step with other `offload`: on the host what is kept there."""

        def moved(leaf: Any, own: NamedSharding) -> Any:
            is_there = not isinstance(leaf, jax.Array) or is_pinned(leaf.sharding) == is_pinned(own)
            return leaf if is_there else jax.device_put(leaf, own)

        return jax.tree.map(moved, opt_state, self.shardings.opt_state)

    def check_opt_state(self, opt_state: PyTree) -> None:
        """Refuse what the optimiser did not make for these parameters by name."""
        own = self.structs.opt_state
        found, wanted = (cast(object, jax.tree.structure(tree)) for tree in (opt_state, own))
        pairs = zip(jax.tree.leaves(opt_state), jax.tree.leaves(own), strict=False)
        if found != wanted or any(jnp.shape(a) != s.shape or (is_narrow(a) and not is_narrow(s)) for a, s in pairs):
            averages = (isinstance(state, AverageState) for state in (opt_state, own))
            raise ValueError(
                f"{caller()}: opt_state does not fit the optimiser and the parameters. "
                f"{differs_by('ema', *averages)}Make it from the parameters "
                "by name, optimizer.init(dict(state.params)), or take that of step.init(); one with moments in "
                "bfloat16 is for a step with moment_dtype."
            )


def differs_by(option: str, found: bool, wanted: bool) -> str:
    """What to do where a state was made with an option of the step and is to be taken without, or the reverse."""
    given, own = (("with" if is_given else "without") + f" {option}=" for is_given in (found, wanted))
    return "" if found == wanted else f"The state was made {given}, and this step {own}: make the step {given} too. "


def _placed(rows: list[torch.Tensor | ArrayLike], sharding: NamedSharding) -> jax.Array:
    """A stored array that the step may donate: what lies on the jax device keeps its own."""
    if len(rows) > 1:
        return put_rows(rows, sharding)
    array = put(rows[0], sharding)
    return jnp.copy(array) if isinstance(rows[0], torch.Tensor) and rows[0].device.type != "cpu" else array


def _own(array: jax.Array, taken: set[int]) -> jax.Array:
    """An array whose memory no other of the state has, as a step donates each once."""
    place = address_of(array)
    if place in taken:
        return jnp.copy(array)
    taken |= {place} - {0}
    return array


def address_of(array: object) -> int:
    """Where the first of its shards here lies; 0 if it takes none."""
    if not isinstance(array, jax.Array) or not array.size:
        return 0
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def as_arrays(state: TrainState, like: TrainState | None = None) -> TrainState:
    """A state whose leaves are arrays, also where a number was put: `state.opt_state.hyperparams["learning_rate"]`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    if all(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for _, leaf in leaves):
        return state
    sharding: Any = next(leaf.sharding for _, leaf in reversed(leaves) if isinstance(leaf, jax.Array))
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    same = like is not None and jax.tree.structure(like) == cast(object, structure)
    structs = jax.tree.leaves(like) if same else [None] * len(leaves)
    pairs = zip(leaves, structs, strict=True)
    return cast(
        TrainState,
        jax.tree.unflatten(structure, [_as_array(path, leaf, like, replicated) for (path, leaf), like in pairs]),
    )


def _as_array(path: tuple[Any, ...], leaf: Any, like: Any, replicated: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    name = jax.tree_util.keystr(path).removeprefix(".")
    if not isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic | torch.Tensor):
        raise TypeError(f"{caller()}: {name} of the state must be an array or a number, got {type(leaf).__name__}.")
    host = host_array(leaf if isinstance(leaf, torch.Tensor) else np.asarray(leaf), rounds=True)
    if like is not None and not np.can_cast(host.dtype, like.dtype, "same_kind"):
        raise TypeError(f"{caller()}: {name} of the state must be {like.dtype}, got {leaf!r:.99}.")
    return put(host if like is None else host.astype(like.dtype), replicated)
