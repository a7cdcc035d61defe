"""Eight CPU devices stand for a pod; nothing may touch a JAX backend before this file has run."""

import gc
import itertools
import os
import pathlib
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where TPU's compiler is installed, whose devices only compile
os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a worker: more threads of torch wait, and spin
if "XLA_FLAGS" not in os.environ:
    os.environ.setdefault("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1")  # TPU's compiler takes a quarter of its time

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# What LLVM makes of a program is XLA's to test, and takes a third of the time of compiling it; fusions emitted by way
# of MLIR take as long again, where jaxlib still knows another way. Each core has a worker, so a program is compiled on
# one. `XLA_FLAGS= pytest` runs as users do, and so do tests with the fixture `optimized`.
QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK))

SLOW = pathlib.Path(__file__).parent / "tests" / "slow.txt"


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt names: a test with all variants, but for those with a plus, or one variant."""
    lines = [line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")]
    kept, slow = {line[2:] for line in lines if line[0] == "+"}, {line for line in lines if line[0] != "+"}
    found = set()
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]}
        found |= names
        if (names & slow and item.nodeid not in kept) or isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.slow)
    is_whole = config.args == config.getini("testpaths") and not config.getoption("lf")
    if is_whole and (unknown := (kept | slow) - found):
        raise pytest.UsageError(f"{SLOW}: no test has the name {', '.join(sorted(unknown))}")


def pytest_collection_finish() -> None:
    """What importing and collecting have left is not looked through at each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def optimized() -> Iterator[None]:
    """TPU's compiler schedules and fuses as it does for users, for tests of what it makes of a program."""
    effort = jax.config.jax_exec_time_optimization_effort
    jax.config.update("jax_exec_time_optimization_effort", 0.0)
    yield
    jax.config.update("jax_exec_time_optimization_effort", effort)


FILES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _begin_anew() -> None:
    """JAX keeps the programs of its own operators for each shape that it has met: no file pays for those before it."""
    jax.clear_caches()
    if next(FILES) % 16 == 0:  # what was alive once is looked through again now and then, and not for each file
        gc.unfreeze()
    gc.collect()
    gc.freeze()
