"""Processes that run a program, forked from one that has imported what all need: alone, or as one JAX program."""

import ast
import atexit
import contextlib
import dataclasses
import functools
import json
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
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, wait
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


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


def run_processes(
    program: str, num: int, *, num_devices: int = 2, timeout_s: float = 120, anew: bool = False, **environment: str
) -> None:
    """Run a program, which sees `rank`, in several processes with so many devices each; all must come to their end.

    Those that have run one program run the next, each in a scope of its own; after a failure, others take their place.

    Args:
        program: It leaves the modules that it changes as they were.
        num: Number of processes.
        num_devices: Of each.
        timeout_s: For this program.
        anew: True where a program needs processes that have run nothing, and leaves none behind.
        environment: What else is in the environment of such new processes.
    """
    together = Together(num, num_devices, environment) if anew else _those_of(num, num_devices)
    failures = together.run(textwrap.dedent(program), timeout_s)
    if anew:
        together.close()
    elif failures:
        _end_all()
    assert not failures, "\n".join(failures)[-6000:]


def run_job(
    program: str, num: int, *, num_devices: int = 1, stopped: int | None = None, timeout_s: float = 90, **times: object
) -> list[Ended]:
    """Run a program that may fail, in processes as a launcher starts them; see how each of them ends.

    Args:
        program: It sees `rank`, and calls `mark()` where the clock begins.
        num: Number of processes.
        num_devices: Of each.
        stopped: The process that is not to end.
        timeout_s: For all; who has not ended by then is killed.
        times: Seconds by the names of `Times`: `silent=3`.
    """
    settings = {f"TORCH_SHARD_{name.upper()}_S": str(value) for name, value in times.items()}
    with _port() as port, Family(_meets(num, port, num_devices) + textwrap.dedent(program), num, **settings) as family:
        family.wait([rank for rank in range(num) if rank != stopped], timeout_s)
    return family.ends


def run_alone(program: str, *arguments: object, timeout_s: float = 90, **environment: str) -> Ended:
    """Run a program in a process of its own, with these arguments; JAX has not started there."""
    with Family(textwrap.dedent(program), 1, *arguments, **environment) as family:
        family.wait([0], timeout_s)
    return family.ends[0]


class Family:
    """Forked processes that each run one program; at the end of the context they are killed.

    Attributes:
        ends: How each of them ended, after that.
    """

    ends: list[Ended]

    def __init__(self, program: str, num: int, *arguments: object, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._apart, self._num = pathlib.Path(self._folder.name), num
        environ, arguments = os.environ | environment, tuple(map(str, arguments))
        order = {"program": program, "num": num, "apart": str(self._apart), "arguments": arguments, "environ": environ}
        self._keeper = _nursery().fork(order)

    def __enter__(self) -> "Family":
        return self

    def __exit__(self, *_: object) -> None:
        last = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._keeper, signal.SIGKILL)
            while time.monotonic() < last:  # until they hold no lock any more
                os.killpg(self._keeper, 0)
                time.sleep(0.01)
        self.ends = [self._end_of(rank) for rank in range(self._num)]
        self._folder.cleanup()

    def wait(self, ranks: list[int], timeout_s: float, *, until: str | None = None) -> None:
        """Wait for the end of these, or until they have written so much."""
        last = time.monotonic() + timeout_s
        while time.monotonic() < last and not all(self._is_at(rank, until) for rank in ranks):
            time.sleep(0.02)

    def _is_at(self, rank: int, until: str | None) -> bool:
        return (self._apart / f"{rank}.end").exists() or (until is not None and until in self.output(rank))

    def output(self, rank: int) -> str:
        """All that a process has written so far."""
        path = self._apart / f"{rank}.output"
        return path.read_text(errors="replace") if path.exists() else ""

    def _end_of(self, rank: int) -> Ended:
        if not (end := self._apart / f"{rank}.end").exists():
            return Ended(None, self.output(rank), math.inf)
        status, when = ast.literal_eval(end.read_text())
        begun = float((self._apart / "mark").read_text()) if (self._apart / "mark").exists() else when
        return Ended(status, self.output(rank), when - begun)


class Together:
    """Processes that are one JAX program, and run what they are sent, one program after the other."""

    def __init__(self, num: int, num_devices: int, environment: dict[str, str]) -> None:
        self._stack = contextlib.ExitStack()
        server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(90)  # who has died by then does not call
        port = self._stack.enter_context(_port())
        program = f"{_meets(num, port, num_devices)}\nrun_what_comes(rank, {server.getsockname()})"
        self._family = self._stack.enter_context(Family(program, num, **environment))
        called = [self._stack.enter_context(Connection(os.dup(server.accept()[0].detach()))) for _ in range(num)]
        self._ranks = {line: line.recv() for line in called}

    def run(self, program: str, timeout_s: float) -> list[str]:
        """What failed in each process that failed; the others may wait for it forever."""
        failures, awaited, until = [], dict(self._ranks), time.monotonic() + timeout_s
        for line in awaited:
            with contextlib.suppress(OSError):  # it has died, which is found below
                line.send(program)
        while awaited and (heard := wait(list(awaited), max(0.0, until - time.monotonic()))):
            for line in heard:
                if failure := _heard(line):
                    rank = awaited[line]
                    failures.append(f"Process {rank}: {failure}\n{self._family.output(rank)[-3000:]}")
                    until = min(until, time.monotonic() + 2)
                del awaited[line]
        return failures + [f"Process {rank} has not come to its end." for rank in awaited.values()]

    def close(self) -> None:
        """Kill all."""
        self._stack.close()


_RUNNING: dict[tuple[int, int], Together] = {}


def _those_of(num: int, num_devices: int) -> Together:
    if (num, num_devices) not in _RUNNING:
        _end_all()  # others would only take memory
        _RUNNING[num, num_devices] = Together(num, num_devices, {})
    return _RUNNING[num, num_devices]


@atexit.register
def _end_all() -> None:
    while _RUNNING:
        _RUNNING.popitem()[1].close()


def _heard(line: Any) -> str:
    try:
        return line.recv()
    except (EOFError, OSError):
        return "it has died."


class _Nursery:
    """A process that has imported everything, and forks others before JAX has started."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore:os.fork", "-c", "from tests.oracles.processes import serve; serve()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, cwd=ROOT, text=True, bufsize=1, **pipes)
        atexit.register(self.close)

    def fork(self, order: dict[str, Any]) -> int:
        """The process, and group, that waits for the ones it has forked."""
        self._server.stdin.write(json.dumps(order) + "\n")
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


_nursery = functools.cache(_Nursery)


def serve() -> None:
    """Fork processes for each order that is read; in each of them, run its program."""
    import numpy
    import optax
    import orbax.checkpoint  # noqa: F401
    import pytest
    import torch
    import torch.utils.data

    import torch_shard as ts

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if (keeper := os.fork()) == 0:
            break
        sys.stdout.write(f"{keeper}\n")
        sys.stdout.flush()
    else:
        return
    apart = pathlib.Path(order["apart"])
    rank = _one_of(order["num"], apart)
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = ["program", *order["arguments"]]
    known = {"jax": sys.modules["jax"], "np": numpy, "optax": optax, "os": os, "pytest": pytest, "sys": sys}
    known |= {"torch": torch, "ts": ts, "rank": rank, "apart": apart, "meet": meet, "run_what_comes": run_what_comes}
    module = sys.modules["__main__"]
    vars(module).update(known, mark=lambda: (apart / "mark").write_text(repr(time.time())))
    exec(compile(order["program"], "program", "exec"), vars(module))


def _one_of(num: int, apart: pathlib.Path) -> int:
    """Fork so many; returns in each of them, while this process notes how they end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    ranks = {}
    for rank in range(num):
        if not (pid := os.fork()):
            output = os.open(apart / f"{rank}.output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(output, 2)
            return rank
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        written = apart / f"{(rank := ranks.pop(pid))}.written"
        written.write_text(repr((os.waitstatus_to_exitcode(status), time.time())))
        written.rename(apart / f"{rank}.end")
    os._exit(0)


def _meets(num: int, port: int, num_devices: int) -> str:
    return f"meet(rank, {num}, {port}, {num_devices})\n"


def meet(rank: int, num: int, port: int, num_devices: int) -> None:
    """Be one of several processes with so many CPU devices each."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num, rank, initialization_timeout=60)


def run_what_comes(rank: int, place: tuple[str, int]) -> None:
    """Run each program that is sent, and answer with its failure, which is empty if there is none."""
    known, main = dict(vars(sys.modules["__main__"])), vars(sys.modules["__main__"])
    line = Client(place)
    line.send(rank)
    with contextlib.suppress(EOFError):
        while True:
            program = line.recv()
            try:
                exec(compile(program, "program", "exec"), main)
            except BaseException:
                line.send(traceback.format_exc())
            else:
                line.send("")
            main.clear()
            main.update(known)
    os._exit(0)  # an orderly end would wait for the others


@contextlib.contextmanager
def _port() -> Iterator[int]:
    # gRPC too listens with SO_REUSEPORT: bound, though never listening, the port stays ours.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
