"""Agreement among the processes of one program."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import jax
import numpy as np
from jax.experimental import multihost_utils


def agree(flag: bool) -> bool:
    """Tell whether any process says so."""
    return bool(multihost_utils.process_allgather(np.array(flag)).any()) if jax.process_count() > 1 else flag
