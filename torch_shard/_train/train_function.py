"""A training step as the user has written it, from `zero_grad()` to `optimizer.step()` and on, as one compiled program.

What comes before `optimizer.step()` is captured as a loss is. What comes after it runs after each step, as it stands,
on tensors of the device `jax`.
"""

# JAX and PyTorch annotate some of their functions in part, and local variables may be anything.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
import operator
import types
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence, Set
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

from torch_shard._capture import LateNumber, is_capturing
from torch_shard._common.caller import error_prefix, public
from torch_shard._common.containers import mapped
from torch_shard._common.types import PyTree
from torch_shard._cost import Preview
from torch_shard._device import JaxTensor, Storage
from torch_shard._entries import entry_places
from torch_shard._loss import flatten_batch
from torch_shard._sharding import PlanFn, ShardingPlan
from torch_shard._state import TrainState, live_model
from torch_shard._train.comparison import Comparison
from torch_shard._train.local_variables import ThereBefore
from torch_shard._train.make import make_train_step
from torch_shard._train.placing import ShardedBatch
from torch_shard._train.split_function import CannotSplitError, Halves, place_in, split_at
from torch_shard._train.train_step import TrainStep
from torch_shard._train.understood import Clipping, GradNorm, Notes, Stepped, memory_of, without_other_steps

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class _Argument:
    """A local variable that is still an argument of the function."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A tensor of the batch."""

    position: int


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A parameter of the model."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A tensor that the program gives, or a number of one."""

    name: str
    dtype: torch.dtype | None
    is_number: bool


@dataclasses.dataclass(frozen=True)
class _Norm:
    """The norm of the gradients."""


@dataclasses.dataclass(frozen=True)
class _Same:
    """The same object at each call."""

    value: Any


_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size),
)
"""Types of values that nobody can change."""


_VARIABLES = "variables "
"""What the name of the metric begins with that has the tensors of local variables."""


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a first run of the function has shown.

    Attributes:
        halves: The function as far as `optimizer.step()`, and the rest.
        clipping: How the gradients are clipped.
        zeroes_after: Whether the rest begins anew with gradients, whatever it does else.
    """

    halves: Halves
    clipping: Clipping
    zeroes_after: bool


@dataclasses.dataclass(frozen=True)
class _Between:
    """What is there after the captured part, for the rest.

    Attributes:
        number: Of this one among those of the function.
        variables: What stands for local variables.
        training: The training flags of the model's modules.
        aliases: Names of tensors that share memory with others.
    """

    number: int
    variables: dict[str, Any]
    training: tuple[bool, ...]
    aliases: frozenset[str]


class _FoundError(BaseException):
    """Ends the first run."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.parts = parts


@public
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: Mesh,
    plan: ShardingPlan | PlanFn,
    seed: int = 0,
    **options: Any,
) -> Callable[[Callable[P, R]], TrainFunction[P, R]]:
    """Compile a training step as you have written it, from `zero_grad()` over `backward()` to `optimizer.step()`.

    What the function does before `optimizer.step()` is captured, once for each shape of its arguments, and becomes one
    program on the mesh with the gradients, the clipping and the update. What it does after it (`scheduler.step()`,
    clamping, an average of the weights, logs, `return`) runs after each call, as it stands, on tensors of the device
    `jax`. Nobody waits for these before they are read.

    The function calls `zero_grad()`, then `backward()` on one scalar or on several, then `clip_grad_norm_` or
    `clip_grad_value_` of all parameters or neither, and `optimizer.step()` once, on a line of its own. It is an error,
    with the line, if it does anything else with gradients. Its arguments are the batch: tensors, arrays, Python numbers
    and containers of them, whose leading dims are split over the mesh.

    Args:
        model: The module that the function trains. From the first call on its parameters and buffers are those of the
            run.
        optimizer: The `torch.optim` optimizer that the function steps. It trains the parameters of its groups.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: How each parameter and buffer is split, by name; or a function of `(model, mesh)`.
        seed: For the random numbers of the run (dropout and its kin), from 0 to 2**32 - 1.
        **options: Others of `make_train_step`: `accumulate_steps=`, `compute_dtype=`, `remat=`, `batch_spec=` (by the
            names of arguments), ...

    Returns:
        A decorator, which gives a `TrainFunction`: it is called as the function is, and returns what that returns.

    Raises:
        TypeError: The optimizer is not one of torch, or an option is unknown.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> @ts.train_step(model, optimizer, mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()))
        ... def train(x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> train(torch.ones(8, 4), torch.ones(8, 1)).shape
        torch.Size([])
    """
    if not isinstance(cast(object, optimizer), torch.optim.Optimizer):
        raise TypeError(
            f"train_step: optimizer is the torch.optim optimizer that the function steps, and not "
            f"{type(optimizer).__name__}. For optax: ts.make_train_step(model, loss_fn, optimizer, ...)."
        )
    if found := sorted({"clip_grad_norm", "clip_grad_value"} & options.keys()):
        raise TypeError(f"train_step: {found[0]} is read from the function, which calls {found[0]}_.")
    return lambda function: TrainFunction(function, model, optimizer, seed, {"mesh": mesh, "plan": plan, **options})


class TrainFunction(Generic[P, R]):
    """A training step that is called as the function that it was made of; see `train_step`.

    Args:
        function: Of the user.
        model: The module that it trains.
        optimizer: That it steps.
        seed: For the random numbers of the run.
        options: Of `make_train_step`.

    Example:
        >>> import torch, torch_shard as ts
        >>> model = torch.nn.Linear(8, 8)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @ts.train_step(model, sgd, mesh=ts.make_mesh(batch=2), plan=ts.plans.fsdp)
        ... def train(x):
        ...     sgd.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     sgd.step()
        ...     return loss
        >>> _ = [train(torch.ones(8, 8)) for _ in range(3)]
        >>> int(train.state.step), train.step.num_compiles
        (3, 1)
        >>> bool(train.prove(torch.ones(8, 8)))
        True
    """

    def __init__(
        self,
        function: Callable[P, R],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        plain = function.__func__ if isinstance(function, types.MethodType) else function
        if not isinstance(plain, types.FunctionType):
            raise TypeError(
                f"train_step: it is put above the definition of a function, and is given {type(function).__name__}. "
                "Other decorators come above it."
            )
        functools.update_wrapper(cast(Any, self), plain)
        self.model, self.optimizer = model, optimizer
        self._given, self._function, self._self = function, plain, getattr(function, "__self__", None)
        self._signature = inspect.signature(function)
        self._seed, self._options = seed, dict(options)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._trained = frozenset(self._names.get(id(parameter), "") for parameter in groups)
        if "" in self._trained:
            raise ValueError(
                f"train_step: the optimizer has parameters that {type(model).__name__} has not. Give the module that "
                "holds all of them, such as nn.ModuleList([first, second])."
            )
        wanting = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if wanting - self._trained and "trainable" not in self._options:
            self._options["trainable"] = sorted(self._trained & wanting)
        self._parts: _Parts | None = None
        self._step: TrainStep | None = None
        self._between: dict[Hashable, _Between] = {}
        """What is there after the captured part, of each program its own."""
        self._has_begun = self._has_told = False

    caller = "train_step"

    # -- calls --

    @error_prefix(None)
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Train by one step.

        Args:
            *args: As the function takes them: the batch.
            **kwargs: As the function takes them.

        Returns:
            What the function returns, with tensors of the device `jax`.
        """
        batch = self.batch(*args, **kwargs)
        step = self._step_for(batch)
        placed = step.put(batch)
        _, metrics = step(self._present(step), placed)
        return self._run_rest(batch, placed, metrics)

    @property
    @error_prefix(None)
    def step(self) -> TrainStep:
        """The `TrainStep` of the last call or `begin`: for `evaluation()`, `Checkpointer`, `report()`."""
        if self._step is None:
            raise ValueError(
                "train_step: the step is made at the first call, or by begin(...) with arguments like its."
            )
        return self._step

    @property
    @error_prefix(None)
    def state(self) -> TrainState:
        """The model's last state: of the last call, or of what was restored or written since."""
        return self._present(self.step)

    def on(self, **options: Any) -> TrainFunction[P, R]:
        """The same function with other options, such as `mesh=`, untrained.

        Args:
            **options: Of `train_step`.
        """
        return TrainFunction(self._given, self.model, self.optimizer, self._seed, {**self._options, **options})

    @error_prefix(None)
    def begin(self, *args: P.args, **kwargs: P.kwargs) -> TrainStep:
        """Make the step for arguments like these, without training: to restore a checkpoint into it.

        Args:
            *args: Like those of a call.
            **kwargs: Like those of a call.

        Returns:
            The `TrainStep`, whose loss is the captured part of the function, and whose batch is `{argument: value}`.
        """
        return self._step_for(self.batch(*args, **kwargs))

    @error_prefix(None)
    def preview(self, *args: P.args, **kwargs: P.kwargs) -> Preview:
        """Compile for arguments like these and say what a call takes of each device: nothing runs.

        Args:
            *args: Like those of a call.
            **kwargs: Like those of a call.
        """
        batch = self.batch(*args, **kwargs)
        return self._step_for(batch).preview(batch)

    @error_prefix(None)
    def prove(self, *args: P.args, **kwargs: P.kwargs) -> Comparison:
        """Compare a call, from the present state, with eager torch on the CPU; nothing changes.

        Args:
            *args: Those of the call.
            **kwargs: Those of the call.
        """
        batch = self.batch(*args, **kwargs)
        step = self._step_for(batch)
        return step.prove(self._present(step), batch)

    def batch(self, *args: Any, **kwargs: Any) -> dict[str, PyTree]:
        """The batch of `step` that arguments are: by their names, with the defaults.

        Args:
            *args: Like those of a call.
            **kwargs: Like those of a call.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        batch = dict(bound.arguments)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flatten_batch(batch)[0]):
            raise NotImplementedError(
                "train_step: an argument requires a gradient, which a step does not give it. Give its detach(), and "
                "take torch.autograd.grad in the function."
            )
        return batch

    def _present(self, step: TrainStep) -> TrainState:
        """The model's last state, or a new one at first."""
        live = live_model(self.model)
        state = live.state
        is_shared = "trainable" in self._options and state is not None and type(state.opt_state) is dict
        if state is None or not (self._has_begun or is_shared or live.is_led_by(step)):
            state = step.init(seed=self._seed)
        self._has_begun = True
        return state

    def _step_for(self, batch: PyTree) -> TrainStep:
        if self._step is None:
            self._parts = self._parts_for(batch)
            clipping = dataclasses.asdict(self._parts.clipping)
            self._step = make_train_step(self.model, self._loss, self.optimizer, **self._options, **clipping)
        return self._step

    def _parts_for(self, batch: PyTree) -> _Parts:
        step = make_train_step(self.model, self._discover, self.optimizer, **self._options)
        try:
            step.apart().lower(step.structs, batch)
        except _FoundError as found:
            return found.parts
        raise AssertionError("the first run has an end")

    # -- the part that is captured --

    def _discover(self, model: nn.Module, batch: dict[str, PyTree]) -> torch.Tensor:
        """Run the function as far as its step, to see where that is and how it clips."""
        notes, frame = self._run(self._function, batch)
        try:
            halves = split_at(self._function, frame)
        except CannotSplitError as error:
            raise NotImplementedError(
                f"train_step: {self._function.__name__} cannot be cut behind optimizer.step(): {error}."
            ) from None
        raise _FoundError(_Parts(halves, notes.clipping, self._zeroes(halves.following, frame)))

    def _zeroes(self, statements: Sequence[ast.stmt], frame: types.FrameType) -> bool:
        """Tell whether statements take all gradients away, whatever else they do."""
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="zero_grad"))):
                    of = _value_of(owner, frame)
                    parameters = of.parameters() if isinstance(of, nn.Module) else ()
                    if of is self.optimizer or {self._names.get(id(p)) for p in parameters} >= self._trained:
                        return True
                case _:
                    pass
            if any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(statement)):
                return False
        return False

    def _run(self, function: types.FunctionType, batch: dict[str, PyTree]) -> tuple[Notes, types.FrameType]:
        notes = Notes(self.model, self.optimizer, self._trained, self._names, function.__code__)
        given = flatten_batch(batch)
        versions = [_version_of(leaf) for leaf in given[0]]
        bound = inspect.BoundArguments(self._signature, collections.OrderedDict(batch))  # pyright: ignore
        args = bound.args if self._self is None else (self._self, *bound.args)
        numbers = _numbers_of(self.optimizer)
        try:
            with notes.taken():
                function(*args, **bound.kwargs)
        except Stepped as stepped:
            if _numbers_of(self.optimizer) != numbers:
                raise NotImplementedError(
                    "train_step: the function writes to optimizer.param_groups before optimizer.step(), and a compiled "
                    "step reads them before it runs. Write to them before the call, or after optimizer.step()."
                ) from None
            now = flatten_batch(batch)
            is_same = len(given[0]) == len(now[0]) and all(map(operator.is_, given[0], now[0]))
            if not is_same or given[1] != now[1] or [_version_of(leaf) for leaf in now[0]] != versions:
                raise NotImplementedError(
                    "train_step: an argument is written before optimizer.step(), and a compiled step gets a copy. "
                    "Write to a clone, or after optimizer.step()."
                ) from None
            return notes, stepped.frame
        raise NotImplementedError(
            f"train_step: {self._function.__name__} returns without optimizer.step() at this call. Each call is one "
            "step: to accumulate gradients, give the large batch and accumulate_steps=."
        )

    def _loss(self, model: nn.Module, batch: dict[str, PyTree]) -> tuple[torch.Tensor, dict[str, PyTree]]:
        assert self._parts is not None
        halves = self._parts.halves
        there_before = ThereBefore()
        before = {name: {**vars(module)} for name, module in self.model.named_modules()}
        with _having_tensors_of(self.model, model):
            notes, frame = self._run(cast(types.FunctionType, halves.head), batch)
        self._check(notes, frame)
        values = {name: frame.f_locals[name] for name in halves.variables}
        if not is_capturing():
            return notes.loss, self._in_eager_torch(values)
        self._tell_of(notes.outside)
        variables = _Variables(batch, notes, there_before)
        template = {name: variables.template(name, value) for name, value in values.items()}
        if self._options.get("accumulate_steps", 1) > 1:
            _refuse_of_microbatches(variables.kept, notes.losses)
        training = tuple(module.training for module in self.model.modules())
        _refuse_attributes(self.model, before, {*halves.tail.__code__.co_names})
        key = _key_of(template), training
        number = self._between[key].number if key in self._between else len(self._between)
        self._between[key] = _Between(number, template, training, variables.aliases)
        return notes.loss, {f"{_VARIABLES}{number}": variables.kept}

    def _tell_of(self, outside: list[torch.Tensor]) -> None:
        others = [tensor for tensor in outside if not isinstance(tensor, JaxTensor)]  # which another step trains
        if others and not self._has_told:
            self._has_told = True
            logger.warning(
                "train_step: %s depends on %d tensors that require a gradient and are none of the model's, of shapes "
                "%s. backward() gives them none here. To train them, too, give the module that holds all of them.",
                self._function.__name__,
                len(others),
                ", ".join(str(tuple(tensor.shape)) for tensor in others[:4]),
            )

    def _check(self, notes: Notes, frame: types.FrameType) -> None:
        """Refuse what is otherwise than at the first call."""
        assert self._parts is not None
        name, halves = self._function.__name__, self._parts.halves
        if not notes.is_zeroed and not self._parts.zeroes_after:
            raise NotImplementedError(
                f"train_step: {name} does not call zero_grad() at each call, so that backward() adds to the "
                "gradients of the call before. Call optimizer.zero_grad() in it; to accumulate, give the large batch "
                "and accumulate_steps=."
            )
        if notes.clipping != self._parts.clipping:
            raise NotImplementedError(
                f"train_step: {name} clips otherwise than at its first call: {notes.clipping} after "
                f"{self._parts.clipping}. A step clips in one way, by a number that stays."
            )
        if place_in(frame) != halves.place:
            raise NotImplementedError(
                f"train_step: {name} comes to optimizer.step() in line {place_in(frame)[0]}, and at its first call "
                f"in line {halves.place[0]}. Write one optimizer.step() for both."
            )
        there = {*frame.f_locals}
        if found := sorted(({*halves.variables} - there) | (halves.unbound & there)):
            raise NotImplementedError(
                f"train_step: {found[0]}, which is used after optimizer.step(), has a value at some calls only. "
                "Give it one before."
            )

    def _in_eager_torch(self, values: dict[str, Any]) -> dict[str, PyTree]:
        """The values of local variables that a program gives, of a run in eager torch."""
        for between in self._between.values():
            kept = dict[str, Any]()
            if _fits(between.variables, values, kept):
                return {f"{_VARIABLES}{between.number}": kept}
        return {}

    # -- the part that runs after each step --

    def _run_rest(self, batch: Mapping[str, PyTree], placed: ShardedBatch, metrics: dict[str, PyTree]) -> R:
        assert self._parts is not None
        name = next(name for name in metrics if name.startswith(_VARIABLES))
        number = int(name.removeprefix(_VARIABLES))
        between = next(between for between in self._between.values() if between.number == number)
        for module, is_training in zip(self.model.modules(), between.training, strict=True):
            if module.training != is_training:
                module.training = is_training

        rebuilt = _Rebuilt(self.model, batch, placed, metrics[name], metrics["grad_norm"])
        variables = {name: rebuilt.value(stand_in) for name, stand_in in between.variables.items()}
        with without_other_steps(self.optimizer):
            returned = self._parts.halves.tail(**variables)
        rebuilt.refuse_writes(between.aliases)
        return returned


class _Rebuilt:
    """Local variables of the part that was captured, with the values of a step."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, PyTree],
        placed: ShardedBatch,
        arrays: Mapping[str, jax.Array],
        norm: jax.Array,
    ) -> None:
        self._model, self._batch, self._arrays = model, batch, arrays
        self._leaves = [
            JaxTensor(Storage(array, _dtype_of(leaf))) if isinstance(leaf, torch.Tensor | np.ndarray) else leaf
            for leaf, array in zip(flatten_batch(batch)[0], placed.arrays, strict=True)
        ]
        self._placed, self._norm = placed.arrays, JaxTensor(Storage(norm))
        self._tensors: dict[str, JaxTensor] = {}
        self._containers: dict[int, Any] = {}

    def value(self, stand_in: Any) -> Any:
        """The value that something stands for; the same object each time."""
        match stand_in:
            case _Argument(name):
                return self._batch[name]
            case _Leaf(position):
                return self._leaves[position]
            case _Entry(name):
                return self._model.get_parameter(name)
            case _Norm():
                return self._norm
            case _Kept(name, dtype, is_number):
                if name not in self._tensors:
                    self._tensors[name] = JaxTensor(Storage(self._arrays[name], dtype))
                return self._tensors[name].item() if is_number else self._tensors[name]
            case _Same(value):
                return value
            case _:
                if id(stand_in) not in self._containers:
                    self._containers[id(stand_in)] = mapped(stand_in, lambda _, item: self.value(item))
                return self._containers[id(stand_in)]

    def refuse_writes(self, aliases: Set[str]) -> None:
        """Refuse writes in place to what is a copy here and is not in torch."""
        leaves = zip(self._leaves, self._placed, strict=True)
        is_written = any(isinstance(leaf, JaxTensor) and leaf.jax() is not array for leaf, array in leaves)
        names = [name for name in aliases & self._tensors.keys() if self._tensors[name].jax() is not self._arrays[name]]
        if is_written or names:
            what = "an argument" if is_written else f"{min(names)}, which is a view of another tensor,"
            raise NotImplementedError(
                f"train_step: {what} is written after optimizer.step(), where it is a copy on the device. Write to a "
                "clone."
            )


class _Variables:
    """Local variables of the part that is captured, for the part that runs after each step.

    Args:
        batch: The arguments.
        notes: Of the run.
        there_before: Tells what was there before it.
    """

    def __init__(self, batch: Mapping[str, PyTree], notes: Notes, there_before: ThereBefore) -> None:
        self._batch, self._notes, self._there_before = batch, notes, there_before
        self._leaves = {id(leaf): position for position, leaf in enumerate(flatten_batch(batch)[0])}
        self._stand_ins: dict[int, Any] = {}
        self._memory: dict[int, list[str]] = {}
        self.kept: dict[str, Any] = {}
        """Tensors, and numbers of tensors, that the program is to give."""

    @property
    def aliases(self) -> frozenset[str]:
        """The names of tensors that share memory with others."""
        return frozenset(name for names in self._memory.values() if len(names) > 1 for name in names)

    def template(self, name: str, value: Any) -> Any:
        """What stands for a value: for the same value the same."""
        if id(value) in self._leaves and not isinstance(value, (int, float)):
            return _Leaf(self._leaves[id(value)])
        if (argument := self._argument(value)) is not None:
            return _Argument(argument)
        if isinstance(value, GradNorm):
            return _Norm()
        if type(value) is LateNumber:
            self.kept[name] = value
            return _Kept(name, None, is_number=True)
        if isinstance(value, _CONSTANT):
            return _Same(value)
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = self._stand_in(name, value)
        return self._stand_ins[id(value)]

    def _argument(self, value: Any) -> str | None:
        if isinstance(value, _CONSTANT):
            return None
        return next((name for name, given in self._batch.items() if given is value), None)

    def _stand_in(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(name, value)
        if value in self._there_before:
            return _Same(value)
        if type(value) in (list, collections.deque) or isinstance(value, (tuple, dict)):
            if not isinstance(value, tuple) and self._there_before.hold(value):
                raise NotImplementedError(
                    f"train_step: {name} is made before optimizer.step(), kept elsewhere, and used after it. Make it "
                    "after optimizer.step()."
                )
            return mapped(value, lambda key, item: self.template(f"{name}[{key!r}]", item))
        raise NotImplementedError(
            f"train_step: {name}, of class {type(value).__name__}, is made before optimizer.step() and used after it, "
            "where it would be that of the first call. Make it after optimizer.step(), or outside of the function."
        )

    def _of_tensor(self, name: str, tensor: torch.Tensor) -> Any:
        if (entry := self._notes.name_of(tensor)) is not None:
            return _Entry(entry)
        if tensor in self._there_before:
            return _Same(tensor)
        if self._notes.is_view_of_model(tensor):
            raise NotImplementedError(
                f"train_step: {name} is a view of a parameter or a buffer of the model, made before optimizer.step() "
                "and used after it, when it has other values. Make it after optimizer.step()."
            )
        if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad):
            raise NotImplementedError(
                f"train_step: {name} may have a gradient, which stays in the program of the step, and is used after "
                "optimizer.step(). Take torch.autograd.grad before it, or use its detach()."
            )
        self.kept[name] = tensor
        self._memory.setdefault(memory_of(tensor), []).append(name)
        return _Kept(name, tensor.dtype, is_number=False)


def _value_of(expression: ast.expr, frame: types.FrameType) -> Any:
    """What a name, or an attribute of one, is in a frame; None for anything else."""
    if any(not isinstance(node, ast.Name | ast.Attribute | ast.expr_context) for node in ast.walk(expression)):
        return None
    try:
        return eval(compile(ast.Expression(expression), "<zero_grad>", "eval"), frame.f_globals, dict(frame.f_locals))
    except (NameError, AttributeError):
        return None


def _version_of(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _dtype_of(leaf: torch.Tensor | np.ndarray) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.empty(0, leaf.dtype)).dtype


def _refuse_attributes(model: nn.Module, before: Mapping[str, Mapping[str, Any]], names: Set[str]) -> None:
    """Refuse plain values that are set on modules, which a capture takes back, if the rest reads them."""
    for path, module in model.named_modules():
        for name in names & vars(module).keys() - {"training"}:
            value = vars(module)[name]
            is_new = name not in before.get(path, {}) or value is not before[path][name]
            if is_new and isinstance(value, _CONSTANT) and type(cast(object, value)) is not LateNumber:
                raise NotImplementedError(
                    f"train_step: the attribute {f'{path}.{name}' if path else name} of the model is set before "
                    "optimizer.step() and used after it. Set it after optimizer.step()."
                )


def _key_of(template: Any) -> Hashable:
    """The same for local variables that are alike."""
    if isinstance(template, dict):
        return type(template), tuple((key, _key_of(item)) for key, item in template.items())
    if isinstance(template, (tuple, list, collections.deque)):
        return type(template), tuple(map(_key_of, template))
    if isinstance(template, _Same):
        value = template.value
        return type(value), repr(value) if isinstance(value, _CONSTANT) else id(value)
    return template


def _fits(stand_in: Any, value: Any, kept: dict[str, Any]) -> bool:
    """Tell whether a value may be the one that something stands for, and note what a program gives of it."""
    match stand_in:
        case _Kept(name, _, is_number):
            kept[name] = value
            return is_number != isinstance(value, torch.Tensor)
        case _Same(same) if isinstance(same, _CONSTANT):
            return type(same) is type(value) and repr(same) == repr(value)
        case dict():
            return (
                isinstance(value, dict)
                and stand_in.keys() == value.keys()
                and all(_fits(each, value[key], kept) for key, each in stand_in.items())
            )
        case list() | tuple() | collections.deque():
            return (
                type(stand_in) is type(value)
                and len(stand_in) == len(value)
                and all(_fits(each, item, kept) for each, item in zip(stand_in, value, strict=True))
            )
        case _:
            return True


def _refuse_of_microbatches(kept: Mapping[str, Any], losses: Sequence[torch.Tensor]) -> None:
    """Refuse local variables of which the step does not give the mean over microbatches, as it does of the loss."""
    for name, value in kept.items():
        if len(losses) != 1 or value is not losses[0]:
            raise NotImplementedError(
                f"train_step: {name} is used after optimizer.step(), and with accumulate_steps= each microbatch has "
                "one of its own. Only the loss is there after the step."
            )


def _numbers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What is set for the groups of parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@contextlib.contextmanager
def _having_tensors_of(model: nn.Module, other: nn.Module) -> Generator[None, None, None]:
    """Let a model hold the parameters and buffers of its copy: the user's function knows the model alone."""
    if model is other:
        yield
        return
    places = list(zip(entry_places(model), entry_places(other), strict=True))
    for (held, name, _), (_, _, tensor) in places:
        held[name] = tensor
    try:
        yield
    finally:
        for (held, name, own), (of_other, same, _) in places:
            of_other[same] = held[name]  # a buffer that forward has put there
            held[name] = own
