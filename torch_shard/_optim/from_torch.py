"""An optimizer of torch as a program: its formulas on stored arrays, its numbers as inputs, its state both ways."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.caller import caller
from torch_shard._common.convert import host_array, struct_of, to_host
from torch_shard._optim.known import refuse_own_step, rule_of
from torch_shard._optim.rule import Scalars, read_numbers
from torch_shard._optim.stored_update import StoredUpdate
from torch_shard._optim.transfers import HostTransfers
from torch_shard._sharding import Layout, Stacks, keep_stacks, whole_stacks

logger = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TorchOptState:
    """What an optimizer of torch keeps.

    Attributes:
        taken: Steps taken by each parameter, int32 `(num_params,)`, in the order of their names: none while no loss
            has reached it.
        kept: Other numbers of each, by torch's name, `(num_params,)`: `mu_product` of NAdam, `eta` of ASGD.
        slots: What is kept for each parameter, by torch's name for it, then by the parameter's: `exp_avg`, ...
    """

    taken: jax.Array
    kept: dict[str, jax.Array]
    slots: dict[str, Mapping[str, jax.Array]]


class TorchOptimizer:
    """An optimizer of torch for the parameters of one model.

    Args:
        optimizer: Of a class in `RULES`. Its numbers are read whenever `numbers` is asked for; which parameter is in
            which group, and its flags, are fixed.
        params: The parameters of the model by name.
        trainable: The names of those that are trained.

    Attributes:
        names: The parameters that it updates.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor], trainable: Sequence[str]
    ) -> None:
        self.optimizer, self.rule = optimizer, rule_of(optimizer)
        names = {id(tensor): name for name, tensor in params.items()}
        self._members = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        self._refuse_strangers()

        trained = frozenset(trainable)
        group_of: dict[str, int] = {}
        for number, members in enumerate(self._members):
            group_of |= {name: number for name in members if name in trained}

        # By name, so that a checkpoint is taken up by an optimizer whose groups are in another order.
        self._group_of = dict(sorted(group_of.items()))
        self.names = tuple(self._group_of)
        self._flags = [self.rule.flags(group) for group in optimizer.param_groups]
        self._shape = self._present_shape()

        self._values: list[list[float]] = []
        self._num_reads = -1  # without the one below
        self.inputs = torch.empty(len(self._members), len(self._names_of_numbers()), dtype=torch.float64)
        self.read()

        ungrouped = [name for name in trainable if name not in self._group_of]
        if ungrouped:
            logger.info(
                "%s: in no parameter group of the optimizer, and so left as they are: %s",
                caller(),
                ", ".join(ungrouped),
            )

        dtypes = {params[name].dtype for name in self._group_of}
        self._dtype = jnp.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else jnp.float32
        self._kept_dtype = jnp.float64 if torch.get_default_dtype() == torch.float64 else jnp.float32  # as in torch

    def _refuse_strangers(self) -> None:
        strangers: list[str] = []
        for number, (group, members) in enumerate(zip(self.optimizer.param_groups, self._members, strict=True)):
            for place, (param, name) in enumerate(zip(group["params"], members, strict=True)):
                if not name:
                    strangers.append(f"  group {number}, parameter {place}, of shape {tuple(param.shape)}")

        if strangers:
            raise ValueError(
                f"{caller()}: the optimizer has parameters that are not the model's:\n\n"
                + "\n".join(strangers[:8])
                + f"\n\nMake it of this model, {type(self.optimizer).__name__}(model.parameters(), ...), after the "
                "model has its last form: .to(dtype), a wrapper or new layers may have replaced its parameters."
            )

    def refuse_replaced(self, params: Mapping[str, torch.Tensor]) -> None:
        """Refuse parameters that are not the model's any more."""
        replaced = [name for param, name in self._named() if params[name] is not param]
        if replaced:
            raise ValueError(
                f"{caller()}: {', '.join(replaced[:8])} of the model was replaced (an assignment, "
                "load_state_dict(assign=True)) after the optimizer was made, which would go on with the tensor of "
                "before, as in torch. Make a new optimizer of this model, and a new step."
            )

    def refuse_others(self, others: set[str], label: str) -> None:
        """Refuse parameters that the step does not train."""
        untrained = [name for _, name in self._named() if name in others]
        if untrained:
            raise ValueError(
                f"{caller()}: the optimizer has parameters that trainable={label!r} leaves out: "
                f"{', '.join(untrained[:8])}{', ...' * (len(untrained) > 8)}. Make it of those parameters alone, or "
                "name more."
            )

    def _named(self) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters of the optimizer in torch's order, with their names."""
        for group, names in zip(self.optimizer.param_groups, self._members, strict=True):
            yield from zip(group["params"], names, strict=True)

    # What is read of torch at each step

    def _names_of_numbers(self) -> list[str]:
        return list(read_numbers(self.rule, self.optimizer.param_groups[0]))

    def _present_shape(self) -> list[tuple[object, ...]]:
        shapes: list[tuple[object, ...]] = []
        for group in self.optimizer.param_groups:
            shapes.append((*map(id, group["params"]), self.rule.flags(group)))
        return shapes

    def read(self) -> dict[str, float]:
        """Read the numbers of the parameter groups into `inputs`.

        Raises:
            ValueError: A group, its parameters or its flags have changed.
            NotImplementedError: The optimizer has got step hooks, or another `step`.
        """
        refuse_own_step(self.optimizer)
        if self._present_shape() != self._shape:
            raise ValueError(
                f"{caller()}: the parameter groups of the optimizer, or flags such as amsgrad, nesterov or whether "
                "there is momentum, have changed since the step was made. Numbers (lr, betas, weight_decay) may change "
                "at any time; for other changes make a new step, with optimizer.load_state_dict("
                "step.export_optimizer(state)) before."
            )

        numbers = [read_numbers(self.rule, group) for group in self.optimizer.param_groups]
        values = [list(group_numbers.values()) for group_numbers in numbers]
        if values != self._values:
            self._values = values
            self.inputs.copy_(torch.tensor(values, dtype=torch.float64))

        # Processes compare their numbers at reads 1, 2, 4, 8, ...: each comparison is a round trip between hosts.
        self._num_reads += 1
        if self._num_reads.bit_count() != 1:
            return {}

        compared: dict[str, float] = {}
        for number, group_numbers in enumerate(numbers):
            compared |= {f"{name} of group {number}": value for name, value in group_numbers.items()}
        return compared

    def note_step(self) -> None:
        """Let schedulers know that a step was taken, as `optimizer.step()` does."""
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    # In programs

    def init(self, params: Mapping[str, Any]) -> TorchOptState:
        """The state at step 0, of parameters by name."""
        slots: dict[str, dict[str, jax.Array]] = {}
        for name, tensor in params.items():
            if name not in self._group_of:
                continue
            flags = self._flags[self._group_of[name]]
            for slot, value in self.rule.slots(tensor, flags).items():
                slots.setdefault(slot, {})[name] = value

        num_params = len(self._group_of)
        numbers = {name: jnp.full((num_params,), value, self._kept_dtype) for name, value in self.rule.kept.items()}
        return TorchOptState(jnp.zeros((num_params,), jnp.int32), numbers, dict[str, Mapping[str, jax.Array]](slots))

    def update(
        self,
        grads: Stacks,
        state: TorchOptState,
        params: Stacks,
        inputs: jax.Array,
        *,
        layout: Layout,
        without: Collection[str] = (),
        transfers: HostTransfers | None = None,
    ) -> tuple[Stacks, TorchOptState]:
        """One step.

        Args:
            grads: Of all parameters.
            state: Donated or not, it is only read.
            params: Stored like `grads`.
            inputs: What `read` has written to `inputs`, `(num_groups, num_numbers)`.
            layout: How results are stored.
            without: Parameters without a gradient: they and what is kept for them stay as they are.
            transfers: Of slots that lie in the host's memory, if some do.
        """
        of_groups, of_params, new_numbers = self._coefficients(state, inputs)

        # A parameter without a gradient takes no step in torch: its count and numbers stay as well.
        is_updated = np.array([name not in without for name in self._group_of], bool)
        new_state = dataclasses.replace(
            state,
            taken=state.taken + is_updated.astype(np.int32),
            kept={name: jnp.where(is_updated, value, state.kept[name]) for name, value in new_numbers.items()},
        )

        places: dict[str, tuple[int, int]] = {}
        for place, (name, group) in enumerate(self._group_of.items()):
            if name not in without:
                places[name] = place, group
        stored_update = StoredUpdate(self.rule, self._flags, of_groups, of_params, places, transfers)

        # Adafactor and Muon look at rows and columns of a matrix, which a fused projection kept in pieces has not.
        slots = cast(dict[str, Stacks], state.slots)
        needs_shapes = not self.rule.by_element and bool(layout.kept)
        if needs_shapes:
            grads, slots, params = whole_stacks((grads, slots, params))
        params, slots = stored_update.updated(grads, slots, params)
        if needs_shapes:
            params, slots = keep_stacks((params, slots), layout)
        return params, dataclasses.replace(new_state, slots=slots)

    def _coefficients(self, state: TorchOptState, inputs: jax.Array) -> tuple[list[Scalars], Scalars, Scalars]:
        """What each group, and in its place each parameter, is updated with; and the numbers kept of each parameter."""
        names, dtype = self._names_of_numbers(), self._dtype
        of_groups: list[Scalars] = []
        for group in range(len(self._members)):
            of_groups.append({name: inputs[group, column].astype(dtype) for column, name in enumerate(names)})

        groups = np.array(list(self._group_of.values()), int)
        numbers = {name: inputs[groups, column].astype(dtype) for column, name in enumerate(names)}
        old_numbers = {name: values.astype(dtype) for name, values in state.kept.items()}
        step = (state.taken + 1).astype(dtype)
        of_params, new_numbers = self.rule.coefficients(step, numbers, old_numbers)
        return of_groups, of_params, {name: new_numbers[name].astype(old.dtype) for name, old in state.kept.items()}

    # To torch and back

    def load(self, values: Mapping[str, Any]) -> TorchOptState | None:
        """The state that the optimizer has in torch, for a run to go on with; None if it has none.

        Args:
            values: Parameters by name, of which shapes are read.
        """
        torch_states = {name: self.optimizer.state.get(p, {}) for p, name in self._named() if name in self._group_of}
        if not any(torch_states.values()):
            return None

        structs = jax.eval_shape(self.init, {name: struct_of(value) for name, value in values.items()})
        taken = np.array([_steps_of(torch_states[name]) for name in self._group_of], np.int32)

        numbers: dict[str, np.ndarray] = {}
        for key, first in self.rule.kept.items():
            of_params = [float(torch_states[name].get(key, first)) for name in self._group_of]
            numbers[key] = np.array(of_params, self._kept_dtype)

        # A parameter that no gradient has reached has no state in torch, and zeros here.
        slots: dict[str, dict[str, Any]] = {}
        for slot, by_name in structs.slots.items():
            slots[slot] = {}
            for name, struct in by_name.items():
                slots[slot][name] = torch_states[name].get(slot, np.zeros(struct.shape, struct.dtype))
        return TorchOptState(taken, numbers, slots)  # pyright: ignore[reportArgumentType]  (host values, to be placed)

    def show(self, names: Collection[str], shown: Callable[[str, str, torch.Tensor], torch.Tensor]) -> None:
        """Put tensors that show a run's state where torch keeps the state of parameters.

        Args:
            names: Of the parameters that have a state; others of this optimizer's have none then.
            shown: Gives the tensor for a key of torch's (`step`, `exp_avg`), the name of the parameter, and a tensor
                on the meta device of the shape and dtype that it has in torch.
        """
        params = {name: param for param, name in self._named() if name in self._group_of}
        structs = jax.eval_shape(self.init, {name: struct_of(param) for name, param in params.items()})
        number = torch.empty((), dtype=torch.get_default_dtype(), device="meta")
        keys = ["step", *self.rule.kept] if self.rule.counts else list(self.rule.kept)

        for name, param in params.items():
            tensors: dict[str, torch.Tensor] = {}
            if name in names:
                tensors = {key: shown(key, name, number) for key in keys}
                for slot, by_name in structs.slots.items():
                    if name in by_name:
                        like = torch.empty(by_name[name].shape, dtype=param.dtype, device="meta")
                        tensors[slot] = shown(slot, name, like)

            # As torch has it: a parameter that keeps nothing is not among the keys of `state`.
            if tensors:
                self.optimizer.state[param] = tensors
            else:
                self.optimizer.state.pop(param, None)

    @property
    def tensors(self) -> list[Any]:
        """What torch keeps of all parameters, in order."""
        tensors: list[Any] = []
        for of_param in self.optimizer.state.values():
            tensors.extend(of_param.values())
        return tensors

    def names_updated(self, state: TorchOptState) -> list[str]:
        """The parameters that have a state in torch, where this is the run's."""
        taken = np.asarray(state.taken)
        return [name for name, steps in zip(self._group_of, taken, strict=True) if steps or self.rule.from_start]

    def names_with_state(self) -> frozenset[str]:
        """The parameters that have a state in torch."""
        return frozenset(name for param, name in self._named() if self.optimizer.state.get(param))

    def state_dict(self, state: TorchOptState) -> dict[str, Any]:
        """The state and the groups as `optimizer.state_dict()` has them: by number, in torch's order, on the CPU."""
        groups = self.optimizer.state_dict()["param_groups"]
        numbers = {name: np.asarray(values) for name, values in state.kept.items()}
        taken = np.asarray(state.taken)
        row_of = {name: row for row, name in enumerate(self._group_of)}

        states: dict[int, dict[str, torch.Tensor]] = {}
        for place, (param, name) in enumerate(self._named()):
            row = row_of.get(name)
            if row is None:  # not trained: it stays as it is in torch
                if self.optimizer.state.get(param):
                    states[place] = copy.deepcopy(self.optimizer.state[param])
                continue
            if not taken[row] and not self.rule.from_start:
                continue

            tensors: dict[str, torch.Tensor] = {}
            if self.rule.counts:
                tensors["step"] = torch.tensor(float(taken[row]))
            for key, values in numbers.items():
                tensors[key] = torch.tensor(float(values[row]))
            for slot, by_name in state.slots.items():
                if name in by_name:
                    tensors[slot] = to_host(by_name[name]).to(param.dtype)
            if tensors:
                states[place] = tensors
        return {"state": states, "param_groups": groups}

    def steps_in_torch(
        self,
        params: Mapping[str, jax.Array],
        grads: Mapping[str, jax.Array],
        state: TorchOptState,
        clip: Callable[[list[torch.nn.Parameter]], None],
        *,
        is_moved: bool = False,
    ) -> dict[str, jax.Array]:
        """What torch's own optimizer makes of these parameters, in one step; of gradients moved by one rounding."""
        copies = {name: torch.nn.Parameter(to_host(array)) for name, array in params.items()}
        groups: list[dict[str, Any]] = []
        for group, members in zip(self.optimizer.param_groups, self._members, strict=True):
            groups.append({**group, "params": [copies[name] for name in members if name in copies]})
        kind: Any = type(self.optimizer)
        other = kind(groups)

        states = self.state_dict(state)["state"]
        for place, (_, name) in enumerate(self._named()):
            if place in states and name in copies:
                other.state[copies[name]] = states[place]

        rounding = self.rule.rounding if is_moved else 0.0
        generator = torch.Generator().manual_seed(0)
        for name, grad in grads.items():
            tensor = to_host(grad)
            if rounding:
                offsets = 2 * torch.rand(tensor.shape, generator=generator) - 1
                tensor = tensor.mul(1 + rounding * offsets).to(tensor.dtype)
            copies[name].grad = tensor

        clip(list(copies.values()))
        other.step()
        return {name: jnp.asarray(host_array(copy.detach())) for name, copy in copies.items()}


def _steps_of(state: Mapping[str, Any]) -> float:
    """How many steps torch has taken with a parameter; 1 or more of an optimizer that does not count."""
    return float(state["step"]) if "step" in state else float(bool(state))
