"""Optimizers: those of torch by their formulas, and any optax transformation, on parameters by name and on stacks."""

from torch_shard._optim.by_name import run_by_name
from torch_shard._optim.from_torch import TorchOptimizer
from torch_shard._optim.known import check_optimizer, in_optimizer, refuse_eager_step, refuse_line_search
from torch_shard._optim.moments import (
    check_moments,
    init_narrow,
    is_narrow,
    narrow_like,
    narrowed,
    parameter_of,
    widened,
)
from torch_shard._optim.stored_update import (
    AverageState,
    averaged,
    check_average,
    check_clipping,
    clip_in_torch,
    clipped,
    inner_state,
    is_average,
)
from torch_shard._optim.transfers import HostTransfers
from torch_shard._optim.transforms import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    asgd,
    muon,
    nadam,
    radam,
    rmsprop,
    rprop,
    sgd,
)
