"""Options of our step that a user may set, against the default, under TPU's own compiler: see `benchmarks.tpu`."""

from collections.abc import Iterator, Sequence

from benchmarks.rows import Row, chosen
from benchmarks.tpu import compared, side_counts
from benchmarks.tpu_cases import CASES, OURS, find

PAGE = """
## Other options against the default

Options that a user may set, over the default.
"""


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Each case."""
    for name in chosen(names, list(CASES)):
        case, default = find(name, quick), side_counts(OURS, name, quick)
        for side in case.others:
            yield from compared(f"{case.name}: {side} ÷ default", side_counts(side, name, quick), default, {})
