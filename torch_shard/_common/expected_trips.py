"""How often a loop of unknown length is expected to run: a note in its name, for what estimates costs."""

import contextlib
import re
from collections.abc import Generator

import jax


@contextlib.contextmanager
def expecting(trips: float) -> Generator[None]:
    """Note on loops that are traced within how often they are expected to run."""
    with jax.named_scope(f"about_{trips:.2f}_rounds"):
        yield


def expected_trips(name: str) -> float | None:
    """The number of rounds that stands in the full name of a loop; None if none does."""
    found = re.search(r"about_([\d.]+)_rounds(?:/rematted_computation)?/while[^/]*$", name)
    return None if found is None else float(found.group(1))
