"""Random generators of Python, NumPy and torch."""

from typing import Any

import numpy as np


def state_of(generator: Any) -> Any:
    """The state of a generator; of Python's and NumPy's global ones, which are modules, too."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()
