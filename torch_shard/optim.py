"""Torch's optimizers as optax transformations: torch's formulas and defaults, in chains, masks and schedules of optax.

A step takes a `torch.optim` object as it is; these are for what optax composes.
"""

from torch_shard._optim import (
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

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
]
