"""The compiled step: loss program, state, optimiser update, microbatches."""

from torch_shard._train.batch import flatten_batch
from torch_shard._train.joint import JointLoss, LossShape
from torch_shard._train.loss_result import split_loss
from torch_shard._train.make import make_eval_step, make_train_step
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
    "check_max_grad_norm",
    "flatten_batch",
    "make_eval_step",
    "make_train_step",
    "split_loss",
]
