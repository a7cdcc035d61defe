"""What process 0 makes of how all processes stand."""

import dataclasses
import logging

import pytest

from torch_shard._hosts.judge import Judge, Status, Times

TIMES = Times(beat=0.5, silent=4.0, notice=3.0)


class Job:
    """Processes that give signs of life each second, but for those that are silent."""

    def __init__(self, num: int) -> None:
        self.judge, self.statuses, self.now, self.silent = (
            Judge(num, TIMES),
            [Status() for _ in range(num)],
            100.0,
            set(),
        )

    def say(self, rank: int, **fields: object) -> None:
        self.statuses[rank] = dataclasses.replace(self.statuses[rank], **fields)

    def go_on(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1
            for rank, status in enumerate(self.statuses):
                if rank not in self.silent:
                    self.say(rank, count=status.count + 1)
            self.judge.look([dataclasses.replace(status) for status in self.statuses], self.now)


def waiting(rank: int = 0, subject: str = "save", patience: float = 60.0) -> Job:
    """A job of two, of which one waits in its first exchange."""
    job = Job(2)
    job.go_on()
    job.say(rank, waits=(1, subject, patience))
    return job


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"over": ("failed", "OSError: full")}, "process 1 will not come: OSError: full (last seen in step 2)"),
        ({"over": ("ended", "it came to its end")}, "process 1 will not come: it came to its end"),
        (
            {"runs": 1},
            "process 1 has gone on without it. Process 0 waits in save (after 0 programs). Process 1 is in step",
        ),
    ],
    ids=["failed", "ended", "went on"],
)
def test_who_waits_in_vain_is_told_why(says: dict, words: str) -> None:
    job = waiting()
    job.say(1, where="in step 2", **says)
    job.go_on()
    assert words in (said := job.judge.refused[1]).why
    job.go_on(9)
    assert job.judge.refused == {1: said}


def test_a_process_that_is_silent_has_failed() -> None:
    job = waiting()
    job.silent = {1}
    job.go_on(4)
    assert not job.judge.news.failed
    job.go_on()
    assert job.judge.news.failed == {
        1: "no sign of life for 4 s (killed, stopped, or its host is gone) (last seen at its beginning)"
    }
    assert "process 1 will not come: no sign of life" in job.judge.refused[1].why


def test_a_process_that_its_neighbours_miss_has_died_unless_it_has_ended() -> None:
    job = Job(3)
    job.go_on()
    job.say(2, over=("ended", "it came to its end"))
    job.say(0, misses=[1, 2])
    job.go_on()
    assert job.judge.news.failed == {1: "it has died (killed, or out of memory?) (last seen at its beginning)"}
    assert job.judge.news.ended == {2: "it came to its end"}


def test_silence_is_not_of_others_where_this_host_stood_still() -> None:
    job = Job(2)
    job.go_on()
    job.now += 60
    job.silent = {1}
    job.go_on(4)
    assert not job.judge.news.failed


def test_a_wait_for_one_that_lives_is_told_of_and_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    job = waiting(patience=8.0)
    with caplog.at_level(logging.WARNING, "torch_shard"):
        job.go_on(9)
    assert [record.getMessage() for record in caplog.records] == [
        f"save: for {seconds} s this waits for process 1. Process 0 waits in save (after 0 programs). Process 1 is at "
        "its beginning."
        for seconds in (3, 6)
    ]
    assert not job.judge.refused
    job.go_on()
    assert job.judge.refused[1].why.startswith("the processes do not come together: process 1 did not come within 8 s.")


def test_all_stop_where_the_farthest_is() -> None:
    job = Job(3)
    job.say(2, asks={0: "OSError: no disk"})
    job.go_on()
    assert not job.judge.news.stops
    for rank, position in enumerate((4, 5, 3)):
        job.say(rank, stands={0: position})
    job.go_on()
    assert (job.judge.news.asked, job.judge.news.stops) == ({0: (2, "OSError: no disk")}, {0: 5})


@pytest.mark.parametrize("gone", ["left the loop", "failed"])
def test_none_stops_at_a_step_that_one_does_not_come_to(gone: str) -> None:
    job = Job(2)
    job.say(1, asks={0: "SIGTERM"}, stands={0: 3})
    job.say(0, **({"stands": {0: None}} if gone == "left the loop" else {"over": ("failed", "x")}))
    job.go_on(2)
    assert job.judge.news.stops == {0: None}
