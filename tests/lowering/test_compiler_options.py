"""The compiler is asked: what it has, and what is right on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import torch_shard as ts
from torch_shard._lowering.compiler_options import WHOLE, compiler_options, cut_add_pad, safe_pads

NO_OPTION = {"xla_cpu_no_such_option": False}
NO_FUSION = {"xla_disable_hlo_passes": "fusion"}
MODULE = sys.modules[safe_pads.__module__]  # the package exports a function of this name


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    safe_pads.cache_clear()
    yield
    safe_pads.cache_clear()


def test_an_option_that_the_compiler_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_WAYS", (NO_OPTION, NO_FUSION))
    assert safe_pads() == NO_FUSION


def test_a_way_that_pads_wrong_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_WAYS", ({}, NO_FUSION))
    answers = iter([np.zeros((2, 20), np.float32)])
    jit = jax.jit

    def wrong_at_first(function, compiler_options):
        if function is cut_add_pad and not compiler_options:
            return lambda *args: next(answers)
        return jit(function, compiler_options=compiler_options)

    monkeypatch.setattr(jax, "jit", wrong_at_first)
    assert safe_pads() == NO_FUSION


def test_without_any_way_the_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_WAYS", (NO_OPTION,))
    with pytest.raises(NotImplementedError, match=r"pads the sum of two slices wrong on this machine.*another version"):
        safe_pads()


OF_EXPS = """
import optax, torch, torch_shard as ts
from jax.sharding import PartitionSpec as P
loss = lambda model, x: (-x).exp().float().sum() + 0 * model.weight.sum()
step = ts.make_train_step(
    torch.nn.Linear(4, 4), loss, optax.sgd(0.0), mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P())
)
x = torch.ones(1 << 16, dtype=torch.bfloat16)
found, wanted = float(step(step.init(), x)[1]["loss"]), (-x).exp().float().sum().item()
assert abs(found - wanted) < 1e-2 * wanted, (found, wanted)
"""


def test_sums_of_many_exponentials_of_bfloat16_are_right_without_the_flags_of_the_tests() -> None:
    done = subprocess.run([sys.executable, "-c", OF_EXPS], env={**os.environ, "XLA_FLAGS": ""}, capture_output=True)
    assert not done.returncode, done.stderr.decode()


def test_on_tpus_collectives_are_whole_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    several, single = (ts.make_mesh(topology="v5e:2x2", batch=size) for size in (4, 1))
    assert compiler_options([], several) == WHOLE
    assert compiler_options([], single) is None
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_jf_spmd_threshold_for_windowed_einsum_mib=0")
    assert compiler_options([], several) is None


def test_an_option_that_a_tpus_compiler_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "WHOLE", {"xla_jf_no_such_option": "1"})
    monkeypatch.setattr(MODULE, "_KNOWS_WHOLE", {})
    assert compiler_options([], ts.make_mesh(topology="v5e:2x2", batch=4)) is None
