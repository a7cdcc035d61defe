"""An ATen graph as a function of JAX arrays: a table of operators, an interpreter, and captures with their lowering."""

from torch_shard._lowering.compiler_options import compiler_options
from torch_shard._lowering.constrained_values import ConstrainedValue, ConstrainedValues, constrained_values
from torch_shard._lowering.constraints import DIMS, ROWS, SEQUENCE, USED_AS
from torch_shard._lowering.interpreter import (
    Own,
    conform,
    draws_random,
    exact_integers,
    is_own,
    lower,
    matmul_precision,
    missing_lowerings,
    operation,
    own_of,
    place_of,
    report_own,
)
from torch_shard._lowering.number_inputs import GraphOutline, Kind, Number, Place, outline_of, split_kinds, vectors
from torch_shard._lowering.ops import (
    LOWERINGS,
    ON_MESH,
    RANDOM,
    STORAGE_KWARGS,
    find_lowering,
    find_written_out,
    import_torchax,
    keeps_whole,
    lowers,
    refuse_generator,
    report_attention,
    report_context,
    report_experts,
    untie_gradients,
)
from torch_shard._lowering.ops.constrained import CONSTRAINED, LAID, constrained, spec_apart
from torch_shard._lowering.ops.context import SPLIT, OverContext
from torch_shard._lowering.program import Program, capture_settings
from torch_shard._lowering.rows import RowSplit
from torch_shard._lowering.second_look import Looks, refuse_change
