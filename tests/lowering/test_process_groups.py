"""`torch.distributed` in a loss is refused with its line; what asks first whether there is a group goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed import all_reduce as reduce_all

from tests.oracles.errors import refuses
from tests.oracles.steps import step_of
from tests.tables.cases import BATCH
from torch_shard._lowering.ops import process_groups


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.distributed.all_reduce": lambda y: dist.all_reduce(y.detach().mean(0)),
    "torch.distributed.all_gather": lambda y: dist.all_gather([torch.empty_like(y)], y.detach()),
    "torch.distributed.all_gather_into_tensor": lambda y: dist.all_gather_into_tensor(torch.empty_like(y), y.detach()),
    "torch.distributed.broadcast": lambda y: dist.broadcast(y.detach(), 0),
    "torch.distributed.all_gather_object": lambda y: dist.all_gather_object([None], {"scale": 2.0}),
    "torch.distributed.barrier": lambda y: dist.barrier(),
    "torch.distributed.nn.all_reduce": lambda y: dist.nn.all_reduce(y),
    "torch.distributed.nn.all_gather": lambda y: dist.nn.all_gather(y),
    "a collective of torch.distributed": lambda y: reduce_all(y.detach().mean(0)),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", CALLS)
def test_collectives_are_refused_with_their_line(name: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        CALLS[name](y)
        return y.square().mean()

    step = step_of(nn.Linear(8, 8), loss)
    line = rf'File ".*test_process_groups.py", line \d+, in .*\nHere {name} runs in'
    with refuses(line + r" the captured function. Delete it: the program is that of th", NotImplementedError):
        step(step.init(), torch.randn(BATCH, 8))


def centred(y: torch.Tensor) -> torch.Tensor:
    """As in DINO, whose code asks first."""
    centre = y.detach().mean(0)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(centre)
    return y - centre


def train(model: nn.Module, x: torch.Tensor) -> float:
    step = step_of(model, lambda model, x: centred(model(x)).square().mean())
    step.prove(step.init(), x).raise_if_different()
    _, metrics = step(step.init(), x)
    return float(metrics["loss"])


def test_what_asks_for_a_group_first_is_as_in_torch() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(BATCH, 8)
    wanted = centred(model(x)).square().mean().item()
    # Sums over rows in another order than torch's.
    np.testing.assert_allclose(train(model, x), wanted, rtol=1e-6)


@pytest.mark.usefixtures("group")
def test_with_a_group_of_one_too() -> None:
    test_what_asks_for_a_group_first_is_as_in_torch()


@pytest.mark.usefixtures("group")
def test_the_number_of_processes_is_refused_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would divide by it what is of all rows already."""
    monkeypatch.setattr(process_groups, "_has_several_processes", lambda: True)
    step = step_of(nn.Linear(8, 8), lambda model, x: model(x).square().mean() / dist.get_world_size())
    with refuses(r"Here torch.distributed.get_world_size runs in the captured function. Delete", NotImplementedError):
        step(step.init(), torch.randn(BATCH, 8))
