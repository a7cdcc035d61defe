"""Sibling modules that look alike, so that they may be one program."""

import itertools
from typing import Any

from torch import nn

from torch_shard._regions import Group

LEAST = 3
"""So many alike siblings are worth a loop."""


def groups_of(model: nn.Module, placement: Any, least: int = LEAST) -> list[Group]:
    """Numbered siblings with the same tensors, outermost first.

    Args:
        model: Any module.
        placement: Gives for the name of a parameter or buffer what else must agree: its sharding.
        least: How many there must be.
    """
    groups: list[Group] = []
    taken: set[str] = set()
    for path, parent in model.named_modules():
        if any(path == t or path.startswith(f"{t}.") for t in taken):
            continue
        children = [(f"{path}.{n}" if path else n, m) for n, m in parent.named_children() if n.isdigit()]
        looks = [(_look(name, m, placement), name, m) for name, m in children]
        for look, found in itertools.groupby(sorted((x for x in looks if x[0]), key=lambda x: x[0]), key=lambda x: x[0]):
            members = {id(m): name for _, name, m in found}
            if len(members) >= least:
                groups.append(Group(path, members))
                taken.update(members.values())
        if taken.intersection(name for name, _ in children):
            alone = {id(m): name for name, m in children if name not in taken}
            groups += [Group(path, alone, "other tensors, splits or flags than its siblings'")] if alone else []
    return groups


def _look(path: str, module: nn.Module, placement: Any) -> str | None:
    """What alike modules agree in; None for what can be none of them."""
    if "forward" in vars(module) or not any(True for _ in module.parameters()):
        return None
    if any(_has_hooks(m) for m in module.modules() if m is not module):
        return None
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad, placement(f"{path}.{name}"))
        for name, t in itertools.chain(module.named_parameters(), module.named_buffers())
    ]
    return repr((type(module).__module__, type(module).__qualname__, tensors, [m.training for m in module.modules()]))


def _has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))
