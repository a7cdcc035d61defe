"""The loop: data from any position, progress, metrics, bad steps, signals, resume."""

from torch_shard._fit.bad_step import BadStepError
from torch_shard._fit.dataset import Rows
from torch_shard._fit.fit import fit
from torch_shard._fit.reports import METRICS, read_metrics

__all__ = [
    "METRICS",
    "BadStepError",
    "Rows",
    "fit",
    "read_metrics",
]
