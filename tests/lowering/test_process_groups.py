"""`torch.distributed` in a loss: as in a world of one process, against eager torch; refused among several."""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed import all_reduce as reduce_all
from torch.distributed import get_world_size as world

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import step_of
from tests.tables.cases import BATCH, make_mesh
from torch_shard._lowering.ops.process_groups import _say_once


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, as eager torch needs it."""
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_place(name: str, y: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    centre = y.detach().mean(0)
    work = getattr(dist, name)(centre, *more, **options)
    if work is not None:
        work.wait()
    return centre


def of_lists(name: str, y: torch.Tensor) -> torch.Tensor:
    taken, own = [torch.ones_like(y) for _ in range(dist.get_world_size())], y.detach()
    getattr(dist, name)(*{
        "all_gather": (taken, own),
        "gather": (own, taken),
        "all_to_all": (taken, [own]),
        "scatter": (taken[0], [own]),
        "reduce_scatter": (taken[0], [own]),
    }[name])  # fmt: skip
    return torch.cat(taken)


def of_tensors(name: str, y: torch.Tensor) -> torch.Tensor:
    taken = torch.empty_like(y)
    getattr(dist, name)(taken, y.detach())
    return taken


def by_keyword(y: torch.Tensor) -> torch.Tensor:
    taken = torch.empty_like(y)
    dist.all_gather_into_tensor(input_tensor=y.detach(), output_tensor=taken, async_op=True).wait()
    return taken


def objects(y: torch.Tensor) -> torch.Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"scale": 2.0})
    dist.barrier()
    return y * found[0]["scale"]


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda y: in_place("all_reduce", y),
    "all_reduce of means": lambda y: in_place("all_reduce", y, op=dist.ReduceOp.AVG, async_op=True),
    "broadcast": lambda y: in_place("broadcast", y, 0),
    "reduce": lambda y: in_place("reduce", y, 0),
    "all_gather": lambda y: of_lists("all_gather", y),
    "gather": lambda y: of_lists("gather", y),
    "all_to_all": lambda y: of_lists("all_to_all", y),
    "scatter": lambda y: of_lists("scatter", y),
    "reduce_scatter": lambda y: of_lists("reduce_scatter", y),
    "all_gather_into_tensor": lambda y: of_tensors("all_gather_into_tensor", y),
    "reduce_scatter_tensor": lambda y: of_tensors("reduce_scatter_tensor", y),
    "all_to_all_single": lambda y: of_tensors("all_to_all_single", y),
    "by keyword": by_keyword,
    "nn.all_reduce": lambda y: dist.nn.all_reduce(y),
    "nn.all_gather": lambda y: dist.nn.functional.all_gather(y)[0],
    "nn.broadcast": lambda y: dist.nn.broadcast(y, 0),
    "nn.all_to_all_single": lambda y: dist.nn.all_to_all_single(torch.empty_like(y), y),
    "nn.reduce_scatter": lambda y: dist.nn.reduce_scatter(torch.empty_like(y), [y]),
    "objects": objects,
}


def loss_of(name: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What a call gives is differentiated where it can be; the rank is zero."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y - CALLS[name](y).flip(0) / 3).square().mean() + dist.get_rank()

    return loss


def test_a_release_of_torch_may_lack_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.11 has no `all_gather_single`."""
    for module in (dist, dist.distributed_c10d):
        monkeypatch.delattr(module, "all_gather_single")
    step = step_of(nn.Linear(4, 4), lambda m, x: m(x).sum(), mesh=make_mesh((1, 1)))
    _, metrics = step(step.init(), torch.ones(BATCH, 4))
    assert np.isfinite(metrics["loss"])


def all_losses(models: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = {name: loss_of(name)(model, x) for name, model in zip(CALLS, models, strict=True)}
    return sum(found.values()), found


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.usefixtures("group")
def test_collectives_are_those_of_one_process() -> None:
    """All in one program, each with parameters of its own."""
    torch.manual_seed(0)
    models, x = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in CALLS), torch.randn(BATCH, 8)
    eager = copy.deepcopy(models)
    step = step_of(models, all_losses, optax.sgd(1.0))
    state, metrics = step(step.init(), x)
    total, wanted = all_losses(eager, x)
    total.backward()
    for (name, loss), (key, weight) in zip(wanted.items(), eager.named_parameters(), strict=True):
        np.testing.assert_allclose(metrics[name], loss.item(), rtol=1e-6, err_msg=name)
        found = weight.detach() - torch.from_numpy(np.array(state.params[key]))
        torch.testing.assert_close(found, weight.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_no_group_is_needed_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_once.cache_clear()
    x = torch.randn(BATCH, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            step = step_of(nn.Linear(8, 8), loss_of("all_reduce"))
            step(step.init(), x)
    said = [record.getMessage() for record in caplog.records if "world of one" in record.getMessage()]
    assert len(said) == 2
    step.prove(step.init(), x).raise_if_different()  # eager torch needs no group either
    assert re.match(r'File ".*test_process_groups.py", line \d+, in in_place: work = getattr\(dist, name\)', said[0])
    assert (
        "Here torch.distributed.all_reduce does what it does in a world of one process: a compiled program" in said[0]
    )


FIRST = {"all_reduce": "all_reduce", "all_gather": "get_world_size", "nn.all_gather": "nn.all_gather"}


@pytest.mark.parametrize(("name", "called"), FIRST.items(), ids=FIRST)
def test_among_several_processes_they_are_refused_with_their_line(
    name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = rf'File ".*test_process_groups.py", line \d+, in .*\nHere torch.distributed.{called} runs in'
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refuses(line + r" the captured function. Delete it: the program is that of th", NotImplementedError):
        ts.jax_jit(lambda x: CALLS[name](x))(torch.randn(BATCH, 8))


@pytest.mark.usefixtures("group")
def test_under_a_name_of_its_own_a_collective_is_refused_with_its_line() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = model(x).square().mean() / world()
        reduce_all(found)
        return found

    step = step_of(nn.Linear(8, 8), loss)
    with refuses(r"reduce_all\(found\)\nHere a collective of torch.distributed runs in", NotImplementedError):
        step(step.init(), torch.randn(BATCH, 8))
