"""What a step is given and gives back: the train state, its checks, and which steps are skipped."""

from torch_shard._state.live import Entry, live_model, present_state
from torch_shard._state.state import KINDS, StateLayout, TrainState, as_arrays, differs_by, with_key
from torch_shard._state.step_check import (
    StepCheck,
    check_apart,
    check_names,
    check_skip_grad_norm,
    check_state,
    check_step,
    global_norm,
    refuse_misplaced,
    refuse_traced,
    select_state,
)
