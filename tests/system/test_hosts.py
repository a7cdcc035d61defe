"""Several processes: what they must have alike is compared, and the failure of one is the end of all."""

import random
import re
import signal

import numpy as np
import pytest

from tests.oracles.processes import Ended, run_job, run_processes

MISTAKES = """
import dataclasses, optax, re, tempfile
import numpy as np
from jax.sharding import PartitionSpec as P
from torch import nn

mesh, plan = ts.make_mesh(batch=jax.device_count()), ts.ShardingPlan({}, default=P())
ONES = torch.ones(8, 4)

def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

def squares(model, batch):
    return model(batch).square().mean()

def make(optimizer=None, plan=plan, seed=0):
    return ts.make_train_step(model(seed), squares, optimizer or optax.adamw(1e-3), mesh=mesh, plan=plan)

def first_step(batch=ONES, **options):
    step = make(**options)
    step(step.init(seed=0), batch)

def refused(words, call, kind=ValueError):
    with pytest.raises(kind) as found:
        call()
    assert re.search(words, str(found.value)), found.value

step = make()
state, _ = step(step.init(seed=0), ONES)
"""


def test_mistakes_are_errors_in_all_processes_and_the_job_goes_on():
    run_processes(
        MISTAKES
        + """
other = bool(rank)
refused("^init: 0.weight differs between process 0 and 1; 0.bias .*torch.manual_seed", lambda: make(seed=rank).init())
refused("^init: the optimiser's state differs", lambda: make([optax.adamw(1e-3), optax.sgd(0.1, 0.9)][rank]).init())
refused("^init: seed differs between process 0 and 1 .0 and 1.", lambda: make().init(seed=rank))
refused("(?s)the program differs.*process 0: .*1.0*e-03.*optimizer.*process 1: .*2.0*e-03",
        lambda: first_step(optimizer=optax.adamw(1e-3 * (1 + rank))))
def with_torch():
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3 * (1 + rank))
    step = ts.make_train_step(own, squares, optimizer, mesh=mesh, plan=plan)
    step(step.init(seed=0), ONES)

refused("lr of group 0 differs between process 0 and 1 .0.001 and 0.002.. Give the optimizer, its schedule", with_torch)
refused("state.*learning_rate.* differs", lambda: first_step(
    optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * (1 + rank))))
refused("the content of batch differs between process 0 and 1. .*DistributedSampler", lambda: first_step(ONES * rank))
refused("the shape of batch differs between process 0 and 1 ..8, 4. float32 and .16, 4. float32.",
        lambda: first_step(torch.ones(8 + 8 * rank, 4)))
refused("the spec of 0.weight differs", lambda: first_step(
    plan=[plan, ts.ShardingPlan({"0.weight": P("batch")}, default=P())][rank]))
twins = {"loader": [ONES] * 9, "progress": False}
for name, values in {"steps": (2, 3), "seed": (0, 1), "eval_every": (1, 2)}.items():
    refused(f"^fit: {name} differs between process 0 and 1 .{values[0]} and {values[1]}.",
            lambda: ts.fit(make(), None, **twins | {"steps": 2, "eval_loader": [ONES], name: values[rank]}))
refused("^fit: the length of loader differs", lambda: ts.fit(make(), None, [ONES] * (3 + rank), steps=2))
refused("^fit: batch_size.* differs between process 0 and 1 .8 and 16.", lambda: ts.fit(
    make(), None, torch.ones(64, 4), batch_size=8 * (1 + rank), steps=2, progress=False))
with tempfile.TemporaryDirectory() as own:
    refused("^fit: every of the Checkpointer differs", lambda: ts.fit(
        make(), None, **twins, steps=2, checkpointer=ts.Checkpointer("/tmp", every=3 + rank)))
    refused("^Checkpointer.save: directory differs", lambda: ts.Checkpointer(own).save(state))

mine = model(seed=rank)
mine.register_buffer("odd", torch.tensor([-0.0, float("nan"), rank]).bfloat16())
mine.register_buffer("wide", torch.tensor(2**40 + rank))
mine.register_buffer("none", torch.zeros(0, 3))
mine.register_buffer("turned", torch.arange(6.0).mul(1 + rank).reshape(2, 3).T)
def bits(module):
    values = module.state_dict().values()
    return [value.detach().contiguous().view(torch.uint8).tolist() for value in values if value.dim()]

ts.broadcast(mine)
assert mine.wide == 2**40 and bits(mine)[-4:] == bits(model(seed=0))
everywhere = ts.gather_from_jax_processes(bits(mine))
assert everywhere[0] == everywhere[1]
refused("^broadcast: the shape of weight differs", lambda: ts.broadcast(nn.Linear(2, 2 + rank)))

big = ts.gather_from_jax_processes(torch.full((3_000_000,), rank))  # more than goes over the channel
assert [row[0].item() for row in big] == [0, 1]
state, metrics = step(state, ONES)
assert step.num_compiles == 1
state = ts.fit(step, state, [ONES] * 4, steps=4, check_replicas_every=2, progress=False)
parts = [jax.device_put(np.full(1, 1.0 + rank, np.float32), device) for device in jax.local_devices()]
flawed = jax.make_array_from_single_device_arrays((1,), state.params["2.bias"].sharding, parts)
state = dataclasses.replace(state, params={**dict(state.params), "2.bias": flawed})
refused(r"(?s)replicas differ .*params.*2.bias.*process 1", lambda: ts.fit(
    step, state, [ONES] * 6, steps=6, check_replicas_every=1, progress=False), AssertionError)
""",
        2,
    )


@pytest.mark.slow
def test_processes_generate_what_torch_generates():
    run_processes(
        """
import transformers
torch.manual_seed(0)
small = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=16)
gpt = transformers.GPT2LMHeadModel(small)
gpt.generation_config.eos_token_id, ids = None, torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
made = ts.generate(gpt.eval(), ids, max_new_tokens=3, mesh=ts.make_mesh(batch=4), pad_token_id=0)
wanted = gpt.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3, pad_token_id=0)
assert made.tolist() == wanted.tolist()
""",
        2,
    )


def test_processes_that_do_not_reach_each_other_are_told_why_and_may_try_again():
    run_processes(
        """
def refused(words):
    with pytest.raises(RuntimeError, match=words):
        ts.gather_from_jax_processes(rank)

os.environ["TORCH_SHARD_HOST"] = ["203.0.113.9", "unused"][rank]
refused("^gather_from_jax_processes: process 0 cannot listen for the other processes: ValueError: TORCH_SHARD_HOST must"
        " be an address of the host of process 0, or a name of one, found 203.0.113.9$")
os.environ["TORCH_SHARD_HOST"] = "127.0.0.1"
import socket
connect = socket.create_connection
def no_route(*_, **__):
    raise OSError("no route to host")

socket.create_connection = no_route
why = ": OSError: no route to host" * rank
refused(rf"^gather_from_jax_processes: processes \\[1\\] do not reach process 0, .* at 127.0.0.1 port \\d+{why}\\. .*"
        "set TORCH_SHARD_HOST to it there.")
socket.create_connection = connect
assert ts.gather_from_jax_processes(rank) == [0, 1]
""",
        2,
        anew=True,
    )


TRAINS = """
import itertools, signal, time
from tests.tables import runs as t

def batches(position):
    for number in itertools.count(position):
        if number == 6 and rank == {rank}:
            mark()
            {act}
        yield t.DATA[:8] * (number + 1)

step = t.make_step(jax.device_count(), 1)
try:
    t.run(step, batches, apart, steps=12)
finally:
    print("saved", ts.Checkpointer(apart / "checkpoints").steps(), flush=True)
"""
TIMES = {"silent": 4, "grace": 2}


def failing(act: str, rank: int = 1, num: int = 2, **options: int) -> list[Ended]:
    """A run in which one process does this as it draws the seventh of twelve batches."""
    return run_job(TRAINS.format(rank=rank, act=act), num, **TIMES, **options)


def saved(end: Ended) -> list[int]:
    return eval(re.findall(r"saved (\[.*\])", end.output)[-1])


@pytest.mark.slow
def test_an_error_of_one_loader_saves_one_step_on_all():
    good, bad = failing('raise OSError("no disk")')
    assert (good.status, bad.status) == (1, 1)
    last = saved(bad)[-1]  # the other may have begun its sixth step when it heard of it, or not
    assert saved(good) == saved(bad) == [3, last]
    assert last in (5, 6)
    assert f"PeerError: fit: process 1 failed: OSError: no disk. All stopped, after {last} batches." in good.output
    assert f"OSError: no disk\nfit: after {last} of 12 batches.\nfit: the state is saved in" in bad.output
    assert max(good.seconds, bad.seconds) < 30


@pytest.mark.slow
def test_a_killed_process_ends_the_others():
    """Whatever they wait for: a step, or a checkpoint of which it was to write a part."""
    other, killed = failing("os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.status == -signal.SIGKILL
    assert other.status not in (0, None)
    # JAX ends a process at once and by itself where it hears of it first
    words = [
        "process 1 failed: it has died (killed, or out of memory?)",
        "Terminating process because the JAX distributed service detected fatal",
    ]
    assert any(text in other.output for text in words), other.output
    assert other.seconds < 30


@pytest.mark.slow
def test_a_stopped_process_ends_the_others():
    stopped, other = failing("os.kill(os.getpid(), signal.SIGSTOP)", 0, stopped=0)
    assert (stopped.status, other.status) == (None, 75)
    assert "process 0 failed: no sign of life for 4 s" in other.output
    assert re.search(r"exiting with status 75: lost a peer \(process \d is in step \d of fit\)", other.output)
    assert other.seconds < 30


@pytest.mark.slow
def test_a_process_that_compiles_alone_is_told_so():
    """One has another batch in its third step: it waits to compare, and the other for its part of the sum."""
    ends = run_job(
        MISTAKES
        + """
for number in range(9):
    if number == 2:
        mark()
    batch = torch.ones(16, 4) if number == 2 and rank else ONES
    state, metrics = step(state, batch)
    float(metrics["loss"])
""",
        2,
        **TIMES,
    )
    words = "process 0 has gone on without it. Process 0 is .*. Process 1 waits in the compilation of make_train_step"
    assert re.search(words, ends[1].output)
    assert "process 1 failed: PeerError: make_train_step: the processes do not come together" in ends[0].output
    assert all(end.status not in (0, None) and end.seconds < 30 for end in ends)


@pytest.mark.slow
def test_a_call_of_one_process_alone_leaves_later_calls_of_all_as_they_are(tmp_path):
    """It is told that the other has gone on, catches that, and goes on too."""
    ends = run_job(
        MISTAKES
        + f"""
saver = ts.Checkpointer({str(tmp_path / "run")!r})
for number in range(4):
    state, metrics = step(state, ONES)
    float(metrics["loss"])
    if number == 3 or (rank == 1 and number == 1):
        try:
            saver.save(state)
        except RuntimeError as error:
            print("caught in step", number, error)
saver.wait()
""",
        2,
        **TIMES,
    )
    assert [end.status for end in ends] == [0, 0], [end.output for end in ends]
    assert "caught" not in ends[0].output
    assert re.findall(r"caught in step (\d) .*process 0 has gone on without it", ends[1].output) == ["1"]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_00000005"]


@pytest.mark.slow
def test_a_process_that_ends_early_ends_the_others():
    other, early = failing("sys.exit(0)")
    assert other.status == 75
    assert "process 1 has ended (it came to its end) while others go on." in other.output
    assert early.seconds < 60


@pytest.mark.slow
def test_a_signal_to_one_of_four_saves_one_step_on_all():
    ends = failing("signal.raise_signal(signal.SIGINT)", rank=2, num=4)
    assert {end.status for end in ends} == {143, -signal.SIGINT}
    assert len({tuple(saved(end)) for end in ends}) == 1


@pytest.mark.slow
def test_a_signal_before_the_loop_stops_it_at_its_beginning():
    """JAX has heard it then, and not we."""
    act = "signal.raise_signal(signal.SIGTERM)"
    program = f"import signal\nif rank == 1: mark(), {act}\n" + TRAINS.format(rank=-1, act="")
    ends = run_job(program.replace("yield", "time.sleep(0.3)\n        yield"), 2, **TIMES)
    assert [end.status for end in ends] == [143, 143]
    assert saved(ends[0]) == saved(ends[1])
    assert saved(ends[0])[-1] < 12


SURVIVES = """
import threading, time, signal
import numpy as np
from tests.tables import runs as t

def batches(position):
    for number in range(position, 40):
        time.sleep(0.1)
        yield t.DATA[:8] * (number + 1)

step = t.make_step(jax.device_count(), 1)
if rank == {rank}:
    threading.Timer({after}, os.kill, (os.getpid(), signal.SIGKILL)).start()
with ts.Checkpointer({directory!r}, every=2) as checkpointer:
    state = ts.fit(step, None, batches, steps=40, checkpointer=checkpointer, progress=False)
values = {{name: tensor.numpy() for name, tensor in step.export(state).state_dict().items()}}
if rank == 0:
    np.savez({directory!r} + "/values.npz", **values)
"""


def survive(directory, rank: int = -1, after: float = 0, num: int = 2) -> list[Ended]:
    """One start of a run that goes on from its newest checkpoint, in which one process is killed after some seconds."""
    program = SURVIVES.format(rank=rank, after=after, directory=str(directory))
    return run_job(program, num, num_devices=2 // num, timeout_s=120, **TIMES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody kills ends with."""
    directory = tmp_path_factory.mktemp("whole")
    assert [end.status for end in survive(directory)] == [0, 0]
    return np.load(directory / "values.npz")


@pytest.mark.slow
def test_a_run_survives_a_kill(whole, tmp_path):
    assert_survives(whole, tmp_path, num_kills=1)


def assert_survives(whole, tmp_path, *, num_kills) -> None:
    """Kill one process of a run so often, at first process 0, and let it go on: it ends as one that nobody kills."""
    draw, kills = random.Random(3), 0
    while kills < num_kills:
        ends = survive(tmp_path / "killed", draw.randrange(2), draw.uniform(3, 8))
        if all(end.status == 0 for end in ends):  # it came to its end before
            assert_equal(np.load(tmp_path / "killed" / "values.npz"), whole)
            for path in (tmp_path / "killed").glob("step_*"):
                path.rename(tmp_path / f"{path.name}.{kills}")
            continue
        assert all(end.status not in (0, None) for end in ends), ends
        kills += 1
    assert [end.status for end in survive(tmp_path / "killed")] == [0, 0]
    assert_equal(np.load(tmp_path / "killed" / "values.npz"), whole)


def assert_equal(found, wanted) -> None:
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_with_one_process_fewer(whole, tmp_path):
    survive(tmp_path / "fewer", rank=1, after=8)
    (end,) = survive(tmp_path / "fewer", num=1)
    assert end.status == 0, end.output
    found = np.load(tmp_path / "fewer" / "values.npz")
    for name in whole:
        np.testing.assert_allclose(
            found[name], whole[name], rtol=1e-3, atol=1e-5, err_msg=name
        )  # sums in another order
