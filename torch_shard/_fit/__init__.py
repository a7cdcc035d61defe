"""The loop: data from any position, progress, metrics, callbacks, bad steps, signals, resume."""

from torch_shard._fit.callbacks import BestCheckpoint, Callback, EarlyStopping, Run
from torch_shard._fit.dataset import Rows
from torch_shard._fit.fit import fit
from torch_shard._fit.loop import BadStepError
from torch_shard._fit.monitors import Profile, Utilization
from torch_shard._fit.reports import METRICS, read_metrics
