"""What our cost model says of steps that others timed: by the counts that are kept, and whether they are still so."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.processes import isolated
from benchmarks.published import KEPT, row_of
from benchmarks.published_cases import PUBLISHED
from benchmarks.rows import Row
from benchmarks.tpu_counts import Counts

pytestmark = pytest.mark.slow

FOUND = json.loads((Path(__file__).parents[2] / "benchmarks" / "tpu_kept.json").read_text())["published"]
ROWS = {row.name: row for row in (Row(**found) for found in FOUND)}
MOST = 1.15
"""Between the ratios of two rows of one chip."""


def kept(name: str) -> Counts:
    return Counts(temporaries=0, **json.loads(ROWS[name].note))


@pytest.mark.parametrize("chip", sorted({case.chip for case in PUBLISHED.values()}))
def test_rows_of_a_chip_are_in_order_and_alike(chip: str) -> None:
    cases = {name: case for name, case in PUBLISHED.items() if case.chip == chip and case.is_known}
    ratios = {name: row_of(case, name, kept(name)).ratio or 0.0 for name, case in cases.items()}
    predicted = {name: ratios[name] * case.seconds for name, case in cases.items()}
    assert sorted(cases, key=lambda name: cases[name].seconds) == sorted(cases, key=predicted.__getitem__)
    assert max(ratios.values()) / min(ratios.values()) <= MOST


def test_the_counts_of_a_row_are_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", raising=False)  # which the tests set, for other programs
    monkeypatch.setitem(os.environ, "LIBTPU_INIT_ARGS", PUBLISHED["llama fsdp"].flags)
    found = Counts(**isolated("benchmarks.published:measure", name="llama fsdp", quick=False))
    for name in KEPT:
        assert getattr(found, name) == pytest.approx(getattr(kept("llama fsdp"), name), rel=0.01)
