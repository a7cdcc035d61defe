"""The compiled step: programs, batches on the mesh, the update, the proof against eager torch."""

# pyright: reportUnusedImport=false

from torch_shard._train.apply_step import ApplyFn, ApplyStep
from torch_shard._train.comparison import (
    Comparison,
    Difference,
    Values,
    array_of,
    beyond,
    compared,
    differences,
    in_float64,
    numbers_of,
    precision_of,
    repeated_in_float64,
    rounding_of,
    told_apart,
)
from torch_shard._train.compiled_step import Body, Task
from torch_shard._train.make import make_apply, make_eval_step, make_train_step
from torch_shard._train.options import StepOptions
from torch_shard._train.placing import HostBatch, ShardedBatch
from torch_shard._train.replay import Replay
from torch_shard._train.stats import ModuleCalls, numbers_in, unseen
from torch_shard._train.step import EvalStep, Step
from torch_shard._train.train_function import TrainFunction, train_step
from torch_shard._train.train_step import TrainStep
