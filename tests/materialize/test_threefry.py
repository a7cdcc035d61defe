"""Random numbers of every dtype: a million of each against as many of eager torch."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch.nn import init

import torch_shard as ts
from tests.materialize.test_materialize import Buffer, values
from tests.tables.cases import WHOLE, chosen, make_mesh
from torch_shard._materialize.slices import FUSED, counters

NUM = 1 << 20

DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda x: x.normal_(0.5, 0.02),
    "uniform": lambda x: x.uniform_(-1, 2),
    "trunc_normal_tight": lambda x: init.trunc_normal_(x, 0, 1, -3, 3),
    "exponential": lambda x: x.exponential_(2),
    "bernoulli": lambda x: x.copy_(torch.bernoulli(torch.full(x.shape, 1e-3, dtype=x.dtype))),
}

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("name", "dtype"), [("normal", torch.float32), *((name, torch.bfloat16) for name in DRAWS)])
def test_a_million_numbers_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def make() -> torch.Tensor:
        return DRAWS[name](torch.empty(NUM, dtype=dtype))

    found, wanted = values(ts.materialize(lambda: Buffer(make), make_mesh((4, 2)), WHOLE))["b"], make()
    assert found.dtype == dtype
    found, wanted = found.float(), wanted.float()
    # The distance that one of a thousand right pairs exceeds; and PyTorch cuts some digits off, where others are
    # rounded: half a unit in the last place.
    distance, _ = scipy.stats.ks_2samp(found, wanted, method="asymp")
    assert distance < 1.95 * (2 / NUM) ** 0.5 + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0)
    # The largest of a million differ by less than a fifth of the spread: 4.5 to 5.5 standard deviations of a normal
    # distribution, 7 to 11 of an exponential one, which are further out than numbers of few bits come.
    # So wide a tail has torch in float32: its draws in bfloat16 ended at 3.3 deviations before torch 2.13.
    centre, wide = wanted.mean(), DRAWS[name](torch.empty(NUM))
    for one, other in ((found.max(), wide.max()), (found.min(), wide.min())):
        assert abs(one - other) <= 0.35 * abs(other - centre) + 1e-6


@pytest.mark.parametrize("dtype", chosen(DTYPES, [torch.bfloat16]))
def test_numbers_below_one_stay_below_one(dtype: torch.dtype) -> None:
    """`floor(keep + rand())` is a mask of dropped paths, as timm writes it."""
    found = values(ts.materialize(lambda: Buffer(lambda: torch.rand(NUM, dtype=dtype)), make_mesh((4, 2)), WHOLE))["b"]
    assert found.max() < 1
    assert found.min() >= 0


def test_no_two_entries_are_correlated() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 64) for _ in range(12)), nn.Embedding(64, 16), nn.Embedding(64, 16))

    found = values(ts.materialize(make, make_mesh((4, 2)), WHOLE))
    random = {n: t.flatten().numpy() for n, t in found.items()}
    names = itertools.combinations(random, 2)
    pairs = [(one, other) for one, other in names if random[one].shape == random[other].shape]
    assert len(pairs) > 100
    for one, other in pairs:
        bound = 5 / random[one].size ** 0.5  # standard deviations of the correlation of independent numbers
        assert abs(np.corrcoef(random[one], random[other])[0, 1]) < bound, (one, other)


def test_bits_are_those_of_jax() -> None:
    for shape in ((), (3, 4, 5)):
        draw = jax.jit(jax.random.bits, static_argnums=1)
        found, wanted = (draw(jax.random.key(7, impl=kind), shape) for kind in (FUSED, None))
        assert (found == wanted).all()
    high, low = counters((3, 5, 2, 4), limit=16)  # two words, as for more than 2**32 elements
    assert len(set(zip(high.flatten().tolist(), low.flatten().tolist(), strict=True))) == 120
