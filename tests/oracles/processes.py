"""Several processes that are one JAX program, on this host."""

import ast
import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator

# One process imports everything, which takes longest, and forks before JAX starts.
IMPORTS = "import os, sys, traceback, warnings, jax, pytest, torch, torch_shard as ts"
START = """
num, port, devices = map(int, sys.argv[1:])
warnings.filterwarnings("ignore", "os.fork")  # of JAX, whose threads have not started
rank = next((rank for rank in range(num) if os.fork() == 0), None)
if rank is None:
    for _ in range(num):
        if os.wait()[1]:
            os._exit(1)
    os._exit(0)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank, initialization_timeout=60)
try:
"""
APART = """
import pathlib, time
apart = pathlib.Path(sys.argv[4])
num, port, devices = map(int, sys.argv[1:4])
warnings.filterwarnings("ignore", "os.fork")
ranks = {}
for rank in range(num):
    if not (pid := os.fork()):
        break
    ranks[pid] = rank
else:
    while ranks:
        pid, status = os.wait()
        (apart / f"{ranks.pop(pid)}.end").write_text(repr((os.waitstatus_to_exitcode(status), time.time())))
    os._exit(0)
output = os.open(apart / f"{rank}.output", os.O_CREAT | os.O_WRONLY)
os.dup2(output, 1), os.dup2(output, 2)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank, initialization_timeout=60)
def mark():
    (apart / "mark").write_text(repr(time.time()))
"""
END = """
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # an orderly end would wait for the others
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of one process.

    Attributes:
        status: Its exit status, negative for a signal; None if it had to be killed.
        output: All that it wrote.
        seconds: From the program's `mark()` in any process to its end.
    """

    status: int | None
    output: str
    seconds: float


def run_processes(program: str, num: int, *, num_devices: int = 2, timeout_s: float = 120) -> None:
    """Run a program, which sees `rank`, in several processes with so many devices each; all must come to their end."""
    with _port() as port:
        text = IMPORTS + START + textwrap.indent(textwrap.dedent(program), "    ") + END
        command = [sys.executable, "-c", text, str(num), str(port), str(num_devices)]
        with tempfile.TemporaryFile("w+") as output:
            first = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                first.wait(timeout_s)  # for the first that fails: the others may wait for it forever
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(first.pid, signal.SIGKILL)
                first.wait()
            output.seek(0)
            assert first.returncode == 0, output.read()[-6000:]


def run_job(
    program: str,
    num: int,
    *,
    num_devices: int = 1,
    stopped: int | None = None,
    timeout_s: float = 90,
    **environment: object,
) -> list[Ended]:
    """Run a program that may fail, in processes as a launcher starts them; see how each of them ends.

    Args:
        program: It sees `rank`, and calls `mark()` where the clock begins.
        num: Number of processes.
        num_devices: Of each.
        stopped: The process that is not to end.
        timeout_s: For all; who has not ended by then is killed.
        environment: Seconds by the names of `Times`: `silent=3`.
    """
    with tempfile.TemporaryDirectory() as apart, _port() as port:
        text = IMPORTS + APART + textwrap.dedent(program)
        command = [sys.executable, "-c", text, str(num), str(port), str(num_devices), apart]
        settings = {f"TORCH_SHARD_{name.upper()}_S": str(value) for name, value in environment.items()}
        first = subprocess.Popen(command, start_new_session=True, env=os.environ | settings)
        until = time.monotonic() + timeout_s
        awaited = [pathlib.Path(apart) / f"{rank}.end" for rank in range(num) if rank != stopped]
        while first.poll() is None and not all(map(pathlib.Path.exists, awaited)) and time.monotonic() < until:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        return [_end_of(pathlib.Path(apart), rank) for rank in range(num)]


def _end_of(apart: pathlib.Path, rank: int) -> Ended:
    output = (apart / f"{rank}.output").read_text(errors="replace")
    if not (end := apart / f"{rank}.end").exists():
        return Ended(None, output, math.inf)
    status, when = ast.literal_eval(end.read_text())
    begun = float((apart / "mark").read_text()) if (apart / "mark").exists() else when
    return Ended(status, output, when - begun)


@contextlib.contextmanager
def _port() -> Iterator[int]:
    # gRPC too listens with SO_REUSEPORT: bound, though never listening, the port stays ours.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
