"""The code in the README runs, its diff changes no number, and its picture can be drawn again."""

import pathlib
import re

import optax
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard as ts
from tests.system.test_tutorials import ROOT, run

README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    run(str(program), cwd=tmp_path, XLA_FLAGS="")  # compiled as users do


@pytest.fixture
def one_process():
    """torch.distributed, as the left side of the diff needs it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(code: str) -> list[float]:
    """Run one side of the diff, and return what `loss_fn` gave (in a trace: nothing), or the step's metrics."""
    torch.manual_seed(0)
    seen = []

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if "metrics" not in code:
            seen.append(loss.item())
        return loss

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))
    loader = [(torch.randn(16, 64), torch.randint(0, 16, (16,))) for _ in range(4)]
    libraries = {
        "torch": torch,
        "optax": optax,
        "ts": ts,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    }
    names = {"model": model, "loss_fn": loss_fn, "loader": loader, "device": "cpu", "seen": seen}
    exec(code, {**libraries, **names})
    return seen


def test_the_diff_of_the_readme_changes_few_lines_and_no_number(one_process):
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line[0] in "+-" for line in lines) < 12
    old, new = ("\n".join(line[1:] for line in lines if line[0] in " " + side) for side in "-+")
    in_torch = losses(old)
    assert len(in_torch) == 4
    # float32, four steps of Adam with a rate of 1e-3
    assert losses(new + "\n    seen.append(float(metrics['loss']))") == pytest.approx(in_torch, rel=1e-5)
