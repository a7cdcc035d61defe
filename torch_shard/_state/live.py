"""A module whose parameters and buffers are those of the state that was made last.

The module is a view: an entry is read when somebody reads it, and nothing is copied at a step. What is written to an
entry waits here, and is in the state of the next step.
"""

# PyTorch and JAX annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Sharding
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_shard._common.caller import caller
from torch_shard._common.convert import struct_of
from torch_shard._device import JaxTensor, Source, Storage, put, replace_in_place, to_array
from torch_shard._entries import holdings, marked_like, memory_span, put_into_scripted
from torch_shard._hosts import PeerError, exchange
from torch_shard._sharding import Layout, ResolvedPlan, Stacks
from torch_shard._state.state import KINDS, TrainState, address_of

_LIVE = weakref.WeakKeyDictionary[nn.Module, "LiveModel"]()
"""By module, what it follows; a module holds it through its tensors, too."""

_MADE_BY = "_live_model"
"""Attribute of a state: a weak reference to the `LiveModel` that follows it. Another state made of it has none."""


class Entry(Source):
    """What a live tensor reads and writes: an array of the last state by name.

    Args:
        name: For errors, as `state_dict` has it.
        like: A tensor of its shape and dtype.
    """

    def __init__(self, name: str, like: torch.Tensor) -> None:
        struct = struct_of(like)
        self.name, self.shape, self.dtype = name, tuple(struct.shape), np.dtype(struct.dtype)
        self.torch_dtype = like.dtype

    def _stored(self) -> jax.Array:
        """The array in which the present values are, with others perhaps."""
        raise NotImplementedError

    def _value(self) -> jax.Array:
        raise NotImplementedError

    @property
    def content(self) -> object:
        return self._stored()

    def is_own(self, array: jax.Array) -> bool:
        return address_of(array) in {address_of(self._stored())} - {0}

    def read(self) -> jax.Array:
        stored = self._stored()
        if stored.is_deleted():
            raise RuntimeError(
                f"{self.name} has no values: they went into a step that failed, or into a program of your own that "
                "took their state back. Restore a checkpoint (Checkpointer.restore), or begin anew from saved weights: "
                "model.load_state_dict(torch.load(path)) before a new step.init."
            )
        if not (stored.is_fully_addressable or stored.is_fully_replicated):
            self._meet()
        return self._value()

    def _meet(self) -> None:
        """Wait for all processes, each of which has a part of the values; one that does not come is an error."""
        try:
            exchange(lambda: None, f"the reading of {self.name}")
        except PeerError as error:
            error.add_note(
                f"{self.name} lies on the devices of several processes, so that reading it (state_dict, torch.save, "
                "model(x), print) takes all of them: do it in each, and only write the file in one; or call "
                "ts.export_torch(state, path) in each, which writes in the first."
            )
            raise

    def refuse_missing_grad(self, asking: types.FrameType) -> None:
        """A tensor that is no parameter has no gradient."""


class HasOptimizer(Protocol):
    """A step that has an optimizer of torch, or of optax."""

    @property
    def optimizer_name(self) -> str:
        """For errors."""
        ...

    @property
    def is_loaded(self) -> bool:
        """Tell whether the optimizer's state in torch is another one than that of the run."""
        ...

    def with_loaded(self, state: TrainState) -> TrainState:
        """A state with what was loaded into the optimizer, or written to its state."""
        ...


class LiveModel:
    """What a module follows.

    A tensor of the module shows an entry through its storage, which others may have as well (`p.detach()`,
    `state_dict()`). Where the module gets another tensor for a name, the storage of before keeps the values of then.

    Attributes:
        num_steps: Training steps since the state began.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._state: TrainState | None = None
        self._current: TrainState | None = None
        self._placed: dict[str, Stacks] = {}
        self._written: dict[str, jax.Array] = {}
        self._plan: ResolvedPlan | None = None
        self._read: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}  # of a model that has gone to the CPU and back, without its int64
        self._memory: dict[str, tuple[StorageWeakRef, tuple[int, int]]] = {}
        self._storages: dict[str, weakref.ref[Storage]] = {}
        self.num_steps = 0
        self._optimizers: dict[str, weakref.ref[HasOptimizer]] = {}
        closing = weakref.finalize(model, self._close)
        closing.atexit = False

    # ---- what entries ask ----

    def _kind_of(self, name: str) -> Stacks | Mapping[str, jax.Array]:
        if name in self._placed:
            return self._placed[name]
        for kind in KINDS:
            entries = getattr(self._current, kind, {})
            if name in entries:
                return entries
        raise RuntimeError(f"{name}: the state that the model follows has no such entry. Make a new step of the model.")

    def stored(self, name: str) -> jax.Array:
        """The array in which an entry is; the entry itself, where it was written to."""
        if (written := self._written_to(name)) is not None:
            return written
        entries = self._kind_of(name)
        if not isinstance(entries, Stacks):
            return entries[name]
        number, _ = entries.layout.places[name]
        return entries.arrays[number]

    def value(self, name: str) -> jax.Array:
        """The present values of an entry, in torch's shape."""
        self._read.add(name)
        written = self._written_to(name)
        return self._kind_of(name)[name] if written is None else written

    def _written_to(self, name: str) -> jax.Array | None:
        """What was written to an entry, unless that is in a state that is being made."""
        return None if name in self._placed else self._written.get(name)

    def write(self, name: str, value: jax.Array) -> None:
        """Let an entry have these values from now on; a copy of them, as a step takes back what is in its state."""
        if self._plan is None:
            self._written[name] = jnp.copy(value)
            return
        sharding = self._plan[name]
        is_here_alone = value.is_fully_addressable and not sharding.is_fully_addressable
        self._written[name] = put(np.asarray(value) if is_here_alone else jnp.copy(value), sharding)

    # ---- what steps ask ----

    @property
    def state(self) -> TrainState | None:
        """The last state, with what was written since."""
        if self._state is None:
            return None
        self.look()
        return self._with_writes()

    def is_of(self, state: TrainState) -> bool:
        """Tell whether a state is the last one."""
        return state is self._state or state is self._current

    def present(self, state: TrainState, *, to_train: bool = False) -> TrainState:
        """A state as its model has it: with what was written to the model since.

        Args:
            state: Any.
            to_train: Refuse another state than the model's while there are writes, which would be lost.

        Raises:
            ValueError: There are, and the state is another one.
        """
        if self.is_of(state):
            return self._with_writes()
        names = [*self._written] if to_train and self._state is not None else []
        names += [f"the state of {step.optimizer_name}" for step in self._steps if to_train and step.is_loaded]
        if names:
            assert self._state is not None
            shown = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
            raise ValueError(
                f"{caller()}: the model was written to ({shown}) since the state that it follows was made, which is "
                f"{_shown(self._state)}, and this step is given {_shown(state)}: another one, so that what was written "
                "would be lost. Give the state that the last step or init returned; or write to the model after the "
                "step that is to begin from this state; or dataclasses.replace(state, params=...) alone."
            )
        return state

    @property
    def _steps(self) -> list[HasOptimizer]:
        return [step for ref in self._optimizers.values() if (step := ref()) is not None]

    def _with_writes(self) -> TrainState:
        assert self._current is not None
        if self._written:
            self._current = with_written(self._current, self._written)
            self._written = {}
        for step in self._steps:
            if step.is_loaded:
                self._current = step.with_loaded(self._current)
        return self._current

    def note_step(self, label: str, step: HasOptimizer) -> None:
        """Ask this step whether its optimizer was written to, which trains what the label says."""
        self._optimizers[label] = weakref.ref(step)

    def is_led_by(self, step: HasOptimizer) -> bool:
        """Tell whether a step has made, restored or taken the state that the model follows."""
        return any(each is step for each in self._steps)

    # ---- states that begin ----

    def settle(self) -> None:
        """Let what a storage shows be its own, where the module has another tensor by now, as of a layer that moved."""
        model = self._model()
        assert model is not None
        held = holdings(model).all
        self._let_go(name for name in self._storages if name not in held or not self._is_bound(name, held[name]))

    def _let_go(self, names: Iterable[str]) -> None:
        for name in [*names]:
            storage = self._storages.pop(name, lambda: None)()
            source = None if storage is None else storage.source
            if storage is not None and isinstance(source, _ModelEntry) and source.live is self and source.name == name:
                with contextlib.suppress(RuntimeError):  # of a step that has failed there is nothing to keep
                    storage.leave()

    def abandon(self) -> None:
        """Take back what was begun by `hold`: the module has the state of before, or is on the CPU again."""
        model, placed = self._model(), self._placed
        assert model is not None
        kept: dict[str, Any] = {} if self._current is None else jax.eval_shape(dict, self._current.tensors)
        for name, tensor in holdings(model).all.items():
            if name in placed and not (name in kept and _fits(tensor, kept[name])):
                tensor.data = tensor.detach().to("cpu")
        self._placed = {}

    def _close(self) -> None:
        """The module is gone, and no step will come: keep no more than the entries, for who has some."""
        if self._current is not None:
            self._state = self._current = dataclasses.replace(self._current, opt_state=None)

    def hold(self, stacks: Stacks, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have these entries from now on, of a state that is being made; the module's own values go.

        Args:
            stacks: One stored array.
            tensors: Those of the whole module, which is walked through once for all arrays.
        """
        for name in stacks.layout.names:
            self._placed[name] = stacks
        self._bind({name: tensors[name] for name in stacks.layout.names})

    def follow(self, state: TrainState, plan: ResolvedPlan, *, is_step: bool = False) -> None:
        """Follow a state that was just made."""
        self._state = self._current = state
        self._plan, self._placed, self._written = plan, {}, {}
        self.num_steps = self.num_steps + 1 if is_step else 0
        object.__setattr__(state, _MADE_BY, weakref.ref(self))
        if self._read:
            self._note_changed()

    def _note_changed(self) -> None:
        """Count a write to all tensors that were read, so that a graph which holds them refuses its backward pass."""
        model, read, self._read = self._model(), self._read, set()
        if model is not None:
            tensors = [tensor for name, tensor in holdings(model).all.items() if name in read]
            torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])

    def bind(self) -> None:
        """Let all tensors of the module be those of the state."""
        model = self._model()
        assert model is not None
        assert self._current is not None
        held = self._current.tensors
        self._bind({name: tensor for name, tensor in holdings(model).all.items() if name in held})

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        model = self._model()
        assert model is not None
        modules = dict(model.named_modules())
        _refuse_shared(tensors)
        for name, tensor in tensors.items():
            if self._is_bound(name, tensor):
                continue
            dtype = self._dtypes.setdefault(name, tensor.dtype)
            entry = _ModelEntry(self, name, tensor, dtype)
            if isinstance(tensor, JaxTensor) and tensor.dtype == dtype:
                self._storages[name] = weakref.ref(_follow(tensor, entry))
                continue
            if (span := memory_span(tensor)) is not None:
                self._memory[name] = StorageWeakRef(tensor.untyped_storage()), span
            grad = tensor.grad if tensor.is_leaf else None
            storage = Storage.of(entry)
            self._storages[name] = weakref.ref(storage)
            new = live_class(type(tensor))(storage, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                new._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
            replace_in_place(tensor, marked_like(tensor, new))
            put_into_scripted(modules, name, tensor)
            if grad is not None:
                tensor.grad = grad.to("jax")

    @property
    def memory_of_before(self) -> dict[str, tuple[int, int]]:
        """Where entries lay on the host, of those whose memory somebody still has: a view, a NumPy array."""
        return {name: span for name, (memory, span) in self._memory.items() if not memory.expired()}

    def _is_bound(self, name: str, tensor: torch.Tensor) -> bool:
        source = tensor._storage.source if isinstance(tensor, JaxTensor) else None
        return isinstance(source, _ModelEntry) and source.live is self and source.name == name

    def look(self) -> None:
        """Take what is in the places of entries and is not of the state as written: it is what torch would go on with.

        `model.to("cpu")`, `p.data = other`, a buffer that was assigned, another run with this layer.
        """
        model = self._model()
        if model is None or self._current is None:
            return
        held = holdings(model).all
        names = [name for name in self._current.tensors if name in held and not self._is_bound(name, held[name])]
        if not names:
            return
        structs = jax.eval_shape(dict, self._current.tensors)
        if any(held[name].is_meta or not _fits(held[name], structs[name]) for name in names):
            return  # a step says what is wrong with them
        values = {name: to_array(held[name].detach()) for name in names}  # all, before the first is written
        self._let_go(names)
        for name, value in values.items():
            self.write(name, value)
        self._bind({name: held[name] for name in names})


class _ModelEntry(Entry):
    """A parameter or a buffer of a module."""

    def __init__(self, live: LiveModel, name: str, like: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(name, like)
        self.live, self.torch_dtype = live, dtype

    def _stored(self) -> jax.Array:
        return self.live.stored(self.name)

    def _value(self) -> jax.Array:
        return self.live.value(self.name)

    def write(self, value: jax.Array) -> None:
        self.live.write(self.name, value)

    def refuse_missing_grad(self, asking: types.FrameType) -> None:
        where = asking.f_globals.get("__name__", "")
        if not self.live.num_steps or where.startswith(_READ_GRADS_HARMLESSLY):
            return
        if where == "torch.nn.utils.clip_grad":
            while asking.f_code.co_name.startswith("<") and asking.f_back is not None:  # a comprehension
                asking = asking.f_back
            raise RuntimeError(
                f"{asking.f_code.co_name}: the parameters have no gradients to clip: those of a compiled "
                "step stay in its program, which has used them already. Leave this call out, and let the step clip: "
                "make_train_step(..., clip_grad_norm=1.0), or clip_grad_value=. The norm before clipping is "
                'metrics["grad_norm"].'
            )
        if where.startswith("torch.amp") or where.startswith("torch.cuda.amp"):
            raise RuntimeError(
                "GradScaler: the parameters have no gradients to scale: those of a compiled step stay in its program. "
                "Leave the scaler out: make_train_step(..., compute_dtype=torch.bfloat16) needs none, and step(state, "
                "batch, skip_grad_norm=math.inf) skips steps whose gradients are not finite."
            )
        raise RuntimeError(
            f"{self.name}.grad: there is no gradient of an eager backward pass, and those of a compiled step stay in "
            "its program, so that None would be wrong here. To clip: make_train_step(..., clip_grad_norm=1.0) or "
            'clip_grad_value=. Norms: metrics["grad_norm"], and of modules watch=. To change gradients: '
            "parameter.register_hook. To look at them: ts.jax_value_and_grad, or backward() of a loss of the model "
            'and inputs on the device "jax".'
        )


_READ_GRADS_HARMLESSLY = ("torch.optim.", "torch.nn.modules.", "torch._", "torch_shard.")
"""Modules whose code takes None for a gradient that is not there: `zero_grad`, `Module.to`, copies."""


def _follow(tensor: JaxTensor, source: Source) -> Storage:
    """Let a tensor, and all that share its storage, be of a source."""
    storage = tensor._storage
    if storage.root is storage:
        storage.follow(source)
    else:  # a view of something else, which stays what it is
        tensor._storage = Storage.of(source)
    return tensor._storage


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two entries that are one storage by now: `a.data = b.data`."""
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, JaxTensor):
            first = seen.setdefault(id(tensor._storage), name)
            if first != name:
                raise NotImplementedError(
                    f"{caller()}: {first} and {name} share memory, as after a.data = b.data: in torch a step would "
                    "write to both. A state has an array for each. Give one of them a copy, a.data = b.data.clone(), "
                    "or tie them under one name, module.a = module.b."
                )


@functools.cache
def live_class(kind: type[torch.Tensor]) -> type[JaxTensor]:
    """The class of the live tensor in the place of one of this class: of a subclass of `nn.Parameter` one, too."""
    if kind in (torch.Tensor, nn.Parameter) or issubclass(kind, JaxTensor) or not issubclass(kind, nn.Parameter):
        return JaxTensor
    return type(kind.__name__, (JaxTensor, kind), {"__module__": kind.__module__})


def live_model(model: nn.Module) -> LiveModel:
    """What a module follows, or will."""
    found = _LIVE.get(model)
    if found is None:
        found = _LIVE[model] = LiveModel(model)
    return found


def present_state(state: TrainState) -> TrainState:
    """A state with what was written to the model that follows it."""
    made_by = getattr(state, _MADE_BY, None)
    live = None if made_by is None else made_by()
    return state if live is None or not live.is_of(state) else live.state


def _shown(state: TrainState) -> str:
    """A state in few words."""
    if state.step.is_deleted():
        return "a state that was donated"
    return f"that of step {int(state.step)} ({len(state.tensors)} entries)"


def _fits(tensor: torch.Tensor, wanted: jax.ShapeDtypeStruct) -> bool:
    found = struct_of(tensor)
    return (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def with_written(state: TrainState, written: Mapping[str, jax.Array]) -> TrainState:
    """A state with other values for some entries, stored and laid out as it is."""
    changed: dict[str, Any] = {}
    for kind in KINDS:
        entries = getattr(state, kind)
        if own := {name: value for name, value in written.items() if name in entries}:
            changed[kind] = _entries_with(entries, own) if isinstance(entries, Stacks) else {**entries, **own}
    return dataclasses.replace(state, **changed)


def _entries_with(stacks: Stacks, values: Mapping[str, jax.Array]) -> Stacks:
    layout, arrays = stacks.layout, list(stacks.arrays)
    for number, group in enumerate(layout.groups):
        own = {name: values[name] for name in group if name in values}
        if not own:
            continue
        if len(group) == 1 and group[0] not in layout.forms:
            arrays[number] = own[group[0]]
            continue
        part = Stacks(layout.restricted(group), (arrays[number],))
        update = _program_of_update(part.layout, tuple(own), arrays[number].sharding)
        (arrays[number],) = update(part, own).arrays
    return Stacks(layout, arrays)


@functools.lru_cache(maxsize=256)
def _program_of_update(layout: Layout, names: tuple[str, ...], sharding: Sharding) -> Callable[..., Stacks]:
    """Put entries of these names into a stored array, which stays where it is."""

    def update(part: Stacks, values: Mapping[str, jax.Array]) -> Stacks:
        return part.updated(values)

    return jax.jit(update, out_shardings=Stacks(layout, (sharding,)))
