"""Random programs in processes of their own, so that one that XLA ends is a verdict like others."""

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from validation.fuzz.judge import Verdict

PATIENCE_S = 180.0
"""The longest time for one program."""

RESTARTED_AFTER = 60
"""Programs of one process: what it has compiled stays in memory."""


def _serve(connection: Connection) -> None:
    """Judge what comes in, one after the other: cases, or the seeds of cases."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the partitioner warns at length of what it gathers
    import conftest  # noqa: F401  (eight devices)
    from validation.fuzz.judge import judge
    from validation.fuzz.programs import draw

    while True:
        given = connection.recv()
        connection.send(judge(draw(given) if isinstance(given, int) else given))


class _Worker:
    """A process that judges, and what it is at."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.given: Any = None
        self.num_done = 0

    def start(self, given: Any) -> None:
        """Let it judge."""
        self.given = given
        self.num_done += 1
        self.connection.send(given)

    def result(self) -> Verdict:
        """Of what it was given; that of a process which has ended is a crash."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Verdict("crash", f"the process ended with {self.process.exitcode}")

    def end(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.join()


class Judges:
    """Processes that judge.

    Args:
        num: How many.
    """

    def __init__(self, num: int) -> None:
        self._num, self._idle = num, list[_Worker]()

    def __enter__(self) -> "Judges":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            worker.end()

    def verdicts(self, cases: Iterable[Any]) -> Iterator[tuple[Any, Verdict]]:
        """Verdicts of cases, or of seeds, in the order in which they are done."""
        waiting, busy = iter(cases), dict[Connection, _Worker]()
        while True:
            for case in itertools.islice(waiting, self._num - len(busy)):
                worker = self._idle.pop() if self._idle else _Worker()
                worker.start(case)
                busy[worker.connection] = worker
            if not busy:
                return
            ready = wait(list(busy), PATIENCE_S)
            for worker in [busy.pop(connection) for connection in ready or list(busy)]:  # pyright: ignore
                verdict = worker.result() if ready else Verdict("crash", f"nothing in {PATIENCE_S:.0f} s")
                if verdict.kind == "crash" or worker.num_done == RESTARTED_AFTER:
                    worker.end()
                else:
                    self._idle.append(worker)
                yield worker.given, verdict
