"""`torch-shard run`: a command that is started again when it fails."""

import os
import signal
import subprocess
import sys
import time

import pytest

# Under the command's own name it needs neither torch nor JAX.
COMMAND = (
    "import sys\nfrom torch_shard.cli import main\ntry:\n    main()\nfinally:\n    assert 'jax' not in sys.modules\n"
)
LIFE = """
import os, signal, sys, time
life = int(os.environ["TORCH_SHARD_RESTART_COUNT"])
print("life", life, flush=True)
"""
RANK = "rank = int(os.environ['JAX_PROCESS_ID'])\n"
HEARS = """
def hear(number, _):
    print("heard", number, flush=True)
    time.sleep(0.3)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGINT, hear)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    def start(script, *options):
        (tmp_path / "torch-shard").write_text(COMMAND)
        (tmp_path / "job.py").write_text(LIFE + script)
        command = [
            sys.executable,
            str(tmp_path / "torch-shard"),
            "run",
            *options,
            sys.executable,
            str(tmp_path / "job.py"),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, start_new_session=True, **pipes)

    return start


def ended(process):
    out, err = process.communicate(timeout=30)
    said = [line.removeprefix("torch-shard run: ") for line in err.splitlines() if line.startswith("torch-shard run: ")]
    return process.returncode, out.splitlines(), said


def test_what_fails_once_is_started_again(start):
    status, out, said = ended(start("sys.exit(3 if life == 0 else 0)", "--restarts", "2"))
    assert (status, out) == (0, ["life 0", "life 1"])
    assert said == ["failed with status 3 after 0 s: restart 1 of 2"]


def test_what_always_fails_gives_its_last_status(start):
    status, out, said = ended(start("os.kill(os.getpid(), 9) if life else sys.exit(3)", "--restarts", "1"))
    assert (status, out) == (137, ["life 0", "life 1"])
    assert said[-1] == "failed with status 137 after 0 s: no restart is left"


@pytest.mark.parametrize("script", ["sys.exit(130)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_what_was_asked_to_stop_is_not_started_again(start, script):
    status, out, said = ended(start(script, "--restarts", "3"))
    assert status in (130, 143)
    assert (out, said) == (["life 0"], [])


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, "1"), (signal.SIGINT, "2")])
def test_signals_are_passed_on_once(start, number, processes):
    before = signal.signal(number, signal.SIG_DFL)  # a shell lets what it runs in the background ignore SIGINT
    try:
        running = start(HEARS, "--restarts", "3", "--processes", processes, "--grace", "0")
    finally:
        signal.signal(number, before)
    seen = ""
    while seen.count("ready") < int(processes):
        line = running.stdout.readline()
        assert line, running.stderr.read()
        seen += line
    os.killpg(running.pid, number)  # as a terminal does
    status, out, _ = ended(running)
    assert status == 128 + number
    assert [line[-len("heard 15") :].strip() for line in out] == [f"heard {number}"] * int(processes)


def test_what_is_ignored_stays_ignored(start):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = start("print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended(running)[:2] == (0, ["life 0", "True"])


def test_several_are_one_job_and_end_together(start):
    script = RANK + "print(rank, os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_COORDINATOR_ADDRESS'], flush=True)\n"
    script += "time.sleep(60) if rank == 0 and life == 0 else sys.exit(4 * rank * (1 - life))"
    began = time.monotonic()
    status, out, said = ended(start(script, "--restarts", "1", "--processes", "3", "--grace", "1"))
    assert time.monotonic() - began < 20
    assert status == 0
    places = [
        {line.split()[-1] for line in out if line.startswith(f"[{rank}] {rank} 3 127.0.0.1:")} for rank in range(3)
    ]
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == 2  # one for each life
    assert "SIGTERM to 1 that have not ended within 1 s" in said
    assert any(line.startswith("failed with status ") and line.endswith("restart 1 of 1") for line in said)


def test_what_does_not_heed_sigterm_is_killed(start):
    script = RANK + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1 if rank else 60)\nsys.exit(7)"
    status, _, said = ended(start(script, "--processes", "2", "--grace", "0.5"))
    assert status == 7
    assert said[-2:] == ["process 0 ended with status 137", said[-1]]
    assert "SIGKILL to 1 that have not ended within 0.5 s" in said


def test_what_cannot_be_run_is_refused(start, tmp_path):
    (tmp_path / "torch-shard").write_text(COMMAND)
    command = [sys.executable, str(tmp_path / "torch-shard"), "run", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "cannot run nowhere: No such file or directory" in result.stderr


LEAVES = """
import subprocess
asleep = "import signal, time; {heeds}; print('left', os.getpid(), flush=True); time.sleep(60)"
left = subprocess.Popen([sys.executable, "-c", "import os, " + asleep[7:]], stdout=subprocess.PIPE)
print(left.stdout.readline().decode().strip(), flush=True)
"""


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("end", "processes"), [("sys.exit(0)", "1"), ("os.kill(os.getpid(), signal.SIGKILL)", "2")])
def test_what_a_process_leaves_behind_is_ended_with_it(start, end, processes):
    status, out, said = ended(start(LEAVES.format(heeds="0") + end, "--restarts", "1", "--processes", processes))
    left = [int(line.split()[-1]) for line in out if "left" in line]
    assert len(left) == int(processes) * (1 if "exit(0)" in end else 2)  # in each life
    assert not any(map(lives, left))
    assert not any("left behind" in line for line in said)
    assert status == (0 if "exit" in end else 137)


def test_what_is_left_behind_and_does_not_heed_sigterm_is_killed(start):
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    began = time.monotonic()
    status, out, said = ended(start(LEAVES.format(heeds=ignores) + "sys.exit(3)", "--grace", "0.5"))
    assert time.monotonic() - began < 20
    assert (status, len(out)) == (3, 2)
    assert not lives(int(out[1].split()[-1]))
    assert "SIGKILL to what was left behind and has not ended within 0.5 s" in said
