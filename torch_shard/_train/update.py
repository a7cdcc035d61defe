"""The optimizer of a step, of torch or of optax: its state, one update within the program and by name, and norms."""

# optax has no stubs. JAX annotates its functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.host_memory import to_device
from torch_shard._common.types import PyTree
from torch_shard._device import JaxTensor, to_array
from torch_shard._entries import Holdings
from torch_shard._optim import (
    AverageState,
    HostTransfers,
    TorchOptimizer,
    averaged,
    check_optimizer,
    clip_in_torch,
    in_optimizer,
    init_narrow,
    inner_state,
    narrowed,
    refuse_eager_step,
    run_by_name,
    widened,
)
from torch_shard._sharding import Stacks, as_dicts, make_matcher
from torch_shard._state import StateLayout, TrainState, global_norm
from torch_shard._train.facts import agree_on_numbers
from torch_shard._train.live_optimizer import LiveOptimizer
from torch_shard._train.options import StepOptions


class Update:
    """An optimizer, and how it updates the parameters that a step trains.

    Attributes:
        optimizer: As it was given.
        inputs: Tensors whose values a program is given at each call.
    """

    def __init__(self, optimizer: object, held: Holdings, trained: frozenset[str] | None, options: StepOptions) -> None:
        check_optimizer(optimizer)
        self._options, self._torch, self._live = options, None, None
        if isinstance(optimizer, torch.optim.Optimizer):
            names = list(held.training(trained).trainable)
            self._torch = TorchOptimizer(optimizer, held.params, names)
            self._torch.refuse_others(set(held.trainable) - set(names), options.label)
        self.optimizer: Any = optimizer
        self.inputs: tuple[torch.Tensor, ...] = () if self._torch is None else (self._torch.inputs,)

    @property
    def _of_optax(self) -> optax.GradientTransformationExtraArgs:
        if isinstance(self.optimizer, optax.MultiSteps):  # hands on what it is given, and is no transformation itself
            return optax.GradientTransformationExtraArgs(self.optimizer.init, cast(Any, self.optimizer.update))
        return optax.with_extra_args_support(self.optimizer)

    def init(self, params: Any) -> PyTree:
        """The state at step 0, of parameters by name."""
        init = self.optimizer.init if self._torch is None else self._torch.init
        state = init(params) if self._options.moment_dtype is None else init_narrow(init, params)
        return self._with_average(state, params, jnp.copy)  # arrays of their own, as a step donates each once

    def _with_average(self, state: PyTree, params: Mapping[str, Any], copied: Callable[[Any], Any]) -> PyTree:
        """The state, with averages that begin as copies of the parameters where `ema` asks for them."""
        if self._options.ema is None:
            return state
        names = params if self._torch is None else self._torch.names
        return AverageState(state, {name: copied(params[name]) for name in names})

    def present(self, values: Mapping[str, torch.Tensor]) -> PyTree | None:
        """The state that an optimizer of torch has in torch; None if it has not stepped, or is of optax."""
        if self._torch is None or (state := self._torch.load(values)) is None:
            return None
        return self._with_average(_as_arrays(state), values, torch.Tensor.detach)

    def refuse_replaced(self, held: Holdings) -> None:
        """Refuse an optimizer of torch whose parameters are not the model's any more."""
        if self._torch is not None:
            self._torch.refuse_replaced(held.params)

    def read(self, mesh: Mesh) -> None:
        """Read the numbers of the parameter groups into `inputs`, the same in all processes."""
        if self._torch is not None:
            agree_on_numbers(self._torch.read(), mesh)

    def follow(self, opt_state: PyTree) -> None:
        """Let an optimizer of torch show a state that was just made.

        Args:
            opt_state: Of this optimizer; None before its first step in this run.
        """
        if self._torch is None:
            return
        self._live = LiveOptimizer(self._torch)
        self._live.follow(opt_state)
        self._live.show([] if opt_state is None else self._torch.names_updated(inner_state(opt_state)))
        if refuse_eager_step not in self.optimizer._optimizer_step_pre_hooks.values():
            self.optimizer.register_step_pre_hook(refuse_eager_step)

    def follow_step(self, opt_state: PyTree, without_grad: Iterable[str]) -> None:
        """Let an optimizer of torch, and its schedulers, know that a step was taken.

        Args:
            opt_state: After it.
            without_grad: Parameters that it has not updated.
        """
        if self._torch is None:
            return
        self._torch.note_step()
        if self._live is None:
            self.follow(opt_state)
        else:
            self._live.follow(opt_state)
            self._live.note_step(frozenset(without_grad))

    @property
    def is_loaded(self) -> bool:
        """Tell whether a state was loaded into the optimizer of torch since, or written to its state."""
        return self._live is not None and self._live.is_changed()

    def loaded(self, opt_state: PyTree, params: Mapping[str, torch.Tensor]) -> PyTree | None:
        """The state that the optimizer of torch has, with the averages of the run; None if it has none."""
        assert self._torch is not None
        if (state := self._torch.load(params)) is None:
            return None
        found = _as_arrays(state)
        return AverageState(found, opt_state.ema) if isinstance(opt_state, AverageState) else found

    def follow_loaded(self, opt_state: PyTree) -> None:
        """Show the state of the run again, now that what was loaded is in it."""
        assert self._torch is not None
        assert self._live is not None
        names = self._torch.names_with_state()
        self._live.leave_replaced()
        self._live.follow(opt_state)
        self._live.show(names)

    def average(self, opt_state: PyTree) -> Mapping[str, jax.Array]:
        """The averages of the parameters, by name."""
        if not isinstance(opt_state, AverageState):
            raise ValueError("averaged: the state has no averages. Make its step with ema=0.999, or another decay.")
        return opt_state.ema

    def state_dict(self, opt_state: PyTree) -> dict[str, Any]:
        """The state as torch has it."""
        if self._torch is None:
            raise TypeError(
                "export_optimizer: the step was made with an optax transformation, whose state is state.opt_state. "
                "Only a step that was made with an optimizer of torch gives its state back to torch."
            )
        return self._torch.state_dict(inner_state(opt_state))

    def in_program(
        self,
        state: TrainState,
        grads: Stacks,
        params: Stacks,
        *,
        layout: StateLayout,
        loss: jax.Array,
        inputs: Sequence[jax.Array],
        without_grad: Sequence[str],
        transfers: HostTransfers | None,
    ) -> tuple[Stacks, PyTree]:
        """Parameters and the optimizer's state after one update, which computes in float32.

        Args:
            state: Before it.
            grads: Clipped, of the trained parameters.
            params: The trained parameters.
            layout: How they are stored.
            loss: Of the batch.
            inputs: What the program is given beside state and batch, the values of `inputs` last.
            without_grad: Parameters that the loss does not reach, which torch skips.
            transfers: Of the state that lies in the host's memory, if some does.
        """
        is_narrow, decay = self._options.moment_dtype is not None, self._options.ema
        before = widened(state.opt_state) if is_narrow else state.opt_state
        own = inner_state(before)

        def update(grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> PyTree:
            with in_optimizer("update"):
                updates, new = self._of_optax.update(grads, opt_state, params, value=loss)
            updated: PyTree = optax.apply_updates(params, updates)
            return {**updated, **{name: params[name] for name in without_grad}}, new

        how: Any = {"layout": layout.trained, "transfers": transfers}
        if self._torch is None:
            updated, after = cast(tuple[Stacks, PyTree], run_by_name(update, grads, own, params, loss, **how))
        else:
            updated, after = self._torch.update(grads, own, params, inputs[-1], without=without_grad, **how)
        if decay is not None:
            after = AverageState(after, averaged(before.ema, updated, decay))
        if is_narrow:  # by a key that no step has, as their numbers are below 2**31
            key = jax.random.fold_in(jax.random.fold_in(state.key, np.uint32(2**32 - 1)), state.step)
            after = narrowed(after, layout.structs.opt_state, key)
        return updated, after

    def by_name(
        self,
        opt_state: PyTree,
        grads: Mapping[str, jax.Array],
        params: Mapping[str, jax.Array],
        loss: jax.Array,
        *,
        moved: bool = False,
    ) -> dict[str, jax.Array]:
        """The parameters after one update, as torch's own optimizer or optax makes them, an entry at a time.

        With `moved`, those of gradients moved by one rounding of the optimizer's own arithmetic; none where that is not
        narrow.
        """
        if moved and (self._torch is None or not self._torch.rule.rounding):
            return {}
        options, opt_state = self._options, to_device(inner_state(opt_state))
        opt_state = widened(opt_state) if options.moment_dtype is not None else opt_state
        if self._torch is not None:
            clip = functools.partial(clip_in_torch, max_norm=options.clip_grad_norm, max_value=options.clip_grad_value)
            return self._torch.steps_in_torch(params, grads, opt_state, clip, is_moved=moved)

        def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> PyTree:
            clipped = options.clip(grads, global_norm(grads))
            return optax.apply_updates(params, self._of_optax.update(clipped, opt_state, params, value=loss)[0])

        return cast(dict[str, jax.Array], jax.jit(update)(grads, as_dicts(opt_state), params))


def _as_arrays(opt_state: PyTree) -> PyTree:
    """A state with arrays in place of tensors of the device."""

    def as_array(leaf: Any) -> Any:
        return jnp.copy(to_array(leaf)) if isinstance(leaf, JaxTensor) else leaf  # eager tensors share theirs

    return jax.tree.map(as_array, opt_state)


def watched_modules(globs: Iterable[str], params: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each module that is watched."""
    within: dict[str, list[str]] = {}
    for name in params:
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            within.setdefault(".".join(parts[:depth]), []).append(name)
    found: dict[str, list[str]] = {}
    for glob in globs:
        own = {module: names for module, names in within.items() if make_matcher(glob)(module)}
        if not own:
            raise ValueError(
                f"{caller()}: watch has {glob!r}, which is not a module with parameters that are trained. There are "
                f"{', '.join(list(within)[:8])}{', ...' * (len(within) > 8)}."
            )
        found |= own
    return found


def norms_of(
    modules: Mapping[str, list[str]], grads: Mapping[str, jax.Array], change: Callable[[str], jax.Array]
) -> dict[str, jax.Array]:
    """`grad_norm/MODULE` and `update_norm/MODULE`, L2 norms as scalars."""
    found: dict[str, jax.Array] = {}
    for module, names in modules.items():
        found[f"grad_norm/{module}"] = global_norm([grads[name] for name in names])
        found[f"update_norm/{module}"] = global_norm([change(name) for name in names])
    return found
