"""Random programs against eager torch, and the tools that draw, judge and shrink them."""

import dataclasses
import os
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from validation.fuzz.judge import judge, judge_seed
from validation.fuzz.minimise import minimise
from validation.fuzz.programs import Case, draw, parallelisms
from validation.judging import Judges, Verdict

SEEDS = [seed for seed in range(26) if seed not in (16, 17, 18, 22, 25)]  # which take three seconds and more
MORE = range(26, 446)

FOUND = [  # by longer runs, and with no smaller form
    Case(
        3291,
        "tokens",
        {"b0": ("symmetric", 447430631)},
        (("extra", 2), ("batch", 2), ("model", 2)),
        rules={
            "blocks.b0.parametrizations.weight.original": P(("extra", "model", "batch"), None),
            "narrow.bias": P("extra"),
        },
        activations={"embed": P("model", None, None)},
        options={"accumulate_steps": 2},
    ),
    Case(
        6707,
        "bags",
        {"b1": ("weight norm", 119167222)},
        (("batch", 2), ("model", 2), ("extra", 2)),
        rules={"blocks.b1.parametrizations.weight.original0": P(None, "model")},
        recipe="fsdp_tp",
        batch_spec=P(("extra", "model")),
        options={"loss": "entropy"},
    ),
    Case(
        4037,
        "images",
        {"b2": ("patches", 112716622), "stack": ("repeated", 849061782)},
        (("batch", 2), ("extra", 2), ("model", 2)),
        rules={
            "blocks.stack.layers.1.inner.qkv.weight": P("batch", ("model", "extra")),
            "blocks.stack.layers.1.inner.out.weight": P(("batch", "model"), "extra"),
        },
        stored={"blocks.stack.layers.1.inner.qkv.weight": ts.Pieces(3, dim=0)},
        options={"scan_layers": False, "twice": True},
    ),
    Case(
        8557,
        "vectors",
        {"stack": ("repeated", 167432056)},
        (("model", 4), ("batch", 2)),
        rules={
            "blocks.stack.layers.2.down.bias": P("model"),
            "blocks.stack.layers.3.fused.weight": P("model", None),
            "blocks.stack.layers.3.down.weight": P(None, "batch"),
        },
        options={"accumulate_steps": 2},
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_is_right_or_refused(seed: int) -> None:
    verdict = judge(draw(seed))
    assert verdict.is_fine, verdict


@pytest.mark.parametrize("case", FOUND, ids=lambda case: str(case.seed))
def test_what_was_found_is_right(case: Case) -> None:
    assert judge(case) == Verdict("right")


def test_more_programs_are_right_or_refused() -> None:
    with Judges(judge_seed, os.cpu_count() or 1) as judges:
        found = {seed: verdict for seed, verdict in judges.verdicts(MORE) if not verdict.is_fine}
    assert not found


def test_a_seed_is_one_case() -> None:
    assert draw(7) == draw(7)
    assert len({str(draw(seed)) for seed in SEEDS}) == len(SEEDS)


def test_a_third_of_the_meshes_has_three_axes_and_every_parallelism_is_drawn() -> None:
    cases = [draw(seed) for seed in range(90)]
    assert sum(len(case.mesh) == 3 for case in cases) >= 30
    assert set[str]().union(*map(parallelisms, cases)) == {"context", "expert", "stage"}
    assert any(case.recipe == "expert" and case.option("dispatch") for case in cases)


def test_a_difference_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(0, "vectors", {"b0": ("linear", 1)}, (("batch", 2),))
    assert judge(case) == Verdict("right")
    monkeypatch.setattr("validation.fuzz.judge._loss_of", lambda case, model, batch: 1.001 * case.loss(model, batch))
    assert judge(case).kind == "wrong"


def test_what_is_not_ours_is_foreign_and_what_is_ours_refused() -> None:
    case = Case(0, "vectors", {"b0": ("linear", 1)}, (("batch", 2),))
    assert judge(dataclasses.replace(case, rules={"nowhere": P("batch")})).kind == "refused"
    assert judge(dataclasses.replace(case, options={"optimizer": "none such"})).kind == "foreign"


def test_a_case_is_made_smaller() -> None:
    blocks = {"b0": ("linear", 1), "b1": ("scale", 2), "b2": ("layer norm", 3)}
    rules = {"nowhere": P("batch"), "blocks.b1.weights.0": P("batch")}
    found = minimise(Case(0, "vectors", blocks, (("batch", 2),), rules=rules, options={"loss": "weighted"}))
    assert (len(found.blocks), found.options, list(found.rules)) == (1, {}, ["nowhere"])


class Ending(Case):
    """A case that ends its process, as a failed check within XLA does."""

    def make_model(self) -> Any:
        os._exit(3)


def test_a_process_that_ends_is_a_crash() -> None:
    ending = Ending(0, "vectors", {}, (("batch", 2),))
    with Judges(judge, 1) as judges:
        assert [verdict for _, verdict in judges.verdicts([ending])] == [Verdict("crash", "the process ended with 3")]
        assert all(verdict.is_fine for _, verdict in judges.verdicts([draw(0)]))  # in a new one
