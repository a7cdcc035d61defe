"""Our step against hand-written JAX at other sizes than those that defaults were chosen by: see `benchmarks.tpu`."""

from collections.abc import Iterator, Sequence

from benchmarks.rows import Row, chosen
from benchmarks.tpu import case_rows
from benchmarks.tpu_cases import HELD_OUT

PAGE = """
## At sizes that were held out

Other sizes than those by which defaults were chosen.
"""


def rows(quick: bool, names: Sequence[str] = ()) -> Iterator[Row]:
    """Each case; none of them is small."""
    for name in chosen(names, list(HELD_OUT)) if names or not quick else []:
        yield from case_rows(name, quick)
