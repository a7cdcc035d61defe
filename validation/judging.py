"""What is drawn by a number, judged beside eager torch: verdicts, processes that give them, and their command line.

Each process is one of its own, so that a case which XLA ends is a verdict like others.
"""

import argparse
import collections
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE_S = 180.0
"""The longest time for one case."""

RESTARTED_AFTER = 60
"""Cases of one process: what it has compiled stays in memory."""


_FINE = ("right", "refused", "no model")


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: "right", "refused", "foreign", "wrong", "no model" where eager torch has none, or "crash" where the
            process ended.
        why: The error, or what is apart.
    """

    kind: str
    why: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to mend."""
        return self.kind in _FINE

    def __str__(self) -> str:
        return f"{self.kind} {self.why}".strip()


def is_ours(error: Exception) -> bool:
    """Whether an error is one that the package raises on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "torch_shard" in last.filename and isinstance(error, ValueError | TypeError | NotImplementedError)


def ended_by(error: Exception, *, ours: bool, about: str = "") -> Verdict:
    """The verdict on a case that an error has ended."""
    said = " ".join(str(error).split())[:300]
    return Verdict("refused" if ours else "foreign", f"{about}{type(error).__name__}: {said}")


def _serve(connection: Connection, judge: Callable[[Any], Verdict]) -> None:
    """Judge what comes in, one after the other."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the partitioner warns at length of what it gathers
    import conftest  # noqa: F401  (eight devices)

    while True:
        connection.send(judge(connection.recv()))


class _Worker:
    """A process that judges, and what it is at."""

    def __init__(self, judge: Callable[[Any], Verdict]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, judge), daemon=True)
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
        judge: A function of a module, which gives the verdict on a case.
        num: How many.
    """

    def __init__(self, judge: Callable[[Any], Verdict], num: int) -> None:
        self._judge, self._num, self._idle = judge, num, list[_Worker]()

    def __enter__(self) -> "Judges":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            worker.end()

    def verdicts(self, cases: Iterable[Any]) -> Iterator[tuple[Any, Verdict]]:
        """Verdicts of cases in the order in which they are done."""
        waiting, busy = iter(cases), dict[Connection, _Worker]()
        while True:
            for case in itertools.islice(waiting, self._num - len(busy)):
                worker = self._idle.pop() if self._idle else _Worker(self._judge)
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


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The options of a command that judges what seeds draw."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--seeds", default="0:100", help="first:last, the last not included; or one number")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    made.add_argument("--verbose", action="store_true", help="print refusals too")
    return made


def seeds_of(args: argparse.Namespace) -> range:
    """Those that the command line names."""
    first, _, last = args.seeds.partition(":")
    return range(int(first), int(last or int(first) + 1))


def judge_all(judge: Callable[[Any], Verdict], seeds: Iterable[int], args: argparse.Namespace) -> int:
    """Judge what these seeds draw, and print what is to be mended; 0 if that is nothing."""
    counts: collections.Counter[str] = collections.Counter()
    start = time.time()
    with Judges(judge, args.jobs) as judges:
        for seed, verdict in judges.verdicts(seeds):
            counts[verdict.kind] += 1
            if not verdict.is_fine or (args.verbose and verdict.kind == "refused"):
                print(f"{seed}: {verdict}", flush=True)
    table = ", ".join(f"{num} {kind}" for kind, num in counts.most_common())
    print(f"{counts.total()} in {time.time() - start:.0f} s: {table}")
    return int(any(kind not in _FINE for kind in counts))
