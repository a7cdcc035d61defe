"""Repeated layers as loops: the numbers of eager torch, whatever the layers do."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.cases import make_mesh, squared_error
from tests.eager import assert_follows, eager_trajectory
from tests.layers import LAYERED, Block, Layered, Stack
from torch_shard._rolls import Loop


def _loops(step: ts.TrainStep) -> tuple[tuple[int, int], ...]:
    (compiled,) = step._compiled.values()
    rolled = compiled.program.rolled
    loops: list[Loop] = [] if rolled is None else rolled.loops
    return tuple((len(loop.iterations), len(loop.layers) // len(loop.iterations)) for loop in loops)


@pytest.mark.parametrize("layered", LAYERED, ids=lambda layered: layered.case.name)
def test_layers_follow_eager_torch(layered: Layered) -> None:
    case = layered.case
    trajectory = eager_trajectory(case, 2)
    step = assert_follows(case, case.model(), trajectory, (4, 2))
    assert layered.says in step.report()
    if layered.loops:
        assert _loops(step) == layered.loops
