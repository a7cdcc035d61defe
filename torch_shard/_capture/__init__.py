"""A torch callable and shapes become one functional ATen graph, by PyTorch alone. No JAX in here."""

from torch_shard._capture.attention_masks import Seen, seen_through
from torch_shard._capture.autocast import (
    ActiveRegions,
    MixedPrecision,
    Precision,
    active_regions,
    autocast_only,
    casting,
    float16_refused,
    widened,
)
from torch_shard._capture.autograd_functions import leaves_behind, runs_user_backward
from torch_shard._capture.constants import bits_of, is_literal, tensors_in
from torch_shard._capture.data_dependence import DEVICE_OF, current_values, within_operator
from torch_shard._capture.effect_plan import EffectPlan, Write, evaluated, is_number
from torch_shard._capture.effects import Effects, effects_of_capture, undone
from torch_shard._capture.fakes import (
    StaleTensor,
    depends_on_inputs,
    equate,
    in_transform,
    is_fake,
    leave,
    made_buffers,
    outline,
    rehearse,
    replaces_tensors,
    unknown_like,
    untraced,
)
from torch_shard._capture.function_mode import (
    add_modules,
    annotated,
    as_captured,
    binding,
    bound_tensors,
    current_mode,
    hold,
    is_capturing,
    is_repeating,
    note,
    outside_capture,
    repeating,
)
from torch_shard._capture.generators import find_generators, state_of
from torch_shard._capture.guards import Guard, ModuleFlags, flags_hold, module_roots, read_by
from torch_shard._capture.host_values import HostInputs, HostPart, Mismatch
from torch_shard._capture.late_numbers import LateNumber
from torch_shard._capture.provenance import current_user_line, is_user_file, leave_users_frames
from torch_shard._capture.reads import Reads
from torch_shard._capture.replacements import trunc_normal_
from torch_shard._capture.side_effects import ABSENT, NUMBERS, Change, Place, Same, new_values
from torch_shard._capture.trace import Aux, Captured, Spec, TensorFn, capture, meaning, same_closure
