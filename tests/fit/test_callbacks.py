"""Callbacks of `fit`, and schedulers that go by epoch or by a metric."""

import itertools
import types
from pathlib import Path

import optax
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._fit import read_metrics

DATA = list(torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(0)))


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def make(lr=0.1, optimizer=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    return step_of(model, loss_fn, optimizer, mesh=(2, 1))


class Heard(ts.Callback):
    def __init__(self):
        self.calls = []

    def on_step(self, run):
        self.calls.append(("step", run.position, int(run.state.step)))
        run.log(twice=2.0 * run.position)
        run.text("sample", f"at {run.position}")

    def on_eval(self, run, metrics):
        self.calls.append(("eval", run.position, sorted(metrics)))

    def on_save(self, run):
        self.calls.append(("save", run.position))

    def on_end(self, run):
        self.calls.append(("end", run.position))


def test_callbacks_hear_of_everything_in_its_order(tmp_path):
    heard = Heard()
    with ts.Checkpointer(tmp_path / "kept", every=2) as checkpointer:
        ts.fit(
            make(), None, DATA, steps=3, eval_loader=DATA, eval_every=2, checkpointer=checkpointer, callbacks=[heard],
            log=tmp_path / "log", progress=False,
        )  # fmt: skip
    assert heard.calls == [
        *[("step", 1, 1), ("step", 2, 2), ("eval", 2, ["loss"]), ("save", 2)],
        *[("step", 3, 3), ("eval", 3, ["loss"]), ("end", 3)],
    ]
    records = read_metrics(tmp_path / "log" / "metrics.jsonl")
    assert [r["twice"] for r in records if "twice" in r] == [2.0, 4.0, 6.0]


def test_early_stopping_ends_the_run_and_is_resumed(tmp_path):
    def run(steps, patience):
        stopping = ts.EarlyStopping(patience=patience, min_delta=10.0)  # no change is ever as large
        with ts.Checkpointer(tmp_path, every=1) as checkpointer:
            state = ts.fit(
                make(), None, DATA, steps=steps, eval_loader=DATA, eval_every=1, checkpointer=checkpointer,
                callbacks=[stopping], progress=False,
            )  # fmt: skip
        return int(state.num_batches)

    assert run(3, patience=4) == 3  # the first is the best; two have waited
    assert run(20, patience=4) == 5  # two more


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path):
    rates = iter([0.1, -5.0, 0.1])
    step = make()

    class Climb(ts.Callback):
        def on_step(self, run):
            step.optimizer.param_groups[0]["lr"] = next(rates)

    best = ts.BestCheckpoint(ts.Checkpointer(tmp_path, keep=1))
    found = []

    class Note(ts.Callback):
        def on_eval(self, run, metrics):
            found.append(metrics["loss"])

    ts.fit(step, None, DATA, steps=3, eval_loader=DATA, eval_every=1, callbacks=[Climb(), best, Note()], progress=False)
    at = found.index(min(found)) + 1
    assert at < 3
    assert ts.Checkpointer(tmp_path).steps() == [at]
    assert ts.Checkpointer(tmp_path).metrics(at)["loss"] == min(found)


def test_an_error_of_a_callback_ends_the_run_and_the_state_is_saved(tmp_path):
    class Fails(ts.Callback):
        def on_step(self, run):
            if run.position == 2:
                raise KeyError("mine")

    with ts.Checkpointer(tmp_path) as checkpointer, pytest.raises(KeyError, match="mine"):
        ts.fit(make(), None, DATA, steps=4, checkpointer=checkpointer, callbacks=[Fails()], progress=False)
    assert ts.Checkpointer(tmp_path).steps() == [2]


def test_another_state_of_a_callback_is_refused():
    class Sets(ts.Callback):
        def on_step(self, run):
            run.state = run.step.init()

    with pytest.raises(ValueError, match=r"on_step of the callback .*Sets has set run\.state"):
        ts.fit(make(), None, DATA, steps=2, callbacks=[Sets()], progress=False)


def test_a_profile_is_written(tmp_path):
    profile = ts.Profile(tmp_path, start=1, num_steps=1)
    ts.fit(make(), None, DATA, steps=3, callbacks=[profile], progress=False)
    assert list(Path(tmp_path).rglob("*.xplane.pb"))


def test_utilization_counts_the_products_of_the_program(tmp_path):
    step = make()
    used = ts.Utilization(1.0, every=1)  # so that it is the number of flops per second
    ts.fit(step, None, DATA, steps=3, callbacks=[used], log=tmp_path, progress=False)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["batch"] for r in records if "mfu" in r] == [2, 3]
    # of 4 rows on a device: forward and the gradient of the weight, a multiply and an add for each of its 3 entries
    assert step.programs[-1].num_flops == 2 * (4 * 3 * 2)
    assert all(r["mfu"] > 0 for r in records if "mfu" in r)


def test_utilization_is_that_of_the_program_of_each_batch(tmp_path, monkeypatch):
    seconds = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # one for each step
    monkeypatch.setattr("torch_shard._fit.monitors.time", seconds)
    step, data = make(), [DATA[0].repeat(num, 1) for num in (1, 2, 1, 2)]
    used = ts.Utilization(1.0, every=1)
    ts.fit(step, None, data, steps=4, callbacks=[used], log=tmp_path, progress=False)
    small, large = (program.num_flops for program in step.programs)  # in the order of their last use
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["mfu"] for r in records if "mfu" in r] == [large, small, large]


def in_torch(scheduler_of, after, num_steps):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, rates = scheduler_of(optimizer), []
    for number in range(num_steps):
        optimizer.zero_grad()
        loss_fn(model, DATA[number % 4]).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])  # with which the step was taken
        after(scheduler, number + 1, model)
    return rates


class Rates(ts.Callback):
    def __init__(self):
        self.found = []

    def on_step(self, run):
        self.found.append(run.step.optimizer.param_groups[0]["lr"])


def test_a_scheduler_by_epoch():
    def after(scheduler, number, model):
        if number % 4 == 0:
            scheduler.step()

    wanted, rates, step = in_torch(lambda o: StepLR(o, 1, 0.5), after, 10), Rates(), make()
    ts.fit(
        step, None, DATA, steps=10, scheduler=StepLR(step.optimizer, 1, 0.5), schedule_by="epoch", callbacks=[rates],
        progress=False,
    )  # fmt: skip
    assert rates.found[:-1] == wanted[1:]  # a callback is called when the schedule has been stepped


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


def test_a_scheduler_by_a_metric_goes_on_where_it_was(tmp_path):
    def after(scheduler, number, model):
        if number % 2 == 0:
            scheduler.step(sum(loss_fn(model, x).item() for x in DATA) / 4)

    wanted, found = in_torch(plateau, after, 24), []
    for steps in (10, 24):
        step, rates = make(), Rates()
        with ts.Checkpointer(tmp_path) as checkpointer:
            ts.fit(
                step, None, DATA, steps=steps, scheduler=plateau(step.optimizer), callbacks=[rates], eval_loader=DATA,
                eval_every=2, checkpointer=checkpointer, progress=False,
            )  # fmt: skip
        found += rates.found
    assert len(set(wanted)) > 2
    assert found == wanted


def test_bad_options_are_refused():
    step = make()
    by_epoch, by_metric = StepLR(step.optimizer, 1), plateau(step.optimizer)
    for options, error, says in (
        ({"callbacks": [3]}, TypeError, "callbacks must be a Callback, got int"),
        ({"callbacks": 3}, TypeError, "callbacks must be a list or a tuple"),
        ({"schedule_by": "epoch"}, ValueError, "there is none"),
        ({"scheduler": by_epoch, "schedule_by": "loss"}, ValueError, "does not fit a StepLR"),
        ({"scheduler": by_metric, "schedule_by": "epoch"}, ValueError, "does not fit a ReduceLROnPlateau"),
        ({"scheduler": by_metric}, ValueError, "which needs eval_loader"),
        ({"scheduler": by_metric, "schedule_by": "f1", "eval_loader": DATA}, ValueError, "is no metric of the"),
        ({"callbacks": [ts.EarlyStopping("f1")], "eval_loader": DATA}, ValueError, "a callback looks at 'f1'"),
        ({"loader": lambda position: iter(DATA), "scheduler": by_epoch, "schedule_by": "epoch"}, ValueError,
         "needs a loader with a length"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            ts.fit(step, None, **{"loader": DATA, "steps": 1, "progress": False, **options})


def test_bad_numbers_are_refused():
    for make_one in (
        lambda: ts.EarlyStopping(mode="least"),
        lambda: ts.EarlyStopping(patience=0),
        lambda: ts.Utilization(0.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            make_one()


def test_optax_has_no_groups_to_keep(tmp_path):
    step = make(optimizer=optax.sgd(0.1))
    with ts.Checkpointer(tmp_path) as checkpointer:
        ts.fit(step, None, DATA, steps=1, checkpointer=checkpointer, progress=False)
    assert ts.Checkpointer(tmp_path).notes(1) == {"callbacks": {}, "groups": [], "scheduler": {}}
