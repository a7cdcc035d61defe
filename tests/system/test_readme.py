"""The code in the README runs, its diff changes no number, and its picture can be drawn again."""

import json
import pathlib
import re
import runpy
import types

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


def test_the_picture_of_the_readme_is_drawn_from_a_run(tmp_path):
    settings = {"steps": 2, "num_layers": 1, "batch_size": 16, "axis_sizes": {"batch": 4, "model": 2}}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": {**settings, "unigram_entropy": 3.5}}))
    records = [{"kind": kind, "batch": i, "loss": 4.0 - i} for i in (1, 2) for kind in ("train", "eval")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    picture = types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs/picture.py")))
    picture.draw(tmp_path, tmp_path / "images")
    for theme in ("light", "dark"):
        assert f"docs/images/demo-{theme}.svg" in README
        for folder in (tmp_path, ROOT / "docs"):  # what was drawn now, and what is in the repository
            drawn = (folder / f"images/demo-{theme}.svg").read_text()
            for text in ("batch[4:8]", "up.weight[256:512, :]", "down.weight[:, 0:256]", "validation"):
                assert f"<!-- {text} -->" in drawn  # matplotlib draws text as paths, beside which it says what it is
