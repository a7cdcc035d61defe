"""The loop: to the bit after any stop, in the order of the data, with an orderly end for every kind of trouble."""

import itertools
import json
import math
import os
import random
import signal
import struct

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.event_pb2 import Event, SessionLog
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torch_shard as ts
from tests.oracles.processes import run_processes
from torch_shard._fit.data import Batches
from torch_shard._fit.fit import Evaluation
from torch_shard._io.manifest import read_head

ROWS, FEATURES, STEPS = 44, 6, 12  # five batches of 8 rows per epoch, the rest is dropped
DATA = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))


def squares(model, batch):
    return model(batch).square().mean(), {"largest": batch.abs().max()}


def make_step(*sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1])
    plan = ts.ShardingPlan({"0.weight": P("model")}, default=P())
    return ts.make_train_step(model, squares, optax.adam(1e-2), mesh=mesh, plan=plan)


@pytest.fixture(scope="module")
def step():
    return make_step(4, 2)


class Noisy(Dataset):
    """Augments with all three global generators."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return DATA[index] + 0.1 * (torch.rand(()) + random.random() + float(np.random.rand()))


class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(ROWS)
        return iter(DATA[order])


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 8, "shuffle": True, "drop_last": True, **options})


LOADERS = {
    "list": lambda: list(DATA[:40].split(8)),
    "shuffled": loader,
    "own generator": lambda: loader(generator=torch.Generator().manual_seed(5)),
    "augmented": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=8, drop_last=True),
    "function": lambda: lambda position: (DATA[:8] * n for n in itertools.count(position)),
}


def losses(log):
    return [
        r["loss"] for r in map(json.loads, (log / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "train"
    ]


def run(step, batches, directory, steps=STEPS, **options):
    """One process's part of a run that logs and saves."""
    with ts.Checkpointer(directory / "checkpoints", every=3) as checkpointer:
        return ts.fit(
            step,
            None,
            batches,
            steps=steps,
            checkpointer=checkpointer,
            log=directory / "log",
            progress=False,
            **options,
        )


def values(state):
    return {name: np.asarray(value) for name, value in state.tensors.items()}


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the workers do not touch
@pytest.mark.parametrize("kind", LOADERS)
def test_stopped_and_resumed_is_uninterrupted_to_the_bit(kind, step, tmp_path):
    whole = run(step, LOADERS[kind](), tmp_path / "whole")
    parts = tmp_path / "parts"
    for number, stop in enumerate((4, 7, STEPS)):  # within an epoch and at none of the checkpoints' steps
        torch.manual_seed(number)  # another process would have drawn other numbers before
        random.seed(number)
        np.random.seed(number)
        state = run(step, LOADERS[kind](), parts, stop)
        assert int(state.num_batches) == stop
    assert losses(parts / "log") == losses(tmp_path / "whole" / "log")
    assert len(losses(parts / "log")) == STEPS
    for name, value in values(whole).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "augmented"])
def test_loops_of_ones_own_see_the_same_numbers_afterwards(kind):
    """The generators of the process are left as they were."""
    batches = LOADERS[kind]()
    torch.manual_seed(0)
    random.seed(0)
    wanted = torch.rand(3), random.random(), np.random.get_state()[2]
    torch.manual_seed(0)
    random.seed(0)
    list(itertools.islice(Batches(batches, seed=0, caller="fit").starting_at(3), 9))
    found = torch.rand(3), random.random(), np.random.get_state()[2]
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]


def test_every_epoch_sees_every_row_in_another_order():
    batches = DataLoader(torch.arange(40), batch_size=8, shuffle=True)
    drawn = list(itertools.islice(Batches(batches, seed=0, caller="fit").starting_at(0), 10))
    first, second = torch.cat(drawn[:5]), torch.cat(drawn[5:])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(40))
    assert first.tolist() != second.tolist()
    other = torch.cat(list(itertools.islice(Batches(batches, seed=1, caller="fit").starting_at(0), 5)))
    assert other.tolist() != first.tolist()


def test_samplers_are_told_the_epoch():
    sampler = torch.utils.data.DistributedSampler(range(40), num_replicas=1, rank=0, shuffle=True)
    batches = DataLoader(torch.arange(40), batch_size=8, sampler=sampler)
    list(itertools.islice(Batches(batches, seed=0, caller="fit").starting_at(5), 6))
    assert sampler.epoch == 2


def test_trains_as_a_loop_of_ones_own(step):
    """fit adds nothing to the numbers: the same steps by hand give the same state."""
    batches = list(DATA[:40].split(8))
    state = ts.fit(step, step.init(seed=0), batches, steps=7, progress=False)
    by_hand = step.init(seed=0)
    for number in range(7):
        by_hand, _ = step(by_hand, batches[number % 5])
    for name, value in values(by_hand).items():
        np.testing.assert_allclose(values(state)[name], value, rtol=1e-6, atol=1e-7, err_msg=name)  # another program
    assert (int(state.step), int(state.num_batches)) == (7, 7)


def test_state_alone_goes_on_where_it_was(step):
    whole = ts.fit(step, step.init(seed=0), loader(), steps=9, progress=False)
    state = ts.fit(step, step.init(seed=0), loader(), steps=4, progress=False)
    state = ts.fit(step, state, loader(), steps=9, progress=False)
    for name, value in values(whole).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_no_batch_is_drawn_past_the_end(step):
    drawn = []

    def batches(position):
        for number in itertools.count(position):
            drawn.append(number)
            yield DATA[:8]

    ts.fit(step, None, batches, steps=3, prefetch=2, progress=False)
    assert drawn == [0, 1, 2]


def test_checkpoint_has_the_metrics_of_its_own_batch(step, tmp_path):
    """Also where no record is due."""
    run(step, loader(), tmp_path / "often", steps=4)
    run(step, loader(), tmp_path / "seldom", steps=4, log_every=3)
    checkpoints = tmp_path / "seldom" / "checkpoints"
    assert read_head(ts.Checkpointer(checkpoints).path(4)).metrics["loss"] == losses(tmp_path / "often" / "log")[-1]
    assert len(losses(tmp_path / "seldom" / "log")) == 2


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


def test_evaluation_in_bfloat16_adds_up_in_float():
    model = nn.Linear(FEATURES, 2).bfloat16()
    step = ts.make_train_step(
        model,
        lambda m, x: m(x).square().mean(),
        optax.sgd(0.1),
        mesh=ts.make_mesh(batch=8),
        plan=ts.ShardingPlan({}, default=P()),
    )
    state, batches = step.init(seed=0), [part.bfloat16() for part in DATA[:40].split(8)]
    evaluate = step.evaluation()
    wanted = np.mean([float(evaluate(state, batch)["loss"]) for batch in batches])
    assert Evaluation(evaluate, Batches(batches, seed=0, caller="fit"))(state) == {"loss": pytest.approx(wanted, 1e-12)}


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
    records = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
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


def test_evaluation_weighs_rows(step):
    """A shorter last batch counts for its rows."""
    state, found = step.init(seed=0), {}
    mesh_rows = [DATA[:16], DATA[16:24]]
    evaluation = Evaluation(step.evaluation(), Batches(mesh_rows, seed=0, caller="fit"))
    found = evaluation(state)
    whole = step.evaluation()(state, DATA[:24])
    assert found["loss"] == pytest.approx(float(whole["loss"]), rel=1e-5)  # float32 sums in another order


def test_progress_shows_loss_and_speed(step):
    console = Console(record=True, width=140, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    ts.fit(step, step.init(seed=0), loader(), steps=4, progress=console)
    shown = console.export_text()
    console.file.close()
    assert "4/4" in shown
    assert "loss" in shown
    assert "samples" in shown


def test_progress_shows_the_last_evaluation(step):
    console = Console(record=True, width=140, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    ts.fit(step, step.init(seed=0), loader(), steps=2, eval_loader=loader(), progress=console)
    shown = console.export_text()
    console.file.close()
    assert "eval_loss" in shown


def poisoned(position, at):
    batch = DATA[:8].clone()
    batch[0, 0] = math.nan if position == at else 0
    return batch


def test_bad_step_is_named(step, tmp_path):
    batches = [poisoned(n, 3) for n in range(6)]
    with ts.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ts.BadStepError, match=r"batch 4 was not taken.*the loss is nan.*that of 3\.bias") as found:
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        assert found.value.non_finite == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
        assert (int(found.value.state.step), int(found.value.state.num_batches)) == (3, 3)
        assert "the state is saved in" in "".join(found.value.__notes__)
        assert checkpointer.steps() == [3]
        with pytest.raises(ts.BadStepError, match="batch 4 was not taken"):  # and not passed over in silence
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        state = checkpointer.restore(step)
    good = ts.fit(step, step.init(seed=0), batches[:3], steps=3, progress=False)
    for name, value in values(good).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_bad_step_is_skipped_or_ends_the_run(step, caplog):
    batches = [poisoned(n, 3) for n in range(6)]
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="skip", progress=False)
    assert (int(state.step), int(state.num_batches)) == (5, 6)
    assert all(np.isfinite(value).all() for value in values(state).values())
    assert "batch 4 was not taken" in caplog.text
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="stop", progress=False)
    assert (int(state.step), int(state.num_batches)) == (3, 3)


def test_large_gradient_is_no_step(step):
    with pytest.raises(ts.BadStepError, match=r"the gradient's norm .* \(max_grad_norm=1e-09\)") as found:
        ts.fit(step, step.init(seed=0), loader(), steps=2, max_grad_norm=1e-9, progress=False)
    assert found.value.non_finite == []


def test_first_bad_gradient_is_where_backward_came_to_it():
    """A square root of zero has no gradient: what stands before it is bad, what stands after it is not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

        def forward(self, x):
            return self.c(torch.sqrt(self.b(self.a(x)) * 0))

    mesh = ts.make_mesh(batch=8)
    options = {"mesh": mesh, "plan": ts.ShardingPlan({}, default=P())}
    step = ts.make_train_step(Model(), lambda m, x: m(x).sum(), optax.sgd(0.1), **options)
    with pytest.raises(ts.BadStepError, match=r"4 of 6 gradients are not finite .* that of b\.bias") as found:
        ts.fit(step, None, [DATA[:8]], steps=1, progress=False)
    assert found.value.non_finite == ["a.weight", "a.bias", "b.weight", "b.bias"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_saves_and_leaves(number, error, step, tmp_path):
    before = signal.getsignal(number)

    def batches(position):
        for n in itertools.count(position):
            if n == 5:
                os.kill(os.getpid(), number)
            yield DATA[:8] * (n + 1)

    with pytest.raises(error) as left:
        run(step, batches, tmp_path / "parts", prefetch=1)
    if error is SystemExit:
        assert left.value.code == 143
    assert signal.getsignal(number) is before
    saved = ts.Checkpointer(tmp_path / "parts" / "checkpoints").steps()[-1]
    assert 3 < saved < STEPS
    run(step, LOADERS["function"](), tmp_path / "whole", steps=saved)
    state = ts.Checkpointer(tmp_path / "parts" / "checkpoints").restore(step)
    assert int(state.num_batches) == saved


def test_loader_that_raises_loses_nothing(step, tmp_path):
    def batches(position):
        for n in range(position, 20):
            if n == 5:
                raise OSError("the disk with the data is gone")
            yield DATA[:8]

    with pytest.raises(OSError, match="the disk with the data is gone") as found:
        run(step, batches, tmp_path)
    assert "after 5 of 12 batches" in "".join(found.value.__notes__)
    assert ts.Checkpointer(tmp_path / "checkpoints").steps() == [3, 5]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "the loader has no batches"),
        (iter([DATA[:8]] * 3), "the loader ended before the run did"),
        (lambda position: [DATA[:8]] * 2, "the loader ended before the run did"),
        ([DATA[:6]], "the batch cannot be split on mesh"),
    ],
    ids=["empty", "iterator", "function", "does not divide"],
)
def test_loader_that_does_not_do(batches, message, step):
    with pytest.raises(ValueError, match=message):
        ts.fit(step, None, batches, steps=6, progress=False)


def test_iterator_cannot_be_resumed(step):
    state = ts.fit(step, None, loader(), steps=2, progress=False)
    with pytest.raises(ValueError, match="the state has seen 2 batches, and an iterator cannot be brought to where"):
        ts.fit(step, state, iter(loader()), steps=4, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"steps": 1}, r"the state has seen 2 batches, and steps=1"),
        ({"eval_every": 0}, "eval_every must be a positive integer"),
        ({"on_bad_step": "ignore"}, "on_bad_step must be one of 'raise', 'stop', 'skip', got 'ignore'"),
        ({"max_grad_norm": -1.0}, "fit: max_grad_norm must be a positive number"),
        ({"seed": -1}, "seed must be an integer, 0 or more, got -1"),
        ({"eval_every": 2}, "eval_every and eval_step are for an evaluation, which needs eval_loader"),
    ],
)
def test_options_are_checked_before_anything_runs(options, message, step):
    state = ts.fit(step, None, loader(), steps=2, progress=False)
    with pytest.raises(ValueError, match=message):
        ts.fit(step, state, loader(), progress=False, **{"steps": 4, **options})
    assert not state.step.is_deleted()


def test_donated_state_is_refused(step):
    state = step.init(seed=0)
    ts.fit(step, state, loader(), steps=1, progress=False)
    with pytest.raises(ValueError, match="this state was donated to an earlier step or fit"):
        ts.fit(step, state, loader(), steps=2, progress=False)


def test_loader_of_the_wrong_kind(step):
    with pytest.raises(
        TypeError, match="a loader is an iterable of batches, or a function from a position to one, got int"
    ):
        ts.fit(step, None, 3, steps=1, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": nn.Linear(2, 2)}, "step must be a TrainStep, got Linear. make_train_step gives one"),
        ({"state": nn.Linear(2, 2)}, "state must be a TrainState or None, got Linear"),
        ({"loader": {"x": DATA}}, "a loader is an iterable of batches, .* got dict"),
        ({"loader": lambda position: None}, "must return an iterable of batches, got NoneType at position 0"),
        ({"eval_loader": lambda position: [DATA]}, "eval_loader must be an Iterable, got function"),
        ({"eval_loader": [DATA[:8]], "eval_step": print}, "eval_step must be an EvalStep or None"),
        ({"checkpointer": "run"}, "checkpointer must be a Checkpointer or None, got str"),
        ({"log": True}, "log must be a path, got bool"),
    ],
)
def test_arguments_of_the_wrong_kind(options, message, step):
    with pytest.raises(TypeError, match=message):
        ts.fit(**{"step": step, "state": None, "loader": loader(), "steps": 1, "progress": False, **options})


def test_log_that_is_a_file(step, tmp_path):
    (tmp_path / "log").touch()
    with pytest.raises(NotADirectoryError, match=r"fit: log must be a directory, but .* is a file"):
        ts.fit(step, None, loader(), steps=1, log=tmp_path / "log", progress=False)


def test_one_program_for_the_whole_run():
    model = nn.Linear(FEATURES, 2)
    mesh = ts.make_mesh(batch=8)
    options = {"mesh": mesh, "plan": ts.ShardingPlan({}, default=P())}
    step = ts.make_train_step(model, lambda m, x: m(x).sum(), optax.sgd(0.1), **options)
    ts.fit(step, None, loader(), steps=12, progress=False)
    assert step.num_compiles == 1


def test_processes_stop_together(tmp_path):
    """A signal to one of two processes lets both save the same step, and leave."""
    run_processes(
        f"""
        import itertools, signal
        from pathlib import Path
        from tests.fit import test_fit as t

        directory = Path({str(tmp_path)!r})

        def batches(position):
            for number in itertools.count(position):
                if number == 6 and rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                yield t.DATA[:8] * (number + 1)

        step = t.make_step(2, 2)
        try:
            t.run(step, batches, directory, prefetch=1)
        except SystemExit as left:
            assert left.code == 143
        else:
            raise AssertionError("it should have left")
        steps = ts.Checkpointer(directory / "checkpoints").steps()
        (directory / f"steps{{rank}}").write_text(repr(steps))
        """,
        2,
    )
    first, second = ((tmp_path / f"steps{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert 3 < eval(first)[-1] < STEPS
    assert len(losses(tmp_path / "log")) == eval(first)[-1]


def test_unguarded_steps_are_the_plain_ones(step):
    """Without a limit of the norm there is no other program than that of a loop of one's own."""
    programs = step.num_compiles
    state = ts.fit(step, None, list(DATA[:40].split(8)), steps=3, max_grad_norm=None, progress=False)
    by_hand = step.init(seed=0)
    for number in range(3):
        by_hand, _ = step(by_hand, DATA[number * 8 : number * 8 + 8])
    assert step.num_compiles <= programs + 1
    for name, value in values(by_hand).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)
