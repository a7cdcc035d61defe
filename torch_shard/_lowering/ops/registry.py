"""The table of lowerings: ours by `@lowers`, torchax's for the operators that we have not written."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.types import Operator, PyTree

Lowering = Callable[..., PyTree]

LOWERINGS: dict[Operator, Lowering] = {}

RANDOM: set[Operator] = set()
"""Operators whose lowering takes a random key as its first argument."""

ON_MESH: set[Operator] = set()
"""Operators whose lowering takes how the rows of the batch lie, as `split`; None where no step is around it."""

# torchax has a lowering, but its value or its state update differs from PyTorch's (measured against eager torch).
_WRONG_IN_TORCHAX = (
    "_native_batch_norm_legit",
    "native_batch_norm",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "max_pool2d_with_indices_backward",
    "polygamma",
    "digamma",
    "take",
    "linalg_lstsq",
    "linalg_pinv",
    "median",
    "nanmedian",
)

# torchax adds up in the dtype of their arguments, where torch adds in float32 what is narrower.
_SUMS_IN_TORCHAX = ("index_add",)

# Arguments about storage, which JAX arrays do not have.
STORAGE_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


def lowers(*ops: Operator, random: bool = False, on_mesh: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of ATen operators."""

    def register(fn: Lowering) -> Lowering:
        for op in ops:
            LOWERINGS[op] = fn
            if random:
                RANDOM.add(op)
            if on_mesh:
                ON_MESH.add(op)
        return fn

    return register


def in_float32(lowering: Lowering) -> Lowering:
    """A lowering that adds many values, given them in float32 where they are narrower; its results are rounded once.

    Rounded at each of its sums, a running sum in bfloat16 stops at 256 times its addends.
    """

    @functools.wraps(lowering)
    def lowered(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return lowering(*jax.tree.map(_widened, args), **jax.tree.map(_widened, kwargs))

    return lowered


def _widened(value: PyTree) -> PyTree:
    is_narrow = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(jnp.float32) if is_narrow else value


def import_torchax() -> None:
    """Import torchax, and put back what its import changes for everyone: it switches off attention's fast path."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    import torchax  # noqa: F401

    torch.backends.mha.set_fastpath_enabled(fastpath)


@functools.cache
def _torchax_table() -> dict[object, Any]:
    from torchax.ops import jaten, ops_registry  # noqa: F401  (importing jaten fills the registry)

    return {op: entry for op, entry in ops_registry.all_aten_ops.items() if _usable(op, entry)}


def _usable(op: object, entry: Any) -> bool:
    packet = getattr(op, "overloadpacket", op)
    is_ours_to_give = getattr(packet, "__name__", "") in _WRONG_IN_TORCHAX
    return entry.is_jax_function and not entry.needs_env and not is_ours_to_give


def find_lowering(op: Operator) -> Lowering | None:
    """Our lowering of `op`, else torchax's, else None."""
    if op in LOWERINGS:
        return LOWERINGS[op]
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # torchax draws from a hidden key; ours take one
    return foreign_lowering(op)


def foreign_lowering(op: Operator) -> Lowering | None:
    """Torchax's lowering of `op`, or None."""
    table = _torchax_table()
    entry = table.get(op) or table.get(op.overloadpacket)
    if entry is None:
        return None
    return _refusing(op, in_float32(entry.func) if op._opname in _SUMS_IN_TORCHAX else entry.func)


@functools.cache
def _refusing(op: Operator, lowering: Lowering) -> Lowering:
    """A foreign lowering that refuses the arguments that it fails on, be they not known to it or values to be read."""
    is_special = op._opname.startswith("special_")  # functions of real numbers: they take integers and booleans as such

    @functools.wraps(lowering)
    def lowered(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return lowering(*(_as_float(a) for a in args) if is_special else args, **kwargs)
        except Exception as error:
            if "incompatible devices" in str(error):  # no fault of the lowering, and JAX says which is where
                raise
            raise NotImplementedError(
                f"{op} has no lowering to JAX for these arguments ({type(error).__name__}: {_first_line(error)}). "
                "Write this with other torch operators, or compute it in JAX with torch_shard.call_jax."
            ) from error

    return lowered


def _as_float(value: PyTree) -> PyTree:
    is_array = isinstance(value, jax.Array)
    return value.astype(np.float32) if is_array and not jnp.issubdtype(value.dtype, np.inexact) else value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def refuse_generator(op: Operator, kwargs: Mapping[str, object]) -> None:
    """Refuse a generator of torch's: its stream cannot be followed.

    Raises:
        NotImplementedError: `kwargs` has a generator.
    """
    if kwargs.get("generator") is not None:
        raise NotImplementedError(
            f"{op} was given a torch.Generator, whose stream JAX cannot follow. Leave generator= out: draws on the jax "
            "device follow torch.manual_seed, and those of a training step its own key, step.init(seed=...)."
        )


def keeps_whole(op: torch._ops.OperatorBase, has_core_rule: bool) -> bool:
    """Tell whether a capture should leave `op` as it is: we lower it, or torchax does and PyTorch has no core rule.

    PyTorch's decompositions are tested against its own kernels, so they come before torchax's lowerings.
    """
    if op in LOWERINGS:
        return True
    return isinstance(op, torch._ops.OpOverload) and not has_core_rule and find_lowering(op) is not None
