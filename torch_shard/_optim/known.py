"""Which optimizers of torch are taken: those whose `step()` does what a rule says, and nothing besides."""

# pyright: reportPrivateUsage=false

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_shard._common.caller import caller
from torch_shard._optim.matrix_rules import ADAFACTOR, MUON
from torch_shard._optim.rule import Rule
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
        listed = ", ".join(found.__name__ for found in RULES)
        raise TypeError(
            f"{caller()}: the optimizer is a {kind.__module__}.{kind.__qualname__}, and what its step() does cannot be "
            f"known. Of torch.optim these are taken, not their subclasses: {listed}. For others give an optax "
            "transformation: optax.lbfgs(), optax.contrib.schedule_free_adamw(...), optax.chain(...) of your own."
        )
    refuse_own_step(optimizer)
    return RULES[kind]


def refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the user has `step()` do besides what is known of the class; a scheduler's wrapper does no more."""
    of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    if any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *of_all)):
        raise NotImplementedError(
            f"{caller()}: the optimizer has step hooks, which a compiled step would not call. Remove them, and do in "
            "the loop what they do."
        )
    own = vars(optimizer).get("step")
    if own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step:
        raise NotImplementedError(
            f"{caller()}: optimizer.step of this {type(optimizer).__name__} was replaced by {_name_of(own)}, which a "
            "compiled step would not call. Do in the loop what it does (del optimizer.step), or give an optax "
            "transformation."
        )


def _name_of(fn: object) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)
