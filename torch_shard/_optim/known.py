"""Which optimizers are taken: any of optax; of torch those whose `step()` does what a rule says, and no more."""

# optax has no stubs. JAX annotates its functions in part.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportUnknownMemberType=false

import contextlib
from collections.abc import Generator

import jax
import optax
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._optim.rule import ADAFACTOR, MUON, Rule
from torch_shard._optim.rules import ADADELTA, ADAGRAD, ADAM, ADAMAX, ASGD, NADAM, RADAM, RMSPROP, RPROP, SGD

RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.Adadelta: ADADELTA,
    torch.optim.Adamax: ADAMAX,
    torch.optim.NAdam: NADAM,
    torch.optim.RAdam: RADAM,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.ASGD: ASGD,
    torch.optim.Rprop: RPROP,
    torch.optim.Adafactor: ADAFACTOR,
    torch.optim.Muon: MUON,
}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer; others are refused."""
    kind = type(optimizer)
    if kind not in RULES:
        listed = ", ".join(known.__name__ for known in RULES)
        raise TypeError(
            f"{caller()}: the optimizer is a {kind.__module__}.{kind.__qualname__}, and what its step() does cannot be "
            f"known. Of torch.optim these are taken, not their subclasses: {listed}. For others give an optax "
            "transformation: optax.lbfgs(0.1, linesearch=None), optax.contrib.schedule_free_adamw(...), "
            "optax.chain(...) of your own."
        )
    refuse_own_step(optimizer)
    return RULES[kind]


def refuse_eager_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise where `optimizer.step()` would update once more what a compiled step has updated; a hook of torch's."""
    graded = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if graded:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): {len(graded)} parameters have gradients of an eager backward pass, "
            "and this optimizer is that of make_train_step, whose step(state, batch) has made the update already. "
            "Leave loss.backward() and optimizer.step() out of the loop. For eager updates of your own, make another "
            "optimizer of the parameters."
        )


def refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the user has `step()` do besides what is known of the class; a scheduler's wrapper does no more."""
    hooks = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if hook is not refuse_eager_step]
    hooks += optimizer._optimizer_step_post_hooks.values()
    if hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise NotImplementedError(
            f"{caller()}: the optimizer has step hooks, which a compiled step would not call. Remove them, and do in "
            "the loop what they do."
        )

    # A learning rate scheduler replaces `step` by a wrapper that notes its calls, whose `__wrapped__` is the original.
    # https://github.com/pytorch/pytorch/blob/main/torch/optim/lr_scheduler.py
    replacement = vars(optimizer).get("step")
    if replacement is not None and getattr(replacement, "__wrapped__", None) is not type(optimizer).step:
        raise NotImplementedError(
            f"{caller()}: optimizer.step of this {type(optimizer).__name__} was replaced by "
            f"{_name_of(replacement)}, which a compiled step would not call. Do in the loop what it does "
            "(del optimizer.step), or give an optax transformation."
        )


def _name_of(fn: object) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer.

    Raises:
        TypeError: It is not one of torch, and has no functions `init` and `update`.
    """
    is_optax = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if not is_optax and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{caller()}: optimizer must be an optimizer of torch.optim, such as AdamW(model.parameters()), or an "
            f"optax gradient transformation, such as optax.adamw(1e-3); got {type(optimizer).__name__}."
        )


def refuse_line_search(opt_state: PyTree) -> None:
    """Refuse an optimizer of optax that asks for the loss at other parameters within its update.

    Args:
        opt_state: The state that it keeps, or the shapes of it.
    """
    kinds = (optax.ScaleByZoomLinesearchState, optax.ScaleByBacktrackingLinesearchState)

    def is_of_line_search(node: object) -> bool:
        return isinstance(node, kinds)

    if any(map(is_of_line_search, jax.tree.leaves(opt_state, is_leaf=is_of_line_search))):
        raise NotImplementedError(
            f"{caller()}: the optimizer has a line search, which asks for the loss at several parameters in one update "
            "(value_fn), and a step computes it once. Give a learning rate instead: optax.lbfgs(0.1, linesearch=None)."
        )


@contextlib.contextmanager
def in_optimizer(function: str) -> Generator[None, None, None]:
    """Let an error of the optimiser's own code say so.

    Args:
        function: `init` or `update`, which is called within.
    """
    try:
        yield
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{caller()}: optimizer.{function} fails for the parameters of the model, a dict by name. Look at what the "
            f"optimizer was made with: learning rates are numbers or schedules, masks and labels have the parameters' "
            f"names. {type(error).__name__}: {error}"
        ) from error
