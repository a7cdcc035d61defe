"""The order in which candidates are compiled, what ends a search, and what is kept of it; nothing is compiled here."""

import dataclasses
import json
import threading
import time

import pytest

from torch_shard._tune.arithmetic import Estimate, Parts
from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate
from torch_shard._tune.search import Search

A, B, C = (Candidate((("batch", 8),), name) for name in ("replicated", "fsdp", "replicated + ZeRO-1"))
A_ONE = Candidate((("batch", 8),), "replicated", scan_layers=False)
BLOCK = Candidate((("batch", 8),), "replicated", remat="block")


def estimate(seconds: float, memory: float = 10.0) -> Estimate:
    return Estimate(Parts(memory, 0, 0, 0, 0), seconds, {}, 0.0)


def search(found, estimates, seconds=20.0, cache=None):
    """A search in which compiling a candidate gives what `found` has for it, or raises it."""
    asked = []

    def prepare(candidate):
        asked.append(candidate)
        if isinstance(found[candidate], Exception):
            raise found[candidate]
        return lambda: found[candidate]

    made = Search(prepare, estimates, cache or Cache(None, {}), time.monotonic() + seconds)
    return made, asked


def test_the_best_is_the_fastest_that_fits():
    found = {A: Measured(compute=1.0, memory=9, limit=8), B: Measured(compute=2.0, memory=7, limit=8)}
    made, _ = search(found, {A: estimate(1.0), B: estimate(1.5)})
    made.run()
    assert made.best == B
    assert not made.found[A].fits


def test_what_is_hopeless_by_corrected_estimates_is_not_compiled():
    found = {A: Measured(compute=2.0), B: Measured(compute=9.0)}
    made, asked = search(found, {A: estimate(1.0), B: estimate(1.9)})
    made.run()
    assert asked == [A]
    assert "1.90 x the best" in made.passed[B]


def test_another_way_to_run_the_best_is_tried_before_what_is_slower_by_arithmetic():
    found = {A: Measured(compute=1.0), A_ONE: Measured(compute=0.8), B: Measured(compute=1.3)}
    made, asked = search(found, {A: estimate(1.0), A_ONE: estimate(1.0), B: estimate(1.2)})
    made.run()
    assert asked == [A, A_ONE, B]
    assert made.best == A_ONE


def test_what_needs_more_than_one_that_does_not_fit_is_passed():
    found = {BLOCK: Measured(memory=9, limit=8, refused="too large"), B: Measured(compute=1.0)}
    made, asked = search(found, {BLOCK: estimate(0.5, 5), A: estimate(0.6, 9), B: estimate(1.0)})
    made.run()
    assert asked == [BLOCK, B]
    assert made.passed[A] == "needs no less than remat=block, which does not fit"


def test_what_is_likely_too_large_by_what_was_found_of_its_kind_comes_last():
    sizes = {A: 27, B: 8, BLOCK: 12}
    found = {candidate: Measured(compute=1.0, memory=size, limit=16) for candidate, size in sizes.items()}
    made, asked = search(found, {A: estimate(0.5, 9), B: estimate(0.6, 7), BLOCK: estimate(0.7, 8)})
    made.run()
    assert asked == [A, BLOCK, B]  # of A three times as much as by arithmetic, so that B would take 21


def test_a_candidate_that_is_refused_has_its_reason():
    found = {A: NotImplementedError("not this one."), B: Measured(compute=1.0)}
    made, _ = search(found, {A: estimate(0.5), B: estimate(1.0)})
    made.run()
    assert (made.best, made.passed[A]) == (B, "refused: not this one.")


def test_where_all_are_refused_the_first_error_is_raised():
    made, _ = search({c: ValueError(str(c)) for c in (A, B, C)}, {A: estimate(1), B: estimate(1.1), C: estimate(1.2)})
    with pytest.raises(ValueError, match="replicated, remat"):
        made.run()


def test_the_best_of_what_is_scaled_is_compiled_whole_and_then_the_next_if_it_is_better():
    scaled = {A: Measured(compute=1.0, scaled="2 and 3 of 12"), B: Measured(compute=1.1, scaled="2 and 3 of 12")}
    whole = {A: Measured(compute=1.2), B: Measured(compute=1.15)}
    made, _ = search(scaled, {A: estimate(1.0), B: estimate(1.1)})
    made.whole = lambda candidate: lambda: whole[candidate]
    made.run()
    assert (made.best, {c: found.compute for c, found in made.found.items()}) == (B, {A: 1.2, B: 1.15})


def test_the_best_is_not_compiled_whole_without_time_for_it(monkeypatch):
    made, _ = search({A: Measured(compute=1.0, scaled="2 and 3 of 12")}, {A: estimate(1.0)}, seconds=30)
    monkeypatch.setattr(made, "_compile", lambda candidate, job: dataclasses.replace(job(), took=20.0))
    made.whole = None
    made.run()
    made.whole = lambda candidate: lambda: Measured(compute=2.0)
    made.run()
    assert made.found[A].scaled


def test_what_is_known_is_not_compiled_again(tmp_path):
    cache = Cache(tmp_path / "new", {"model": 1})
    first, asked = search({A: Measured(compute=1.0, collectives={"all-gather": 2})}, {A: estimate(1.0)}, cache=cache)
    first.run()
    again, asked = search({A: Measured(compute=1.0)}, {A: estimate(1.0)}, cache=cache)
    again.run()
    assert asked == []
    assert again.found[A].collectives == {"all-gather": 2}
    other, asked = search({A: Measured(compute=1.0)}, {A: estimate(1.0)}, cache=Cache(tmp_path / "new", {"model": 2}))
    other.run()
    assert asked == [A]


@pytest.mark.parametrize("change", ["", "[]", '{"format": 0}', {"memory": "8"}, {"compute": None}, {"more": 1}])
def test_a_damaged_file_is_made_anew(tmp_path, change, caplog):
    cache = Cache(tmp_path, {})
    cache.write(A, Measured(compute=1.0))
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    fields = {**found, "measured": {**found["measured"], **change}} if isinstance(change, dict) else None
    path.write_text(json.dumps(fields) if fields else change)
    assert cache.read(A) is None
    assert not fields or "is made anew" in caplog.text


def test_an_interrupt_leaves_the_best_so_far():
    def prepare(candidate):
        if candidate == B:
            raise KeyboardInterrupt
        return lambda: Measured(compute=1.0)

    made = Search(prepare, {A: estimate(1.0), B: estimate(1.1)}, Cache(None, {}), time.monotonic() + 20)
    made.run()
    assert (made.best, made.interrupted) == (A, True)


def test_an_interrupt_before_anything_is_known_is_one():
    def prepare(candidate):
        raise KeyboardInterrupt

    made = Search(prepare, {A: estimate(1.0)}, Cache(None, {}), time.monotonic() + 20)
    with pytest.raises(KeyboardInterrupt):
        made.run()


def test_what_is_not_ready_in_time_is_not_waited_for_but_noted_later(tmp_path):
    go, cache = threading.Event(), Cache(tmp_path, {})
    made = Search(
        lambda _: lambda: (go.wait(20), Measured(compute=1.0))[1], {A: estimate(1.0)}, cache, time.monotonic() + 0.2
    )
    made.run()
    assert (made.best, made.passed[A]) == (None, "still compiling when the time was over")
    go.set()
    until = time.monotonic() + 20
    while cache.read(A) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert cache.read(A) is not None
