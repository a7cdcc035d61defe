"""What a run reports: metrics, events, progress."""

import os
import struct
import time

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.event_pb2 import Event, SessionLog
from torch import nn

import torch_shard as ts
from tests.oracles.steps import anew, step_of
from tests.tables.runs import DATA, loader, losses, make_model, run
from torch_shard._fit import read_metrics
from torch_shard._io.manifest import read_head


def test_checkpoint_has_the_metrics_of_its_own_batch(step, tmp_path):
    """Also where no record is due."""
    run(step, loader(), tmp_path / "often", steps=4)
    run(step, loader(), tmp_path / "seldom", steps=4, log_every=3)
    checkpoints = tmp_path / "seldom" / "checkpoints"
    assert read_head(ts.Checkpointer(checkpoints).path(4)).metrics["loss"] == losses(tmp_path / "often" / "log")[-1]
    assert len(losses(tmp_path / "seldom" / "log")) == 2


def test_the_last_batch_before_a_failure_is_told_of(step, tmp_path):
    def fails():
        yield from DATA[:24].split(8)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ts.fit(step, None, fails(), steps=6, log=tmp_path / "failed", progress=False)
    ts.fit(anew(step, make_model()), None, DATA[:24].split(8), steps=3, log=tmp_path / "whole", progress=False)
    assert losses(tmp_path / "failed") == losses(tmp_path / "whole")


def test_what_was_compiled_is_told_of_with_the_step_and_all_rates(tmp_path):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "lr": 0.1 / n} for n in (1, 2)]
    step = step_of(model, optimizer=torch.optim.AdamW(groups))
    ts.fit(step, None, list(torch.randn(4, 8, 8)), steps=3, log=tmp_path, progress=False)
    records = read_metrics(tmp_path / "metrics.jsonl")
    (compiled,) = [record for record in records if record["kind"] == "compile"]
    assert (compiled["batch"], compiled["batch_shapes"]) == (1, ["batch (8, 8)"])
    assert [r["lr_1"] for r in records if r["kind"] == "train"] == [0.05] * 3
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("step/text_summary")
    assert b"batch=4, model=2" in text.tensor_proto.string_val[0]


def test_runs_of_one_second_keep_their_events(step, tmp_path):
    state = None
    for steps in (2, 3, 4):
        state = ts.fit(step, state, loader(), steps=steps, log=tmp_path, progress=False)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 3


def test_events_of_a_run_that_saved_nothing_are_taken_back(step, tmp_path):
    for _ in range(2):
        ts.fit(step, None, loader(), steps=2, log=tmp_path, progress=False)
    content, events = max(tmp_path.glob("events.out.tfevents.*")).read_bytes(), []
    while content:  # each event after its length and a checksum, with a checksum behind it
        (length,) = struct.unpack_from("<Q", content)
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [1]
    assert [event.step for event in events if event.summary.value and event.summary.value[0].tag == "train/loss"] == [
        1,
        2,
    ]


def test_one_process_writes_the_log(step, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    ts.fit(step, None, loader(), steps=2, log=tmp_path / "log", progress=False)
    assert not (tmp_path / "log").exists()


def test_metrics_and_evaluation(step, tmp_path):
    log = tmp_path / "log"
    state = ts.fit(
        step,
        step.init(seed=0),
        loader(),
        steps=6,
        log=log,
        eval_loader=DATA[:16].split(8),
        eval_every=4,
        progress=False,
    )
    records = read_metrics(log / "metrics.jsonl")
    assert [(r["kind"], r["batch"]) for r in records if r["kind"] == "eval"] == [("eval", 4), ("eval", 6)]
    train = [r for r in records if r["kind"] == "train"]
    assert [r["batch"] for r in train] == [1, 2, 3, 4, 5, 6]
    assert train[0].keys() == {"kind", "batch", "loss", "grad_norm", "largest"}
    assert train[-1].keys() == {*train[0], "samples_per_s"}
    evaluate = step.evaluation()
    wanted = [float(evaluate(state, rows)["loss"]) for rows in DATA[:16].split(8)]
    assert records[-1]["loss"] == pytest.approx(np.mean(wanted), rel=1e-6)  # a float32 printed
    events = EventAccumulator(str(log))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (r["batch"], pytest.approx(r["loss"])) for r in train
    ]
    assert [e.step for e in events.Scalars("eval/loss")] == [4, 6]


def test_an_evaluation_weighs_batches_by_rows_where_another_leaf_comes_first(tmp_path):
    """By names of leaves: a mask comes before the rows, and has as many in each batch."""

    def loss_fn(model, batch):
        return (model(batch["rows"]) * batch["mask"]).square().mean()

    step = step_of(nn.Linear(6, 3), loss_fn, batch_spec={"mask": P()})
    batches = [{"mask": torch.ones(3), "rows": DATA[:8]}, {"mask": torch.ones(3), "rows": 9 * DATA[8:10]}]
    state = ts.fit(step, None, batches[:1], steps=1, eval_loader=batches, log=tmp_path, progress=False)
    (found,) = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "eval"]
    model = step.export(state)
    first, second = (loss_fn(model, batch).item() for batch in batches)
    assert found == pytest.approx((8 * first + 2 * second) / 10, rel=1e-5)


@pytest.mark.parametrize("log_every", [1, 3])
def test_no_speed_is_above_that_of_the_loader(step, tmp_path, log_every):
    """Also of records beside an evaluation, a checkpoint and the end."""
    pause_s = 0.1

    def slowly(position):
        for _ in range(99):
            time.sleep(pause_s)
            yield DATA[:8]

    with ts.Checkpointer(tmp_path / "saved", every=5) as checkpointer:
        ts.fit(
            step,
            None,
            slowly,
            steps=12,
            log=tmp_path / "log",
            log_every=log_every,
            eval_loader=loader(),
            eval_every=4,
            checkpointer=checkpointer,
            prefetch=1,
            progress=False,
        )
    records = read_metrics(tmp_path / "log" / "metrics.jsonl")
    speeds = [record["samples_per_s"] for record in records if "samples_per_s" in record]
    assert len(speeds) >= 12 // log_every - 1
    assert max(speeds) < 4 * 8 / pause_s  # of a loaded machine, where a step is done late and the next one is not


def test_without_a_terminal_there_are_lines(step):
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=140, file=nowhere)
        state = ts.fit(step, step.init(seed=0), loader(), steps=2, progress=console)
        ts.fit(step, state, loader(), steps=4, progress=console)
        lines = console.export_text().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("fit: begins, 2 batches", "fit: 1 of 2", "fit: 2 of 2"),
        *("fit: goes on from batch 2 of 4 batches", "fit: 3 of 4", "fit: 4 of 4"),
    ]


def test_progress_shows_loss_speed_and_the_last_evaluation(step):
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=140, force_terminal=True, file=nowhere)
        ts.fit(step, step.init(seed=0), loader(), steps=4, eval_loader=loader(), progress=console)
        shown = console.export_text()
    assert [word for word in ("4/4", "loss", "samples", "eval_loss") if word not in shown] == []
