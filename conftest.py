"""Eight CPU devices stand for a pod; nothing may touch a JAX backend before this file has run."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where TPU's compiler is installed, whose devices only compile

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# What LLVM makes of a program is XLA's to test, and takes a third of the time of compiling it; fusions emitted by way of
# MLIR take as long again. Each core has a worker, so a program is compiled on one. `XLA_FLAGS= pytest` runs as users do.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", f"{QUICK} --xla_cpu_parallel_codegen_split_count=1")


def pytest_collection_finish() -> None:
    """What importing and collecting have left is not looked through at each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _begin_anew() -> None:
    """JAX keeps the programs of its own operators for each shape that it has met: no file pays for those before it."""
    jax.clear_caches()
    gc.collect()
