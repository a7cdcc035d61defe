"""Eight CPU devices stand for a pod; nothing may touch a JAX backend before this file has run."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where TPU's compiler is installed, whose devices only compile

import jax
import pytest

# Compiled programs are shared by workers and by runs; another version of JAX has a directory of its own. Processes that
# tests start compile anew, as those of users do.
_CACHE = Path(__file__).parent / ".pytest_cache" / f"jax-{version('jax')}-jaxlib-{version('jaxlib')}"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_num_cpu_devices", 8)
# What LLVM makes of a program is XLA's to test, and takes a third of the time of compiling it; and each core has a
# worker, so a program is compiled on one. `XLA_FLAGS= pytest` runs as users do.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1")


@pytest.fixture(autouse=True, scope="module")
def _leave_alone_what_is_there() -> None:
    """What earlier files have left is not looked through at each collection, which takes longer with each of them."""
    gc.collect()
    gc.freeze()
