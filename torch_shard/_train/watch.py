"""Norms of gradients and of updates by module, as metrics of a step."""

from collections.abc import Callable, Iterable, Mapping

import jax

from torch_shard._common.caller import caller
from torch_shard._sharding import make_matcher
from torch_shard._state import global_norm


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
