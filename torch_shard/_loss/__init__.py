"""The loss as a program: the batch taken apart, what is captured, the gradients, what Python asks of values."""

from torch_shard._loss.answers import HostBuffers, HostValues, capture_with, own_copy
from torch_shard._loss.batch import BatchSignature, array_paths, flatten_batch
from torch_shard._loss.capture import loss_program, reads_texts
from torch_shard._loss.constrained_modules import check_activations
from torch_shard._loss.effects import Doing
from torch_shard._loss.joint import JointLoss, LossShape, LossSource
from torch_shard._loss.loss_program import LossOutputs, LossProgram, program_for
from torch_shard._loss.microbatches import Microbatches
from torch_shard._loss.result import EFFECTS, check_loss_fn, split_loss
