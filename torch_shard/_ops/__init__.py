"""The table of lowerings: what each ATen operator means in JAX.

A lowering takes JAX arrays where the operator takes tensors and returns JAX arrays. Ours come first, one file per
family; PyTorch decomposes what it can of the rest; torchax's table fills what remains; an operator that none of them
covers is refused by name.
"""

from torch_shard._common.dtypes import captured_dtype, has_x64, jax_dtype, torch_dtype
from torch_shard._ops import (  # noqa: F401  (they fill the table)
    _attention,
    _bags,
    _casts,
    _conv,
    _ctc,
    _distances,
    _division,
    _extremes,
    _grouped,
    _indexing,
    _linalg,
    _linear,
    _linear_cross_entropy,
    _losses,
    _nn,
    _pooling,
    _random,
    _recurrent,
    _sampling,
    _segments,
    _special,
)
from torch_shard._ops._registry import (
    LOWERINGS,
    RANDOM,
    STORAGE_KWARGS,
    find_lowering,
    import_torchax,
    keeps_whole,
    lowers,
    refuse_generator,
)

__all__ = [
    "LOWERINGS",
    "RANDOM",
    "STORAGE_KWARGS",
    "captured_dtype",
    "find_lowering",
    "has_x64",
    "import_torchax",
    "jax_dtype",
    "keeps_whole",
    "lowers",
    "refuse_generator",
    "torch_dtype",
]
