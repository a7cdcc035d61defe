"""Random operators against eager torch, by their distributions."""

from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest
import torch
from torch.testing import assert_close

import torch_shard as ts
from torch_shard._lowering.ops import LOWERINGS, RANDOM
from torch_shard._lowering.ops import random as _random

DRAWS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(20_000), 0.5, 1 / 12**0.5),
    "randn": (lambda: torch.randn(20_000), 0.0, 1.0),
    "rand_like": (lambda: torch.rand_like(torch.ones(20_000)), 0.5, 1 / 12**0.5),
    "randn_like": (lambda: torch.randn_like(torch.ones(20_000)), 0.0, 1.0),
    "randint": (lambda: torch.randint(2, 6, (20_000,)).float(), 3.5, 1.25**0.5),
    "randint_like": (lambda: torch.randint_like(torch.ones(20_000), 4), 1.5, 1.25**0.5),
    "randperm": (lambda: torch.randperm(20_000).float(), 9_999.5, 20_000 / 12**0.5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((20_000,), 0.3)), 0.3, 0.21**0.5),
    "bernoulli_": (lambda: torch.empty(20_000).bernoulli_(0.3), 0.3, 0.21**0.5),
    "normal_": (lambda: torch.empty(20_000).normal_(2, 3), 2.0, 3.0),
    "normal": (lambda: torch.normal(torch.full((20_000,), 2.0), 3.0), 2.0, 3.0),
    "uniform_": (lambda: torch.empty(20_000).uniform_(-1, 3), 1.0, 4 / 12**0.5),
    "exponential_": (lambda: torch.empty(20_000).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda: torch.empty(20_000).geometric_(0.4), 2.5, 0.6**0.5 / 0.4),
    "log_normal_": (lambda: torch.empty(20_000).log_normal_(0, 0.25).log(), 0.0, 0.25),
    "poisson": (lambda: torch.poisson(torch.full((20_000,), 3.0)), 3.0, 3.0**0.5),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 2.0, 1.0]), 20_000, True).float(), 1.0, 0.5**0.5),
}


def test_random_operators_have_torchs_distribution() -> None:
    torch.manual_seed(0)
    jitted = ts.jax_jit(lambda x: {name: draw() + x for name, (draw, *_) in DRAWS.items()})
    first, second = (jitted(torch.zeros(())) for _ in range(2))
    for name, (draw, mean, deviation) in DRAWS.items():
        drawn, own = first[name].cpu(), draw()
        assert not torch.equal(drawn, second[name].cpu()), name
        assert (drawn.shape, drawn.dtype) == (own.shape, own.dtype), name
        assert abs(drawn.mean() - mean) < 6 * deviation / len(drawn) ** 0.5, name  # six standard errors
        assert abs(drawn.std() / deviation - 1) < 0.1, name


def test_keys_of_many_draws_are_one_call_of_threefry_and_those_of_each_draw() -> None:
    model = torch.nn.Sequential(*[torch.nn.Dropout(0.5) for _ in range(5)], torch.nn.Linear(64, 1))
    step = ts.make_train_step(
        model,
        lambda model, x: model(x).sum(),
        optax.sgd(0.1),
        mesh=ts.make_mesh(batch=1),
        plan=ts.plans.replicated(),
        scan_layers=False,
    )
    state, x = step.init(seed=0), torch.ones(8, 64)
    folds = step.lower(state, x).as_text().count("call @_threefry_fold_in")
    assert folds == 2, "one for the step, and one for all its draws"

    first = ts.jax_jit(lambda x: torch.rand_like(x))
    both = ts.jax_jit(lambda x: [torch.rand_like(x), torch.rand_like(x)])
    torch.manual_seed(0)
    alone = first(x)
    torch.manual_seed(0)
    assert_close(both(x)[0], alone, rtol=0, atol=0)  # the same key, so the same bits


def test_draws_without_replacement_do_not_repeat() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 3.0]]).repeat(50, 1)
    drawn = ts.jax_jit(lambda w: torch.multinomial(w, 3))(weights).cpu()
    assert (drawn.sort(-1).values == torch.tensor([0, 2, 3])).all()
    permutation = ts.jax_jit(lambda x: torch.randperm(100) + x)(torch.tensor(0)).cpu()
    assert sorted(permutation.tolist()) == list(range(100))


def test_what_torch_refuses_to_draw_from_is_not_a_number() -> None:
    bad = torch.tensor([0.5, 2.0, -1.0, torch.nan])
    for draw in (torch.bernoulli, torch.poisson, lambda x: torch.normal(x * 0, x)):
        drawn = ts.jax_jit(draw)(bad).cpu()
        assert drawn[0].isfinite()
        assert drawn[2:].isnan().all()
    weights = torch.tensor([[1.0, 2.0], [1.0, -1.0], [0.0, 0.0], [1.0, torch.nan], [1.0, torch.inf]])
    for replacement in (True, False):
        drawn = ts.jax_jit(lambda w, again=replacement: w.gather(1, torch.multinomial(w, 1, again)))(weights).cpu()
        assert drawn[0].isfinite()
        assert drawn[1:].isnan().all()  # an index that torch refuses reads NaN


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli_": lambda x: x.bernoulli_(2.0),
    "bernoulli": lambda x: torch.bernoulli(x, -0.1),
    "uniform_": lambda x: x.uniform_(1, 0),
    "normal_": lambda x: x.normal_(0, -1),
    "log_normal_": lambda x: x.log_normal_(0, -1),
    "exponential_": lambda x: x.exponential_(-1),
    "geometric_": lambda x: x.geometric_(2),
    "cauchy_": lambda x: x.cauchy_(0, -1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_torch_refuses_to_draw_from_are_refused(name: str) -> None:
    for draw in (REFUSED[name], lambda x: REFUSED[name](x.to("jax")), ts.jax_jit(lambda x: REFUSED[name](x.clone()))):
        with pytest.raises((RuntimeError, ValueError), match=r"expects|are drawn with"):
            draw(torch.zeros(3))


def test_every_random_operator_takes_a_key() -> None:
    seeded = {op for op in LOWERINGS if torch.Tag.nondeterministic_seeded in op.tags}
    assert seeded <= RANDOM


def test_noise_of_gumbel_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "exponential", lambda key, shape, dtype: np.zeros(shape, dtype))
    drawn = np.asarray(_random.exponential(None, np.zeros(3, np.float32)))
    assert (drawn > 0).all()
    assert np.isfinite(np.log(drawn)).all()


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: x * torch.empty_like(x).bernoulli_(0.5),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: torch.nn.functional.dropout(x, 0.5),
    ],
)
def test_nan_outlasts_what_is_dropped(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.full((64,), torch.nan)
    assert torch.isnan(drop(x)).all()
    assert torch.isnan(ts.jax_jit(drop)(x)).all()
