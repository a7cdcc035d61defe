"""The compiled step: loss program, state, optimiser update, microbatches."""

from torch_shard._train.batch import flatten_batch
from torch_shard._train.comparison import ROUNDING, Comparison, Difference, Values, array_of, difference_of, numbers_of
from torch_shard._train.eager_reference import eager_copy, eager_gradients, eager_loss, in_float64
from torch_shard._train.host_values import HostValues, capture_with
from torch_shard._train.joint import JointLoss, LossShape
from torch_shard._train.loss_result import check_loss_fn
from torch_shard._train.make import make_eval_step, make_train_step
from torch_shard._train.optimizer import check_optimizer
from torch_shard._train.placing import HostBatch, ShardedBatch
from torch_shard._train.preview import Preview
from torch_shard._train.state import KINDS, TrainState, as_arrays
from torch_shard._train.step import Step
from torch_shard._train.step_check import check_skip_grad_norm
from torch_shard._train.train_step import EvalStep, TrainStep

__all__ = [
    "KINDS",
    "ROUNDING",
    "Comparison",
    "Difference",
    "EvalStep",
    "HostBatch",
    "HostValues",
    "JointLoss",
    "LossShape",
    "Preview",
    "ShardedBatch",
    "Step",
    "TrainState",
    "TrainStep",
    "Values",
    "array_of",
    "as_arrays",
    "capture_with",
    "check_loss_fn",
    "check_optimizer",
    "check_skip_grad_norm",
    "difference_of",
    "eager_copy",
    "eager_gradients",
    "eager_loss",
    "flatten_batch",
    "in_float64",
    "make_eval_step",
    "make_train_step",
    "numbers_of",
]
