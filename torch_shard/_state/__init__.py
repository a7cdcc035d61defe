"""What a step is given and gives back: the train state, its checks, and which steps are skipped."""

from torch_shard._state.state import KINDS, StateLayout, TrainState, as_arrays, differs_by, with_key
from torch_shard._state.state_checks import check_apart, check_names, check_state, refuse_traced
from torch_shard._state.step_check import StepCheck, check_skip_grad_norm, check_step, global_norm, select_state
