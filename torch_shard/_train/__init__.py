"""The compiled step: loss program, state, optimiser update, microbatches."""

from torch_shard._train.batch import flatten_batch
from torch_shard._train.joint import JointLoss, LossShape
from torch_shard._train.loss_result import check_loss_fn, split_loss
from torch_shard._train.make import make_eval_step, make_train_step
from torch_shard._train.optimizer import check_optimizer
from torch_shard._train.state import KINDS, TrainState
from torch_shard._train.step import Placed, Step
from torch_shard._train.step_guard import check_max_grad_norm
from torch_shard._train.train_step import EvalStep, TrainStep

__all__ = [
    "KINDS",
    "EvalStep",
    "JointLoss",
    "LossShape",
    "Placed",
    "Step",
    "TrainState",
    "TrainStep",
    "check_loss_fn",
    "check_max_grad_norm",
    "check_optimizer",
    "flatten_batch",
    "make_eval_step",
    "make_train_step",
    "split_loss",
]
