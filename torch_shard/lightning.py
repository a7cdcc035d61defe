"""Lightning's `Trainer` on a mesh: trainer and `LightningModule` stay as they are, and a compiled step trains.

This module needs `lightning` (or else `pytorch_lightning`), and is imported when it is asked for:
`ts.lightning.OnMesh`. Tried with lightning 2.6.6.
"""

# Lightning annotates its strategies in part, and is there under two names.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import signal
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import Mesh
from torch import nn
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import current_mode
from torch_shard._common.patching import patched
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._interop import torch_view
from torch_shard._sharding import ShardingPlan, check_mesh
from torch_shard._state import TrainState
from torch_shard._train import ApplyStep, TrainStep, make_apply
from torch_shard._trainers import (
    Plan,
    Updates,
    check_step_options,
    evaluation_options,
    precision_options,
    resolve_plan,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ImportError:
        try:
            import pytorch_lightning as pl
        except ImportError as error:
            raise ImportError("torch_shard.lightning needs lightning: pip install 'torch_shard[lightning]'.") from error

__all__ = ["OnMesh"]

_BY_TRAINER = {
    "accumulate_steps": "accumulate_grad_batches of the Trainer",
    "clip_grad_norm": "gradient_clip_val of the Trainer",
    "clip_grad_value": "gradient_clip_val of the Trainer, with gradient_clip_algorithm='value'",
    "compute_dtype": "precision='bf16-mixed' of the Trainer",
}
"""Options of a step that are said otherwise."""

_NO_GRADIENTS = "gradients are never on the host; a loop with ts.make_train_step(..., watch='*') has their norms"

_GRADIENT_HOOKS = {
    "backward": "the step computes gradients as torch.autograd does",
    "on_before_backward": "the step computes loss and gradients as one; change the loss in training_step",
    "on_after_backward": _NO_GRADIENTS,
    "on_before_optimizer_step": _NO_GRADIENTS,
    "on_before_zero_grad": "it is called before the update, and here the update is one with the loss; "
    "on_train_batch_end is called after it",
    "configure_gradient_clipping": "gradient_clip_val of the Trainer clips",
    "optimizer_step": "the update is in the program; lr_scheduler_step and on_train_batch_end are called after it",
    "optimizer_zero_grad": "a step keeps no gradients",
}
"""Hooks around what is one program here, with what is there instead."""

_CHANGES_EACH_STEP = (
    "optimizers",
    "lr_scheduler_configs",
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
)
"""What a Trainer has that a compiled step would keep as it was when it was captured."""


# ---- what a step of a module does besides computing ----


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that the program gives."""

    position: int
    dtype: torch.dtype


@dataclasses.dataclass
class _Notes:
    """What the step of a module does with tensors, as the capture has seen it.

    Attributes:
        logged: Calls of `log`: the module, the name, the value and further arguments.
        appended: Items put into lists of the module, by the path of the list.
        assigned: What attributes of the module are set to.
        output: What the step returns.
    """

    logged: list[tuple[Any, str, Any, dict[str, Any]]]
    appended: dict[tuple[Any, ...], list[Any]]
    assigned: dict[str, Any]
    output: Any

    @property
    def key(self) -> Hashable:
        """The same for captures that have seen the same."""
        logged = [(id(module), name, _key(value), _key(options)) for module, name, value, options in self.logged]
        return tuple(logged), _key([self.appended, self.assigned, self.output])


def _key(template: Any) -> Hashable:
    leaves, tree = torch_pytree.tree_flatten(template)
    keys: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, _Slot | str | int | float | complex | None):
            # The repr tells 0.0 and -0.0 apart, the type 1 and True.
            keys.append((type(leaf), repr(leaf)))
        else:
            keys.append(id(leaf))
    return str(tree), tuple(keys)


class _Notebook:
    """The notes of all captures, by number: a program gives the number of its own."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._notes: list[_Notes] = []

    def write(self, notes: _Notes) -> int:
        """The number of such notes."""
        if notes.key not in self._numbers:
            self._numbers[notes.key] = len(self._notes)
            self._notes.append(notes)
        return self._numbers[notes.key]

    def __getitem__(self, number: int) -> _Notes:
        return self._notes[number]


class _Recorder:
    """Takes the tensors of a capture out of what is logged, kept and returned."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.logged: list[tuple[Any, str, Any, dict[str, Any]]] = []

    def template(self, value: Any) -> Any:
        """A value with slots in the places of tensors."""
        return torch_pytree.tree_map(lambda leaf: self._slot(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        self.tensors.append(tensor.detach())
        return _Slot(len(self.tensors) - 1, tensor.dtype)

    def log(self, original: Callable[..., None]) -> Callable[..., None]:
        """What stands in the place of `LightningModule.log`."""

        @functools.wraps(original)
        def log(module: nn.Module, name: str, value: Any, *args: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_OPTIONS, args, strict=False))
            if isinstance(value, int | float | bool):
                value = self._number(value)
            self.logged.append((module, name, self.template(value), options))

        return log

    @staticmethod
    def _number(value: Any) -> torch.Tensor:
        """A number as Lightning takes it; as a constant of the program, whose change is noticed."""
        mode = current_mode()
        if mode is not None and mode.effects is not None:
            value = mode.effects.as_tensors(value)
        return torch.as_tensor(value).to(torch.get_default_dtype())


_LOG_OPTIONS = tuple(pl.LightningModule.log.__annotations__)[2:-1]
"""Names of further arguments of `log`."""


class _Sink:
    """Stands for a list of a module while a step is captured or run, and takes what the step appends.

    What hooks read at the end of an epoch (`self.outputs.append(loss)`) is no part of a program, and its length is
    another one at each step. For a step it is a list that it may add to, and that it may read while it is empty.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: list[Any] = []
        self.appended: list[Any] = []

    def append(self, item: Any) -> None:
        self.appended.append(item)

    def extend(self, items: Any) -> None:
        self.appended.extend(items)

    def __iadd__(self, items: Any) -> _Sink:
        self.extend(items)
        return self

    def _read(self) -> list[Any]:
        if self.items or self.appended:
            raise NotImplementedError(
                f"OnMesh: a step reads the list {self.name}, to which it appends tensors. A compiled step only "
                "appends: read it in a hook, such as on_validation_epoch_end, or keep a tensor in a buffer."
            )
        return []

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._read(), name)


class _Again(Exception):
    """A step does with an attribute what was not foreseen: it is captured again, with the attribute in its place."""


class _Aside:
    """What hooks keep on a module, put aside while its steps are captured and run: programs do not depend on it.

    A capture guards all plain attributes of a module, as any may be read by its forward. Hooks of Lightning write to
    some of them all the time (histories, times, best values), and read what steps have left there.
    """

    def __init__(self) -> None:
        # By name: what a step was seen to read, and to set to tensors.
        self._read: set[str] = set()
        self._written: set[str] = set()
        # By path, for lists.
        self._sinks: dict[tuple[Any, ...], _Sink] = {}
        self._lists_of_tensors: set[tuple[Any, ...]] = set()
        self._other_lists: set[tuple[Any, ...]] = set()
        self._attributes: dict[str, Any] = {}

    @contextlib.contextmanager
    def put(self, module: nn.Module) -> Iterator[None]:
        """Put aside the attributes that no step reads, and lists that only get tensors."""
        attributes = vars(module)
        read_by_steps = _only_read_by_steps(type(module)) - self._written
        stay = read_by_steps | self._read | _OF_LIGHTNING
        self._attributes = {name: value for name, value in attributes.items() if name not in stay}
        for name in self._attributes:
            del attributes[name]

        replaced: list[tuple[Any, Any, list[Any]]] = []
        for path, owner, key in _places_of_lists(module):
            items = owner[key]
            # Until a step was seen to append to it, a list with items may be one that the step reads.
            if path in self._other_lists or (items and path not in self._lists_of_tensors):
                continue
            sink = self._sinks.setdefault(path, _Sink(f"{type(module).__name__}.{path[0]}"))
            sink.items = items
            owner[key] = sink
            replaced.append((owner, key, items))
        try:
            yield
        finally:
            for owner, key, items in replaced:
                owner[key] = items
            # A number that the step has set may be there, which stays.
            for name, value in self._attributes.items():
                attributes.setdefault(name, value)

    @contextlib.contextmanager
    def captured(self, module: nn.Module) -> Iterator[tuple[dict[tuple[Any, ...], list[Any]], dict[str, Any]]]:
        """Gather what a step appends to lists and sets, where tensors are in it.

        Returns:
            Items by the path of their list, and values by name, which are there when the context is left.
        """
        appended: dict[tuple[Any, ...], list[Any]] = {}
        assigned: dict[str, Any] = {}
        before = dict(vars(module))
        for sink in self._sinks.values():
            sink.appended = []
        with patched(nn.Module, "__getattr__", functools.partial(self._getattr, module)):
            yield appended, assigned

        for path, sink in self._sinks.items():
            if _has_tensor(sink.appended):
                self._lists_of_tensors.add(path)
                appended[path] = sink.appended
            elif sink.appended:
                # Numbers: the capture itself appends them again after each step.
                self._other_lists.add(path)
                raise _Again
            sink.appended = []

        for name, value in list(vars(module).items()):
            if value is not before.get(name) and _has_tensor(value):
                self._written.add(name)
                assigned[name] = value
                del vars(module)[name]
                if name in before:
                    vars(module)[name] = before[name]

    def _getattr(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def getattr_(instance: nn.Module, name: str) -> Any:
            if instance is module and name in self._attributes:
                self._read.add(name)
                raise _Again
            return original(instance, name)

        return getattr_


_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
"""Attributes that each module has."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward", "__call__")


@functools.cache
def _only_read_by_steps(cls: type[Any]) -> frozenset[str]:
    """Names that the steps of a module, and functions of its class that they name, read as attributes and never set."""
    read: set[str] = set()
    assigned: set[str] = set()
    # The list grows while it is walked: a function that a step names is followed too.
    functions: list[str] = [*_STEPS]
    for name in functions:
        for owner in cls.__mro__:
            if owner.__module__.split(".")[0] in ("torch", "lightning", "pytorch_lightning", "builtins"):
                continue
            names = set[str]()
            for code in _codes_of(vars(owner).get(name)):
                for each in dis.get_instructions(code):
                    if each.opname in _ATTRIBUTE_READS:
                        names.add(each.argval)
                    elif each.opname == "STORE_ATTR":
                        assigned.add(each.argval)
            functions += names - {*functions}
            read |= names
    return frozenset(read - assigned)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """The plain values of a module that its steps read."""
    read = _only_read_by_steps(type(module)) - _OF_LIGHTNING
    settings: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in read and isinstance(value, bool | int | float | str):
            settings[name] = value
    return settings


_ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _codes_of(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, a property or a method, with that of functions within."""
    if value is None:
        return
    # Where properties, methods, decorated functions and partial functions keep what they call.
    for name in ("fget", "__func__", "__wrapped__", "func"):
        yield from _codes_of(getattr(value, name, None))

    code = getattr(value, "__code__", value)
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes_of(constant)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in torch_pytree.tree_leaves(value))


def _places_of_lists(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any], Any]]:
    """The lists that a module keeps, also within a dict: path, the dict that has it, and the key there."""
    for name, value in vars(module).items():
        if name in _OF_LIGHTNING:
            continue
        if type(value) is list:
            yield (name,), vars(module), name
        elif isinstance(value, dict):
            for key, inner in value.items():
                if type(inner) is list:
                    yield (name, key), value, key


def _reads(function: Any, position: int) -> bool:
    """Tell whether a function may look at an argument, by its code."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or position >= function.__code__.co_argcount:
        return True
    name = function.__code__.co_varnames[position]
    if name in function.__code__.co_cellvars:
        return True
    for instruction in dis.get_instructions(function):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if instruction.opname.startswith("LOAD") and name in names:
            return True
    return False


class OnMesh(pl.strategies.SingleDeviceStrategy):
    """Train on a mesh what Lightning's `Trainer` trains: `Trainer(strategy=ts.lightning.OnMesh(mesh=mesh))`.

    The trainer keeps its loops, loggers, callbacks and checkpoints, and the `LightningModule` is unmodified. Each
    update is one compiled program, and so is each batch of validation, test and prediction. What a step logs, appends
    to a list or keeps in an attribute of the module is logged and kept again after each program, with its values. The
    module is the one that is trained: hooks and callbacks see the values of the last step, on the device `jax`.
    Checkpoints go on in plain Lightning, and back.

    A batch of the loader has the rows of all devices. With `accumulate_grad_batches`, the microbatches of an update run
    with its last one: hooks between them see no outputs yet. Dropout and its kin draw by keys of
    `torch.initial_seed()`, other numbers than torch's.

    Args:
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: How each parameter is split, or a function of (model, mesh) that says so, as the recipes of `ts.plans`. By
            default `fsdp_tp` on a mesh with an axis `model`, and else `fsdp`.
        step_options: Further options of `make_train_step` by name: `remat`, `offload`, `batch_spec`, ...

    Raises:
        TypeError: `step_options` has what the trainer says.

    Example:
        >>> import torch, torch_shard as ts
        >>> import lightning
        >>> class Net(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         loss = self.layer(batch).square().mean()
        ...         self.log("train_loss", loss)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> strategy = ts.lightning.OnMesh(mesh=ts.make_mesh(batch=8))
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> trainer = lightning.Trainer(max_epochs=1, strategy=strategy, enable_model_summary=False, **quiet)
        >>> net = Net()
        >>> trainer.fit(net, torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=8))
        >>> trainer.global_step, net.layer.weight.device
        (4, device(type='jax', index=0))
    """

    strategy_name = "torch_shard"

    def __init__(self, *, mesh: Mesh, plan: Plan | None = None, step_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(device="cpu")
        self.mesh = check_mesh(mesh)
        self._plan = plan
        self._step_options = check_step_options("OnMesh", step_options, _BY_TRAINER)
        self._notebook = _Notebook()
        self._aside = _Aside()
        self._updates: Updates | None = None
        self._applies: dict[Hashable, ApplyStep] = {}
        self._state_to_evaluate: TrainState | None = None
        self._microbatches: list[dict[str, PyTree]] = []
        self._settings: dict[str, Any] = {}
        self._next_step = 0

    # ---- what is settled before anything runs ----

    @property
    def accelerator(self) -> Any:
        """The CPU: that is where Lightning's own tensors are, whatever the mesh has."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = None if accelerator is None else pl.accelerators.CPUAccelerator()

    def model_to_device(self) -> None:
        """A module goes onto the mesh, when training begins."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Check what is to run, and make the step, which refuses an optimizer that it does not take.

        Args:
            trainer: The trainer.

        Raises:
            NotImplementedError: The trainer or the module asks for what cannot be meant on a mesh.
        """
        module = self.lightning_module
        assert module is not None
        _check(trainer, module)
        super().setup(trainer)
        self._state_to_evaluate = None
        self._microbatches = []
        if any(apply.model is not module for apply in self._applies.values()):
            self._applies = {}
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # In inference mode no tensors of the device jax can be made.
            loop.inference_mode = False
        if trainer.state.fn == "fit":
            self._present_updates().step(trainer.accumulate_grad_batches)

    def teardown(self) -> None:
        """Leave the module on the mesh."""
        self._state_to_evaluate = None
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        _leave_other_signals(self._trainer)

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _present_updates(self) -> Updates:
        module = self.lightning_module
        updates = self._updates
        assert module is not None
        if updates is not None and updates.model is module and updates.optimizer is self.optimizers[0]:
            return updates

        trainer = self._trainer
        clips_values = str(getattr(trainer.gradient_clip_algorithm, "value", "")) == "value"
        clip = "clip_grad_value" if clips_values else "clip_grad_norm"
        options = precision_options(is_bf16=self._is_bf16)
        options[clip] = trainer.gradient_clip_val or None
        options |= self._step_options
        self._updates = Updates(
            module, self._loss_of, self.optimizers[0], mesh=self.mesh, plan=self._resolved_plan(), options=options
        )
        return self._updates

    @property
    def _is_bf16(self) -> bool:
        return self.precision_plugin.precision == "bf16-mixed"

    def _resolved_plan(self) -> ShardingPlan:
        assert self.lightning_module is not None
        return resolve_plan(self._plan, self.lightning_module, self.mesh)

    @property
    def train_step(self) -> TrainStep:
        """The step that trains, to be asked: `report()`, `preview(batch)`, `programs`."""
        if self._updates is None:
            raise RuntimeError("OnMesh: there is a step as soon as there is an optimizer: after trainer.fit().")
        return self._updates.step(self._trainer.accumulate_grad_batches)

    # ---- training ----

    def training_step(self, batch: PyTree, *args: Any) -> Any:
        """Take a microbatch; with the last one of an update, run the step.

        Args:
            batch: A microbatch.
            *args: Its number, if the module's step wants it.

        Returns:
            What the module's step returns for it; None before the last one of an update.
        """
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        if loop.automatic_optimization._skip_backward:
            raise NotImplementedError(
                "OnMesh: a callback runs training_step without training, as StochasticWeightAveraging does to "
                "update BatchNorm. The callback EMAWeightAveraging averages without."
            )
        if loop.batch_idx % trainer.accumulate_grad_batches == 0:
            # Those of an epoch that was left: Lightning forgets their gradients, too.
            self._microbatches = []
            self._settings = _settings_of(trainer.lightning_module)
        microbatch = self._with_numbers("training_step", batch, args)
        if trainer.accumulate_grad_batches > 1:
            microbatch["divisor"] = trainer.accumulate_grad_batches
        self._microbatches.append(microbatch)
        if loop._should_accumulate():
            _expect_no_outputs()
            return None

        self._refuse_changed_settings()
        updates = self._begun()
        microbatches = self._microbatches
        self._microbatches = []
        notes_of_all = self._run(updates, microbatches)["notes"]
        self._next_step = trainer.global_step + 1

        output = None
        for notes, each in zip(notes_of_all, microbatches, strict=True):
            # What is logged is weighted by the rows of its own microbatch.
            if trainer._results is not None:
                trainer._results.batch = each["batch"]
                trainer._results.batch_size = None
            output = self._do_again(notes)
        return output

    def _refuse_changed_settings(self) -> None:
        """Refuse what hooks have changed since the first microbatch, which all of them would see."""
        module = self.lightning_module
        assert module is not None
        for name, value in _settings_of(module).items():
            if self._settings.get(name, value) != value:
                raise NotImplementedError(
                    f"OnMesh: {type(module).__name__}.{name} was {self._settings[name]!r} at the first microbatch of "
                    f"an update, and is {value!r} at the last. They run as one program, for which it must be the same: "
                    "change it between updates, or leave accumulate_grad_batches out."
                )

    def _begun(self) -> Updates:
        """The run, which a first step begins, or a step that comes after a checkpoint was loaded."""
        updates = self._present_updates()
        trainer = self._trainer
        if updates.state is None:
            updates.begin(trainer.accumulate_grad_batches, seed=torch.initial_seed() % 2**32)
            self._next_step = 0
        if trainer.global_step not in (0, self._next_step):
            updates.go_on_from(trainer.global_step)
        self._next_step = trainer.global_step
        return updates

    def _loss_of(self, module: Any, microbatch: dict[str, PyTree]) -> tuple[torch.Tensor, PyTree]:
        """What a microbatch adds to the loss of an update, and what it gives to Lightning."""
        is_read = _reads_outputs(module.trainer, "on_train_batch_end")
        output, notes = self._captured("training_step", None, module, microbatch, "all" if is_read else "loss")
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise NotImplementedError(
                f"OnMesh: {type(module).__name__}.training_step returns {type(output).__name__} without a loss, which "
                "skips the update in Lightning, and a compiled step always updates. Return a tensor, or a dict with "
                "'loss'; a loss of zero has gradients of zero."
            )
        return loss / microbatch.get("divisor", 1), notes

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Do nothing: the step has done it.

        Args:
            closure_loss: Of the step.
            optimizer: Of the module.
            *args: None are needed.
            **options: None are needed.

        Returns:
            The loss.
        """
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Let Lightning run the step, which updates the parameters.

        Args:
            optimizer: Of the module.
            closure: Runs `training_step`.
            model: The module.
            **options: None are needed.

        Returns:
            The loss.
        """
        return closure()

    # ---- evaluation and prediction ----

    def validation_step(self, *args: Any) -> Any:
        """Run the module's step as one compiled program.

        Args:
            *args: A batch, its number and that of its loader, as the module's step wants them.

        Returns:
            What the module's step returns.
        """
        return self._evaluate("validation_step", "on_validation_batch_end", *args)

    def test_step(self, *args: Any) -> Any:
        """Run the module's step as one compiled program.

        Args:
            *args: A batch, its number and that of its loader, as the module's step wants them.

        Returns:
            What the module's step returns.
        """
        return self._evaluate("test_step", "on_test_batch_end", *args)

    def predict_step(self, *args: Any) -> Any:
        """Run the module's step as one compiled program.

        Args:
            *args: A batch, its number and that of its loader, as the module's step wants them.

        Returns:
            What the module's step returns.
        """
        return self._evaluate("predict_step", None, *args)

    def _evaluate(self, kind: str, hook: str | None, batch: PyTree, *args: Any) -> Any:
        loader_number = args[1] if len(args) > 1 else None
        is_read = hook is None or _reads_outputs(self._trainer, hook)
        key = kind, loader_number, is_read
        if key not in self._applies:
            self._applies[key] = self._make_apply(*key)
        apply = self._applies[key]
        numbered = self._with_numbers(kind, batch, args[:1])
        notes = self._run(apply, self._state_for(apply), numbered)
        return self._do_again(notes, on_host=kind == "predict_step")

    def _state_for(self, apply: ApplyStep) -> TrainState:
        if self._trainer.state.fn == "fit":
            state = self._begun().state
            assert state is not None
            return state
        if self._updates is not None and self._updates.model is self.lightning_module:
            return apply.of_model()
        if self._state_to_evaluate is None:
            self._state_to_evaluate = apply.of_model()
        return self._state_to_evaluate

    def _make_apply(self, kind: str, loader_number: int | None, is_read: bool) -> ApplyStep:
        assert self.lightning_module is not None
        return make_apply(
            self.lightning_module,
            mesh=self.mesh,
            plan=self._resolved_plan(),
            fn=functools.partial(self._notes_of, kind, loader_number, "all" if is_read else "none"),
            **evaluation_options(self._step_options, is_bf16=self._is_bf16),
        )

    def _notes_of(self, kind: str, loader_number: int | None, returned: str, model: Any, batch: Any) -> PyTree:
        return self._captured(kind, loader_number, model, batch, returned)[1]

    # ---- what a capture sees of a step, and what is done with it ----

    def _run(self, program: Callable[..., Any], *args: Any) -> Any:
        """Call a program, with what hooks keep on the module put aside."""
        assert self.lightning_module is not None
        while True:
            with contextlib.suppress(_Again), self._aside.put(self.lightning_module):
                return program(*args)

    def _with_numbers(self, kind: str, batch: PyTree, args: Sequence[int]) -> dict[str, PyTree]:
        """A batch with the numbers that a step of a module may ask for, so that they are no constants of a program."""
        trainer = self._trainer
        numbers = {"current_epoch": trainer.current_epoch, "global_step": trainer.global_step}
        if args and _reads(getattr(self.lightning_module, kind), 2):
            numbers["batch_idx"] = args[0]
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        return {"batch": batch, "numbers": tensors}

    def _captured(
        self, kind: str, loader_number: int | None, module: Any, batch: Mapping[str, Any], returned: str
    ) -> tuple[Any, PyTree]:
        """Run a step of a module, while it is captured.

        Args:
            kind: Name of the step.
            loader_number: Of the loader, if there are several.
            module: Whose step it is.
            batch: From `_with_numbers`.
            returned: What is needed of what the step returns: `"all"`, `"loss"` or `"none"`.

        Returns:
            What the step returns; the tensors that are needed after the program, under the number of its notes.
        """
        numbers = batch["numbers"]
        recorder = _Recorder()
        args: list[Any] = [batch["batch"]]
        if pl.utilities.signature_utils.is_param_in_hook_signature(getattr(module, kind), "batch_idx", min_args=2):
            args.append(numbers.get("batch_idx", 0))
        if loader_number is not None:
            args.append(loader_number)

        with contextlib.ExitStack() as stack:
            appended, assigned = stack.enter_context(self._aside.captured(module))
            stack.enter_context(patched(pl.LightningModule, "log", recorder.log))
            for name in ("current_epoch", "global_step"):
                stack.enter_context(patched(pl.Trainer, name, functools.partial(_constant, numbers[name])))
            for name in _CHANGES_EACH_STEP:
                stack.enter_context(patched(pl.Trainer, name, functools.partial(_refused, name, kind)))
            output = getattr(module, kind)(*args)

        if returned == "loss" and isinstance(output, Mapping):
            needed: Any = {"loss": output.get("loss")}
        else:
            needed = None if returned == "none" else output
        notes = _Notes(
            logged=recorder.logged,
            appended=recorder.template(appended),
            assigned=recorder.template(assigned),
            output=recorder.template(needed),
        )
        number = self._notebook.write(notes)
        # A program returns something, whatever the step does.
        tensors = recorder.tensors or [torch.zeros(())]
        return output, {str(number): tensors}

    def _do_again(self, notes_of_program: Mapping[str, Sequence[jax.Array]], *, on_host: bool = False) -> Any:
        """Log and keep what a program gives; returns what the step of the module returns.

        Args:
            notes_of_program: What `_captured` gives, now with arrays.
            on_host: Give tensors of the CPU, where integers have 64 bits.
        """
        ((number, arrays),) = notes_of_program.items()
        notes = self._notebook[int(number)]
        tensors = [to_cpu(array) for array in arrays] if on_host else torch_view(list(arrays))

        def filled(template: Any) -> Any:
            return torch_pytree.tree_map(
                lambda leaf: tensors[leaf.position].to(leaf.dtype) if isinstance(leaf, _Slot) else leaf, template
            )

        for module, name, value, options in notes.logged:
            module.log(name, filled(value), **options)
        for (name, *keys), items in notes.appended.items():
            container = getattr(self.lightning_module, name)
            for key in keys:
                container = container[key]
            container.extend(filled(items))
        for name, value in notes.assigned.items():
            setattr(self.lightning_module, name, filled(value))
        return filled(notes.output)

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with tensors on the CPU: it is one of plain Lightning.

        Args:
            checkpoint: From the trainer.
            filepath: Where to.
            storage_options: As Lightning takes them.
        """
        on_cpu = torch_pytree.tree_map(
            lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, checkpoint
        )
        super().save_checkpoint(on_cpu, filepath, storage_options=storage_options)


def _constant(value: Any, original: Any) -> property:
    return property(lambda trainer: value, getattr(original, "fset", None))


def _refused(name: str, kind: str, original: Any) -> property:
    def refuse(trainer: Any) -> Any:
        raise NotImplementedError(
            f"OnMesh: {kind} asks for trainer.{name}, which would stay as it is now in a compiled step. Ask for it in "
            "a hook around the step, such as on_train_batch_end, where self.log works, too; LearningRateMonitor logs "
            "learning rates."
        )

    return property(refuse)


def _expect_no_outputs() -> None:
    """Let Lightning not warn that a step returns None: it has the losses of microbatches with the last one."""
    pl.loops.optimization.automatic.Closure.warning_cache.add(
        "`training_step` returned `None`. If this was on purpose, ignore this warning..."
    )


def _reads_outputs(trainer: pl.Trainer, hook: str) -> bool:
    """Tell whether somebody has a hook that is given what a step returns."""
    return any(_overrides(each, hook) for each in (trainer.lightning_module, *trainer.callbacks))


def _overrides(owner: Any, hook: str) -> bool:
    return pl.utilities.model_helpers.is_overridden(hook, owner)


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what cannot be meant on a mesh, all at once."""
    name = type(module).__name__
    faults: list[str] = []

    if trainer.precision not in ("32-true", "bf16-mixed"):
        faults.append(f"precision={trainer.precision!r}: use 'bf16-mixed' or '32-true'.")
    if trainer._detect_anomaly:
        faults.append("detect_anomaly=True: ts.find_nan(step, state, batch) names the first value that is not finite.")
    devices = trainer._accelerator_connector._devices_flag
    if devices not in (1, "1", [0], "auto") or trainer.num_nodes > 1:
        faults.append(f"devices={devices!r}, num_nodes={trainer.num_nodes}: leave them out, the mesh says it.")
    if not module.automatic_optimization:
        faults.append(
            f"{name}.automatic_optimization=False: an own loop trains several optimizers, or without them, with "
            "ts.make_train_step(..., trainable=...)."
        )
    if module._compiler_ctx is not None:
        faults.append(f"torch.compile({name}): fit the module itself, the step is compiled as a whole.")
    # What only evaluates calls none of these.
    hooks = _GRADIENT_HOOKS if trainer.state.fn == "fit" else {}
    for hook, instead in hooks.items():
        if _overrides(module, hook):
            faults.append(f"{name}.{hook}: {instead}.")
        for callback in trainer.callbacks:
            if hasattr(pl.Callback, hook) and _overrides(callback, hook):
                faults.append(f"{type(callback).__name__}.{hook}: {instead}.")

    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise NotImplementedError(f"OnMesh: some of what is asked for cannot be meant on a mesh.\n\n{lines}")
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"OnMesh: there are {jax.process_count()} processes, and a trainer on a mesh has one, with all devices of "
            "its host. On several hosts, train with ts.fit."
        )


def _leave_other_signals(trainer: pl.Trainer) -> None:
    """Let the trainer put back only the handlers of signals that it has changed itself.

    It notes the handler of every signal as Python knows it, and sets them all at its end. A handler that a C library
    has set, as libtpu does for SIGPROF, is none that Python knows: the trainer would set the default, which ends the
    process at the next signal.
    """
    connector = trainer._signal_connector
    noted: dict[Any, Any] = connector._original_handlers
    changed = [number for number, handler in noted.items() if signal.getsignal(number) is not handler]
    connector._original_handlers = {number: noted[number] for number in changed}
