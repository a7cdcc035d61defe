"""What the trainers of other libraries need of a run: updates by the microbatches that their loops hand over."""

from torch_shard._trainers.settings import (
    Plan,
    check_step_options,
    evaluation_options,
    precision_options,
    resolve_plan,
)
from torch_shard._trainers.updates import Updates
