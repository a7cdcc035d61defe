"""Which candidates are compiled in which order, and what ends a search; the compiler is a table here."""

import functools
import json
import time

import jax
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from torch_shard._tune.cache import Cache, Measured
from torch_shard._tune.candidates import Candidate, other_layouts
from torch_shard._tune.search import MOST, Search

DEFAULT = Candidate((("batch", 8),), "fsdp", in_loops=False)
BATCH = torch.empty(32, 64, device="meta")


def deep():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def search(monkeypatch, measured, model=None, limit=None, **how):
    """A search in which the compiler says `measured` of a candidate, or what that raises."""
    model = model or nn.Linear(64, 64)
    make = functools.partial(ts.make_train_step, model, lambda m, x: m(x).square().mean(), optax.adam(0.1))
    given = {"devices": jax.devices(), "options": {}, **how}
    made, asked = Search(make, model, BATCH, **given), []
    made.limit = limit

    def measure(candidate, _):
        asked.append(candidate)
        said = measured(candidate)
        if isinstance(said, BaseException):
            raise said
        return said

    monkeypatch.setattr(made, "measure", measure)
    return made, asked


def test_the_default_comes_first_and_eight_are_compiled_and_sorted(monkeypatch):
    slower = iter(range(1, 20))
    made, asked = search(monkeypatch, lambda _: Measured(compute=next(slower)))
    made.run()
    assert asked[0] == DEFAULT
    assert len(asked) == len(set(asked)) <= MOST
    assert made.ranking() == asked
    assert {c.recipe for c in asked} >= {"fsdp", "hsdp + ZeRO-1", "replicated + ZeRO-1", "tp"}
    assert any("no ModuleList" in why for why in made.pruned.values())


def test_what_does_not_fit_computes_again_and_then_waits_on_the_host(monkeypatch):
    need = {("none", False): 9, ("dots", False): 8, ("block", False): 7, ("block", True): 3}
    made, asked = search(
        monkeypatch, lambda c: Measured(compute=1.0, memory=need[c.remat, c.offload] * 10**6), deep(), limit=4 * 10**6
    )
    made.run()
    assert [(c.remat, c.offload) for c in asked[:4]] == list(need)
    assert all((c.remat, c.offload) == ("block", True) for c in asked[4:])
    assert not made.fits(made.ranking()[-1])
    assert made.step(asked[3]).options.offload == ("activations", "optimizer")


def test_layers_run_in_loops_too_unless_the_user_says_how(monkeypatch):
    made, asked = search(monkeypatch, lambda _: Measured(compute=1.0), deep())
    made.run()
    assert {c.in_loops for c in asked} == {True, False}
    made, asked = search(monkeypatch, lambda _: Measured(compute=1.0), deep(), options={"scan_layers": True})
    made.run()
    assert {c.scan_layers for c in asked} == {True}


def test_experts_have_recipes_of_their_own_and_a_spec_of_the_batch_no_other_axis_of_rows():
    names = {c.recipe for c in other_layouts(8, has_experts=True, has_spec=True)}
    assert names == {"expert(tp, sequence)", "expert(tp)", "replicated", "replicated + ZeRO-1", "tp"}
    assert list(other_layouts(1, has_experts=False, has_spec=False)) == []


def test_without_time_the_default_alone_is_compiled(monkeypatch):
    made, asked = search(monkeypatch, lambda _: Measured(compute=1.0), deadline=time.monotonic() - 1)
    made.run()
    assert asked == [DEFAULT]
    assert made.not_reached


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    made, _ = search(monkeypatch, lambda c: Measured(compute=1.0) if c == DEFAULT else KeyboardInterrupt())
    made.run()
    assert (made.ranking(), made.interrupted) == ([DEFAULT], True)
    made, _ = search(monkeypatch, lambda _: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.run()


def test_what_xla_refuses_says_why_and_is_last(monkeypatch):
    made = Search(
        lambda **_: (_ for _ in ()).throw(NotImplementedError("not this one.")), nn.Linear(2, 2), BATCH,
        devices=jax.devices(), options={},
    )  # fmt: skip
    assert made.measure(DEFAULT, {}).refused == "refused: not this one."
    made = Search(lambda **_: 1 / 0, nn.Linear(2, 2), BATCH, devices=jax.devices(), options={})
    with pytest.raises(ZeroDivisionError):
        made.measure(made.default, {})


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
    cache.write(DEFAULT, Measured(compute=1.0))
    assert "cannot be written" in caplog.text
