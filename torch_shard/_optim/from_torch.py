"""An optimizer of torch as a program: its formulas on stored arrays, its numbers as inputs, its state both ways."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

import copy
import dataclasses
import functools
import itertools
import logging
import operator
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
from torch_shard._sharding import HostTransfers, Layout, Stacks, keep_stacks, whole_stacks

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
        groups = ((n, number) for number, own in enumerate(self._members) for n in own if n in trained)
        self._group_of = dict(sorted(groups))  # another order of the groups takes up the same states
        self.names = tuple(self._group_of)
        self._flags = [self.rule.flags(group) for group in optimizer.param_groups]
        self._shape = self._present_shape()
        self._values: list[list[float]] = []
        self._num_reads = -1  # without the one below
        self.inputs = torch.empty(len(self._members), len(self._names_of_numbers()), dtype=torch.float64)
        self.read()
        if alone := [name for name in trainable if name not in self._group_of]:
            logger.info(
                "%s: in no parameter group of the optimizer, and so left as they are: %s", caller(), ", ".join(alone)
            )
        dtypes = {params[name].dtype for name in self._group_of}
        self._dtype = jnp.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else jnp.float32
        self._kept_dtype = jnp.float64 if torch.get_default_dtype() == torch.float64 else jnp.float32  # as in torch

    def _refuse_strangers(self) -> None:
        found = [
            f"  group {number}, parameter {at}, of shape {tuple(group['params'][at].shape)}"
            for number, (group, members) in enumerate(zip(self.optimizer.param_groups, self._members, strict=True))
            for at, name in enumerate(members)
            if not name
        ]
        if found:
            raise ValueError(
                f"{caller()}: the optimizer has parameters that are not the model's:\n\n"
                + "\n".join(found[:8])
                + f"\n\nMake it of this model, {type(self.optimizer).__name__}(model.parameters(), ...), after the "
                "model has its last form: .to(dtype), a wrapper or new layers may have replaced its parameters."
            )

    def refuse_replaced(self, params: Mapping[str, torch.Tensor]) -> None:
        """Refuse parameters that are not the model's any more."""
        if found := [name for param, name in self._named() if params[name] is not param]:
            raise ValueError(
                f"{caller()}: {', '.join(found[:8])} of the model was replaced (an assignment, "
                "load_state_dict(assign=True)) after the optimizer was made, which would go on with the tensor of "
                "before, as in torch. Make a new optimizer of this model, and a new step."
            )

    def refuse_others(self, others: set[str], label: str) -> None:
        """Refuse parameters that the step does not train."""
        if found := [name for _, name in self._named() if name in others]:
            raise ValueError(
                f"{caller()}: the optimizer has parameters that trainable={label!r} leaves out: "
                f"{', '.join(found[:8])}{', ...' * (len(found) > 8)}. Make it of those parameters alone, or name more."
            )

    def _named(self) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters of the optimizer in torch's order, with their names."""
        for group, names in zip(self.optimizer.param_groups, self._members, strict=True):
            yield from zip(group["params"], names, strict=True)

    # What is read of torch at each step

    def _names_of_numbers(self) -> list[str]:
        return list(read_numbers(self.rule, self.optimizer.param_groups[0]))

    def _present_shape(self) -> list[tuple[object, ...]]:
        groups = self.optimizer.param_groups
        return [(*map(id, group["params"]), self.rule.flags(group)) for group in groups]

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
        values = [list(own.values()) for own in numbers]
        if values != self._values:
            self._values = values
            self.inputs.copy_(torch.tensor(values, dtype=torch.float64))
        self._num_reads += 1
        if self._num_reads.bit_count() != 1:
            return {}
        return {f"{name} of group {i}": value for i, own in enumerate(numbers) for name, value in own.items()}

    def note_step(self) -> None:
        """Let schedulers know that a step was taken, as `optimizer.step()` does."""
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    # In programs

    def init(self, params: Mapping[str, Any]) -> TorchOptState:
        """The state at step 0, of parameters by name."""
        slots: dict[str, dict[str, jax.Array]] = {}
        for name, tensor in params.items():
            if name in self._group_of:
                for slot, value in self.rule.slots(tensor, self._flags[self._group_of[name]]).items():
                    slots.setdefault(slot, {})[name] = value
        num = len(self._group_of)
        kept = {name: jnp.full((num,), value, self._kept_dtype) for name, value in self.rule.kept.items()}
        return TorchOptState(jnp.zeros((num,), jnp.int32), kept, dict[str, Mapping[str, jax.Array]](slots))

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
        of_groups, own, kept = self._coefficients(state, inputs)
        moves = np.array([name not in without for name in self._group_of], bool)
        new = dataclasses.replace(
            state,
            taken=state.taken + moves.astype(np.int32),
            kept={name: jnp.where(moves, value, state.kept[name]) for name, value in kept.items()},
        )
        given = {n: (at, group) for at, (n, group) in enumerate(self._group_of.items()) if n not in without}
        rows = StoredUpdate(self.rule, self._flags, of_groups, own, given, transfers)
        slots = cast(dict[str, Stacks], state.slots)
        needs_shapes = not self.rule.by_element and bool(layout.kept)
        if needs_shapes:
            grads, slots, params = whole_stacks((grads, slots, params))
        params, slots = rows.updated(grads, slots, params)
        if needs_shapes:
            params, slots = keep_stacks((params, slots), layout)
        return params, dataclasses.replace(new, slots=slots)

    def _coefficients(self, state: TorchOptState, inputs: jax.Array) -> tuple[list[Scalars], Scalars, Scalars]:
        """What each group, and in its place each parameter, is updated with; and the numbers kept of each parameter."""
        names, dtype = self._names_of_numbers(), self._dtype
        of_groups: list[Scalars] = [
            {name: inputs[group, at].astype(dtype) for at, name in enumerate(names)}
            for group in range(len(self._members))
        ]
        groups = np.array(list(self._group_of.values()), int)
        numbers = {name: inputs[groups, at].astype(dtype) for at, name in enumerate(names)}
        kept = {name: values.astype(dtype) for name, values in state.kept.items()}
        own, kept = self.rule.coefficients((state.taken + 1).astype(dtype), numbers, kept)
        return of_groups, own, {name: kept[name].astype(old.dtype) for name, old in state.kept.items()}

    # To torch and back

    def load(self, values: Mapping[str, Any]) -> TorchOptState | None:
        """The state that the optimizer has in torch, for a run to go on with; None if it has none.

        Args:
            values: Parameters by name, of which shapes are read.
        """
        found = {name: self.optimizer.state.get(p, {}) for p, name in self._named() if name in self._group_of}
        if not any(found.values()):
            return None
        fresh = jax.eval_shape(self.init, {name: struct_of(value) for name, value in values.items()})
        taken = np.array([_steps_of(found[name]) for name in self._group_of], np.int32)
        kept = {
            key: np.array([float(found[name].get(key, first)) for name in self._group_of], self._kept_dtype)
            for key, first in self.rule.kept.items()
        }
        slots = {
            slot: {name: found[name].get(slot, np.zeros(s.shape, s.dtype)) for name, s in by_name.items()}
            for slot, by_name in fresh.slots.items()
        }
        return TorchOptState(taken, kept, slots)  # pyright: ignore[reportArgumentType]  (host values, to be placed)

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
        for name, param in params.items():
            tensors: dict[str, torch.Tensor] = {}
            if name in names:
                keys = (*(("step",) if self.rule.counts else ()), *self.rule.kept)
                tensors = {key: shown(key, name, number) for key in keys}
                for slot, by_name in structs.slots.items():
                    if name in by_name:
                        like = torch.empty(by_name[name].shape, dtype=param.dtype, device="meta")
                        tensors[slot] = shown(slot, name, like)
            if tensors:
                self.optimizer.state[param] = tensors
            else:
                self.optimizer.state.pop(param, None)

    @property
    def tensors(self) -> list[Any]:
        """What torch keeps of all parameters, in order."""
        values = map(operator.methodcaller("values"), self.optimizer.state.values())
        return list(itertools.chain.from_iterable(values))

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
        kept = {name: np.asarray(values) for name, values in state.kept.items()}
        taken, places = np.asarray(state.taken), {name: at for at, name in enumerate(self._group_of)}
        found: dict[int, dict[str, torch.Tensor]] = {}
        for place, (param, name) in enumerate(self._named()):
            at = places.get(name)
            if at is None and (present := self.optimizer.state.get(param)):  # not trained: it stays as it is in torch
                found[place] = copy.deepcopy(present)
            if at is None or not (taken[at] or self.rule.from_start):
                continue
            own = {"step": torch.tensor(float(taken[at]))} if self.rule.counts else {}
            own |= {key: torch.tensor(float(values[at])) for key, values in kept.items()}
            own |= {s: to_host(values[name]).to(param.dtype) for s, values in state.slots.items() if name in values}
            found |= {place: own} if own else {}
        return {"state": found, "param_groups": groups}

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
        moved = self.rule.rounding if is_moved else 0.0
        draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(0))
        copies = {name: torch.nn.Parameter(to_host(array)) for name, array in params.items()}
        groups = [
            {**group, "params": [copies[name] for name in members if name in copies]}
            for group, members in zip(self.optimizer.param_groups, self._members, strict=True)
        ]
        kind: Any = type(self.optimizer)
        other = kind(groups)
        found = self.state_dict(state)["state"]
        for place, (_, name) in enumerate(self._named()):
            if place in found and name in copies:
                other.state[copies[name]] = found[place]
        for name, grad in grads.items():
            own = to_host(grad)
            copies[name].grad = own.mul(1 + moved * (2 * draw(own.shape) - 1)).to(own.dtype) if moved else own
        clip(list(copies.values()))
        other.step()
        return {name: jnp.asarray(host_array(copy.detach())) for name, copy in copies.items()}


def _steps_of(state: Mapping[str, Any]) -> float:
    """How many steps torch has taken with a parameter; 1 or more of an optimizer that does not count."""
    return float(state["step"]) if "step" in state else float(bool(state))
