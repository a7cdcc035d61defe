"""Training as others write it: steps of the user's own, and the updates of other libraries' trainers."""

from torch_shard._trainers.train_function import TrainFunction, train_step
from torch_shard._trainers.updates import Updates
