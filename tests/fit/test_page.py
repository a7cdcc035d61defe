"""The page about a run."""

import html.parser
import json
import shutil
from pathlib import Path

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._fit import read_metrics
from torch_shard.cli import app


class Read(html.parser.HTMLParser):
    """The text of a page, and what it loads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.loads, self.open = "", [], []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.loads += [value for key, value in attrs if key in ("src", "href")]
        assert tag != "script"


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("<b>run")  # names are text, not markup
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "lr": 0.1 / n} for n in (1, 2)]
    plan = ts.ShardingPlan({"*.weight": P("model")}, default=P())
    step = step_of(model, optimizer=torch.optim.AdamW(groups), plan=plan)
    rows = list(torch.randn(4, 8, 8))
    ts.fit(step, None, rows, steps=6, eval_loader=rows, eval_every=3, log=directory, progress=False)
    return directory


def test_the_page_says_what_the_run_was(log):
    page = Read(ts.write_report(log).read_text())
    assert page.loads == []
    run = json.loads((log / "run.json").read_text())
    assert run["memory"]["parameters"] == 4 * (8 * 8 // 2 + 8) * 4  # half of each weight, all of each bias
    assert run["memory"]["optimizer"] >= 2 * run["memory"]["parameters"]
    records = read_metrics(log / "metrics.jsonl")
    (compiled,) = [record for record in records if record["kind"] == "compile"]
    assert compiled["batch"] == 1
    assert [r["lr_1"] for r in records if r["kind"] == "train"] == [0.05] * 6
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    for said in (
        "<b>run",
        "batch=4, model=2",
        "device 7",
        "0.weight[4:8, :]",
        "lr_0",
        "grad_norm",
        f"{losses[-1]:.4g}",
    ):
        assert said in page.text, said
    assert "loop" in page.text


def test_the_command_writes_it(log):
    done = CliRunner().invoke(app, ["report", str(log)])
    assert done.exit_code == 0
    assert Path(done.output.strip()) == log / "report.html"


def test_a_log_of_another_program_has_no_overview_and_is_shown(log, tmp_path):
    shutil.copy(log / "metrics.jsonl", tmp_path)
    assert "training loss" in Read(ts.write_report(tmp_path).read_text()).text


@pytest.mark.parametrize("damage", ['{"kind": "train"}\n', "[1]\n", '{"kind": 1\n'])
def test_what_is_no_log_is_refused(damage, log, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"write_report: .* has no metrics.jsonl"):
        ts.write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(damage)
    with pytest.raises(ValueError, match=r"write_report: the log in .* is damaged"):
        ts.write_report(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert not (tmp_path / "report.html").exists()
