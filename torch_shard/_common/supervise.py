"""A command that is started again when it fails, as one process or several: what `torch-shard run` does.

It needs neither torch nor JAX, so that it waits beside the training with next to no memory.
"""

import contextlib
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
    process, which passes signals on. Each life is ended as a whole: when a process has ended, so are those that it
    has started and left behind.

    Args:
        command: The program and its arguments.
        say: Takes lines that tell what happens.
        restarts: How often it is started again at most.
        processes: How many are started together, with JAX's variables for processes of one host.
        grace_s: Seconds that the other processes have to end by themselves when one has failed, and once more after
            `SIGTERM`; so many has what they leave behind, after `SIGTERM`.

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
            os.kill(process.pid, number)  # none is waited for while it lives or is a zombie, so the number is its own

    def live(self, command: Sequence[str], processes: int, life: int) -> int:
        """Start all, and wait for all; the status is that of the first that fails."""
        ended: queue.Queue[tuple[int, int]] = queue.Queue()
        copies: list[threading.Thread] = []
        self.processes = []
        try:
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
            return self._wait(ended)
        finally:
            self._end_groups()
            for thread in copies:
                thread.join(timeout=5)  # who has left the group may hold its output open

    def _wait(self, ended: "queue.Queue[tuple[int, int]]") -> int:
        """Give the status of the first that failed, when all have ended; from then on the others have limited time."""
        first = 0
        harder = iter((signal.SIGTERM, signal.SIGKILL))
        left = set(range(len(self.processes)))
        while left:
            is_limited = first != 0 and not self.is_stopping
            try:
                index, status = ended.get(timeout=self.grace_s if is_limited else None)
            except queue.Empty:
                self._end_others(left, next(harder, signal.SIGKILL))
                continue
            left.remove(index)
            if status:
                first = first or status
                if len(self.processes) > 1:
                    self.say(f"process {index} ended with status {status}")
        return first

    def _end_others(self, left: set[int], number: signal.Signals) -> None:
        self.say(f"{number.name} to {len(left)} that have not ended within {self.grace_s:g} s")
        for index in left:
            end = os.killpg if number == signal.SIGKILL else os.kill
            end(self.processes[index].pid, number)

    def _end_groups(self) -> None:
        """End what processes have started and left behind: workers that hold memory, devices or ports."""
        groups, self.processes = self.processes, []
        for process in groups:
            os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + self.grace_s
        while (left := [process for process in groups if _has_members(process)]) and time.monotonic() < until:
            time.sleep(0.02)
        if left:
            self.say(f"SIGKILL to what was left behind and has not ended within {self.grace_s:g} s")
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _has_members(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process of this one's group is there."""
    process.poll()
    with contextlib.suppress(ChildProcessError):  # where this process is the first of a container, they are its own
        while os.waitpid(-process.pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _environments(processes: int, life: int) -> list[dict[str, str]]:
    env = {**os.environ, RESTARTS: str(life)}
    if processes == 1:
        return [env]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [{**env, "JAX_PROCESS_ID": str(index)} for index in range(processes)]


def _report(process: subprocess.Popen[bytes], index: int, ended: "queue.Queue[tuple[int, int]]") -> None:
    """Tell of the end of a process, which stays a zombie; of one that a signal has ended, as a shell says it."""
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    ended.put((index, end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status))


def _copy(source: BinaryIO, target: BinaryIO, index: int) -> None:
    for line in source:
        target.write(f"[{index}] ".encode() + line)
        target.flush()


def _in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
