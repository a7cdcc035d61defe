"""Eager torch on the CPU that draws the random numbers of a compiled step."""

import contextlib
from collections.abc import Iterator

import jax
import torch
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_shard._capture import trunc_normal_
from torch_shard._common.patching import having, patched
from torch_shard._common.random import GENERATOR
from torch_shard._common.types import Operator, PyTree
from torch_shard._device.dispatch import runner
from torch_shard._device.placement import to_cpu


class ReplayRNG(TorchDispatchMode):
    """Each random operator runs on the jax device, by the key of a step at the place that it has in the step."""

    def __init__(self, key: jax.Array | None) -> None:
        super().__init__()
        self._key, self.position = key, 0

    def __torch_dispatch__(self, func: Operator, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        kwargs = kwargs or {}
        if self._key is None or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        key = jax.random.fold_in(self._key, self.position)
        self.position += 1
        written = [i for i, of in enumerate(func._schema.arguments) if of.alias_info and of.alias_info.is_write]
        if written and not args[0].is_floating_point():
            args[0].zero_()  # it is drawn anew, and empty memory may have what JAX does not take
        given, named = torch_pytree.tree_map_only(torch.Tensor, lambda t: t.to("jax"), (args, kwargs))
        with having(GENERATOR, given=key):
            drawn = torch_pytree.tree_map_only(torch.Tensor, to_cpu, runner(func)(*given, **named))
        like = func(*args, **kwargs)  # for its dtypes: JAX may have held an int64 in 32 bits
        for i in written:
            args[i].copy_(to_cpu(given[i]))
        return like if 0 in written else torch_pytree.tree_map(lambda value, of: value.to(of.dtype), drawn, like)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Draw so within; a checkpoint goes back to a place in the stream."""
        with (
            self,
            patched(torch, "get_rng_state", lambda _: lambda: torch.tensor(self.position)),
            patched(torch, "set_rng_state", lambda _: self._go_to),
            patched(torch.nn.init, "_no_grad_trunc_normal_", lambda _: trunc_normal_),
        ):
            yield

    def _go_to(self, state: torch.Tensor) -> None:
        self.position = int(state)


def _draws(func: Operator, args: PyTree, kwargs: PyTree) -> bool:
    """Tell whether a call draws random numbers; an attention kernel that drops nothing does not, whatever its tags."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dropout = next((a.default_value for a in func._schema.arguments if a.name == "dropout_p"), None)
    return given.get("dropout_p", dropout) != 0
