"""The order in which candidates are compiled, what ends a search, and how all are ranked; nothing is compiled here."""

import json
import threading
import time

import pytest

from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate, Estimate
from torch_shard._tune.search import Search

DEFAULT, B, C = (Candidate((("batch", 8),), name) for name in ("fsdp", "replicated", "replicated + ZeRO-1"))
B_ONE = Candidate((("batch", 8),), "replicated", scan_layers=False, in_loops=False)
BLOCK = Candidate((("batch", 8),), "fsdp", remat="block")


def search(found, estimates, seconds=20.0, cache=None, limit=None):
    """A search in which compiling a candidate gives what `found` has for it, or raises it."""
    asked = []

    def prepare(candidate):
        asked.append(candidate)
        if isinstance(found[candidate], BaseException):
            raise found[candidate]
        return lambda: found[candidate]

    made = {c: own if isinstance(own, Estimate) else Estimate(own, 10.0, 0.0) for c, own in estimates.items()}
    return Search(prepare, made, cache or Cache(None, {}), time.monotonic() + seconds, limit), asked


def test_the_default_is_compiled_first_and_stays_where_nothing_is_faster():
    found = {DEFAULT: Measured(compute=1.0), B: Measured(compute=3.0), C: Measured(compute=2.0)}
    made, asked = search(found, {DEFAULT: 5.0, B: 1.0, C: 2.0})
    made.run()
    assert asked == [DEFAULT, B, C]
    assert made.ranking() == [DEFAULT, C, B]


def test_others_follow_by_estimates_that_are_corrected_by_what_was_compiled():
    found = {DEFAULT: Measured(compute=2.0), C: Measured(compute=1.0)}
    made, asked = search(found, {DEFAULT: 1.0, B: 1.9, C: 0.9})
    made.run()
    assert asked == [DEFAULT, C]  # B is likely to take 3.8, where the best takes 1
    assert made.seconds(B) == pytest.approx(3.8)
    assert made.ranking() == [C, DEFAULT, B]


def test_a_loop_is_compiled_before_the_same_layers_one_by_one():
    found = {DEFAULT: Measured(compute=1.0), B: Measured(compute=0.9), B_ONE: Measured(compute=0.7)}
    made, asked = search(found, {DEFAULT: 1.0, B_ONE: 0.8, B: 1.0})
    made.run()
    assert asked == [DEFAULT, B, B_ONE]


def test_what_does_not_fit_is_last_and_what_is_likely_too_large_is_compiled_last():
    sizes = {DEFAULT: 27, B: 12, BLOCK: 8}
    found = {candidate: Measured(compute=1.0, memory=size) for candidate, size in sizes.items()}
    estimates = {DEFAULT: Estimate(0.5, 9, 0), B: Estimate(0.6, 7, 0), BLOCK: Estimate(0.7, 8, 0)}
    made, asked = search(found, estimates, limit=16)
    made.run()
    assert asked == [DEFAULT, BLOCK, B]  # of the first three times as much as by arithmetic, so that B would take 21
    assert made.ranking()[-1] == DEFAULT


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])
def test_what_cannot_be_compiled_says_why_and_is_last(error):
    found = {DEFAULT: Measured(compute=1.0), B: error("not this one."), C: Measured(refused="by XLA")}
    made, _ = search(found, {DEFAULT: 1.0, B: 0.5, C: 0.6})
    made.run()
    assert made.found[B].refused == "refused: not this one."
    assert made.ranking() == [DEFAULT, B, C]


def test_an_estimate_is_recommended_only_where_it_is_twice_as_fast():
    waits = threading.Event()
    for seconds, best in ((0.6, DEFAULT), (0.4, B)):
        made, _ = search({}, {DEFAULT: 1.0, B: seconds}, seconds=0.3)
        made.found[DEFAULT] = Measured(compute=1.0)
        made.prepare = lambda _: lambda: (waits.wait(5), Measured())[1]
        made.run()
        assert made.ranking()[0] == best
    waits.set()


def test_a_search_without_time_ranks_by_arithmetic_the_default_before_what_is_not_much_faster():
    made, asked = search({}, {DEFAULT: 1.0, B: 0.9, C: 0.4}, seconds=-1.0)
    made.run()
    assert (asked, made.ranking()) == ([], [C, DEFAULT, B])


def test_what_is_known_is_not_compiled_again(tmp_path):
    cache = Cache(tmp_path / "new", {"model": 1})
    for other, wanted in ((cache, [DEFAULT]), (cache, []), (Cache(tmp_path / "new", {"model": 2}), [DEFAULT])):
        made, asked = search({DEFAULT: Measured(compute=1.0, memory=3)}, {DEFAULT: 1.0}, cache=other)
        made.run()
        assert asked == wanted
        assert (made.found[DEFAULT].compute, made.found[DEFAULT].memory) == (1.0, 3)


@pytest.mark.parametrize("change", ["", "[]", "{}", {"memory": "many"}, {"compute": None}])
def test_a_damaged_file_is_made_anew(tmp_path, change, caplog):
    cache = Cache(tmp_path, {})
    cache.write(DEFAULT, Measured(compute=1.0))
    (path,) = tmp_path.iterdir()
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.read(DEFAULT) is None
    assert "is made anew" in caplog.text


def test_a_file_that_cannot_be_written_costs_no_candidate(tmp_path, caplog):
    cache = Cache(tmp_path / "cache", {})
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").touch()  # as for root, whom no permissions stop
    made, _ = search({DEFAULT: Measured(compute=1.0)}, {DEFAULT: 1.0}, cache=cache)
    made.run()
    assert (made.found[DEFAULT].refused, made.found[DEFAULT].compute) == ("", 1.0)
    assert "cannot be written" in caplog.text


def test_an_interrupt_leaves_the_best_so_far():
    made, _ = search({DEFAULT: Measured(compute=1.0), B: KeyboardInterrupt()}, {DEFAULT: 1.0, B: 1.1})
    made.run()
    assert (made.ranking()[0], made.interrupted) == (DEFAULT, True)
    made, _ = search({DEFAULT: KeyboardInterrupt()}, {DEFAULT: 1.0})
    with pytest.raises(KeyboardInterrupt):
        made.run()


def test_what_is_not_ready_in_time_is_not_waited_for_but_noted_later(tmp_path):
    go, cache = threading.Event(), Cache(tmp_path, {})
    made, _ = search({}, {DEFAULT: 1.0}, seconds=0.2, cache=cache)
    made.prepare = lambda _: lambda: (go.wait(20), Measured(compute=1.0))[1]
    made.run()
    assert made.found == {}
    assert not any(thread.daemon for thread in threading.enumerate() if thread.name == "tune")  # it would abort Python
    go.set()
    until = time.monotonic() + 20
    while cache.read(DEFAULT) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert cache.read(DEFAULT) is not None
