"""Modules in wrappers of PyTorch go by the names that they have without them: plans, states, files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of
from tests.tables.cases import BATCH, make_mesh

RULES = {"0.weight": P("model"), "2.weight": P(None, "model")}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compiled, distributed, compiled": lambda model: compiled(DistributedDataParallel(compiled(model))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_module_trains_and_is_written_as_itself(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    mesh, plan, x = make_mesh((4, 2)), ts.ShardingPlan(RULES, default=P()), torch.randn(BATCH, 8)
    model, bare = wrap(plain()), plain()
    steps = [step_of(m, plan=plan) for m in (model, bare)]
    states = [step.init() for step in steps]
    for _ in range(2):
        found, wanted = ((step(state, x)) for step, state in zip(steps, states, strict=True))
        states = [found[0], wanted[0]]
        np.testing.assert_array_equal(found[1]["loss"], wanted[1]["loss"])
    names = list(bare.state_dict())
    assert sorted(states[0].tensors) == sorted(states[1].tensors) == sorted(names)
    assert states[0].params["0.weight"].sharding.spec == P("model")
    steps[0].prove(states[0], x).raise_if_different()
    exported = steps[0].export(states[0]).state_dict()
    assert list(exported) == names
    for live, value in zip(model.state_dict().values(), exported.values(), strict=True):
        assert torch.equal(live.cpu(), value)
    evaluate = ts.make_eval_step(model, mean_square, mesh=mesh, plan=plan)
    wanted_loss = steps[1].evaluation()(states[1], x)["loss"]
    np.testing.assert_array_equal(evaluate(states[0], x)["loss"], wanted_loss)
    with ts.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(states[0])
        checkpointer.wait()
        again = checkpointer.restore(steps[1])  # into the step of the bare module
    np.testing.assert_array_equal(again.params["2.bias"], states[0].params["2.bias"])


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_plans_files_and_placement_take_the_module_within(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    mesh, plan, model = make_mesh((4, 2)), ts.ShardingPlan(RULES, default=P()), wrap(plain())
    assert list(plan.resolve(model, mesh)) == list(plan.resolve(plain(), mesh))
    assert ts.plans.tp(model, mesh).rules == ts.plans.tp(plain(), mesh).rules
    path = ts.export_safetensors(model, tmp_path / "model")
    other = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    assert ts.load_safetensors(path, other, mesh, plan) is other
    for name, tensor in ts.gather(other).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=0, check_dtype=False)
    assert ts.place(model, mesh, plan) is model
    assert {parameter.device.type for parameter in model.parameters()} == {"jax"}
    assert ts.explain_capture(other, mean_square, torch.ones(BATCH, 8)).refused == ()


def test_a_loss_that_asks_for_the_wrapped_module_is_told() -> None:
    step = step_of(DistributedDataParallel(plain()), lambda m, x: m.module(x).square().mean())
    with pytest.raises(AttributeError) as error:
        step(step.init(), torch.ones(BATCH, 8))
    assert any("write model for model.module" in note for note in error.value.__notes__)
