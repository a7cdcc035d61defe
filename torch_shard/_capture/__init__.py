"""A torch callable and shapes become one functional ATen graph, by PyTorch alone. No JAX in here."""

from torch_shard._capture.autocast import ActiveRegions, Precision, autocast_only
from torch_shard._capture.autograd_functions import user_leaves
from torch_shard._capture.canonical import canonical_form, node_form, nodes_of_closure, value_form
from torch_shard._capture.constants import bits_of, in_eager_torch, is_literal
from torch_shard._capture.data_dependence import current_values
from torch_shard._capture.effect_plan import EffectPlan
from torch_shard._capture.effects import Effects
from torch_shard._capture.fakes import is_fake, leave, outline, rehearse, unknown_like, untraced
from torch_shard._capture.function_mode import (
    annotated,
    as_captured,
    current_mode,
    is_capturing,
    is_repeating,
    outside_capture,
    repeating,
)
from torch_shard._capture.generators import find_generators
from torch_shard._capture.guards import Guard, ModuleFlags, read_by
from torch_shard._capture.host_values import HostInputs, HostPart, Mismatch
from torch_shard._capture.late_numbers import LateNumber
from torch_shard._capture.provenance import current_user_line, is_user_file, leave_users_frames
from torch_shard._capture.reads import Reads
from torch_shard._capture.replacements import trunc_normal_
from torch_shard._capture.trace import Captured, Spec, TensorFn, capture
