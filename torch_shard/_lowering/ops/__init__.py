"""The table of lowerings: what each ATen operator means in JAX.

A lowering takes JAX arrays where the operator takes tensors and returns JAX arrays. Ours come first, one file per
family; PyTorch decomposes what it can of the rest; torchax's table fills what remains; an operator that none of them
covers is refused by name. An operator of our own is one file too: declaration, override and lowering.
"""

from torch_shard._lowering.ops import (
    attention,
    attention_written,
    constrained,
    conv,
    ctc,
    dropout,
    embedding_bag,
    experts,
    indexing,
    linalg,
    linear,
    losses,
    mamba2,
    normalisation,
    packed,
    process_groups,
    random,
    recurrent,
    resample,
    special,
    tied_embedding,
)
from torch_shard._lowering.ops.attention_report import find_written_out, report_attention, report_context
from torch_shard._lowering.ops.experts import report_experts
from torch_shard._lowering.ops.registry import (
    LOWERINGS,
    ON_MESH,
    RANDOM,
    STORAGE_KWARGS,
    find_lowering,
    import_torchax,
    keeps_whole,
    lowers,
    refuse_generator,
)
from torch_shard._lowering.ops.tied_embedding import untie_gradients
