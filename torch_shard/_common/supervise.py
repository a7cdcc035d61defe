"""A command that is started again when it fails, as one process or several: what `torch-shard run` does.

It needs neither torch nor JAX, so that it waits beside the training with next to no memory.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

RESTARTS = "TORCH_SHARD_RESTART_COUNT"
"""The variable that tells a command how often it was started again; processes of another life meet on another port."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ASKED_TO_STOP = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


def supervise(
    command: Sequence[str],
    say: Callable[[str], None],
    *,
    restarts: int = 0,
    processes: int = 1,
    grace_s: float = 30,
) -> int:
    """Run a command to its end, and again where it fails.

    It is not started again where it was asked to stop: by `SIGINT`, `SIGTERM` or `SIGHUP`, sent to it or to this
    process, which passes signals on.

    Args:
        command: The program and its arguments.
        say: Takes lines that tell what happens.
        restarts: How often it is started again at most.
        processes: How many are started together, with JAX's variables for processes of one host.
        grace_s: Seconds that the other processes have to end by themselves when one has failed, and once more after
            `SIGTERM`.

    Returns:
        The status of the last life, as a shell says it: of the process that failed first.
    """
    group = _Group(say, grace_s)
    heeded = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, group.pass_on) for number in heeded}
    status = 0
    try:
        for life in range(restarts + 1):
            began = time.monotonic()
            status = group.live(command, processes, life)
            if status == 0 or status in ASKED_TO_STOP or group.is_stopping:
                return status
            left = f"restart {life + 1} of {restarts}" if life < restarts else "no restart is left"
            say(f"failed with status {status} after {time.monotonic() - began:.0f} s: {left}")
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Group:
    """The processes of one life after the other, and the signals that come meanwhile."""

    def __init__(self, say: Callable[[str], None], grace_s: float) -> None:
        self.say = say
        self.grace_s = grace_s
        self.is_stopping = False
        self.processes: list[subprocess.Popen[bytes]] = []

    def pass_on(self, number: int, _: object) -> None:
        """Give a signal to all, each of which has it once."""
        self.is_stopping |= 128 + number in ASKED_TO_STOP
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def live(self, command: Sequence[str], processes: int, life: int) -> int:
        """Start all, and wait for all; the status is that of the first that fails."""
        ended: queue.Queue[int] = queue.Queue()
        copies: list[threading.Thread] = []
        self.processes = []
        for index, env in enumerate(_environments(processes, life)):
            pipe = subprocess.PIPE if processes > 1 else None
            # A session of its own: else Ctrl-C would come from the terminal too, and so twice.
            process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, start_new_session=True)
            self.processes.append(process)
            _in_thread(_report, process, index, ended)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if source is not None:
                    copies.append(_in_thread(_copy, source, target.buffer, index))
        if self.is_stopping:  # asked before they were there
            self._send(signal.SIGTERM)
        failed = self._wait(ended)
        for thread in copies:
            thread.join(timeout=5)  # what a process has left behind may hold its output open
        return 0 if failed is None else _status(self.processes[failed])

    def _wait(self, ended: "queue.Queue[int]") -> int | None:
        """Wait until all have ended, and tell which failed first; from then on the others have limited time."""
        first: int | None = None
        harder = iter((signal.SIGTERM, signal.SIGKILL))
        num_left = len(self.processes)
        while num_left:
            is_limited = first is not None and not self.is_stopping
            try:
                index = ended.get(timeout=self.grace_s if is_limited else None)
            except queue.Empty:
                self._end_others(next(harder, signal.SIGKILL))
                continue
            num_left -= 1
            if status := _status(self.processes[index]):
                first = index if first is None else first
                if len(self.processes) > 1:
                    self.say(f"process {index} ended with status {status}")
        return first

    def _end_others(self, number: signal.Signals) -> None:
        left = [process for process in self.processes if process.poll() is None]
        self.say(f"{number.name} to {len(left)} that have not ended within {self.grace_s:g} s")
        for process in left:
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)


def _environments(processes: int, life: int) -> list[dict[str, str]]:
    env = {**os.environ, RESTARTS: str(life)}
    if processes == 1:
        return [env]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [{**env, "JAX_PROCESS_ID": str(index)} for index in range(processes)]


def _status(process: subprocess.Popen[bytes]) -> int:
    """The status of a process that has ended; of one that a signal has ended, as a shell says it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _report(process: subprocess.Popen[bytes], index: int, ended: "queue.Queue[int]") -> None:
    process.wait()
    ended.put(index)


def _copy(source: BinaryIO, target: BinaryIO, index: int) -> None:
    for line in source:
        target.write(f"[{index}] ".encode() + line)
        target.flush()


def _in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
