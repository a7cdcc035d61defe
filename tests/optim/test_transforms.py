"""Torch's optimizers as optax transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import torch_shard as ts

PAIRS: dict[str, Any] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}


def test_each_name_has_its_class() -> None:
    assert sorted(PAIRS) == ts.optim.__all__


# Of the largest entry. Muon's iteration is in bfloat16; numbers that NAdam and ASGD keep are float32 in torch too, and
# what they round on the way is not the same.
COARSE = {"muon": 1e-4, "nadam": 1e-7, "asgd": 1e-7}


@pytest.mark.parametrize("name", PAIRS)
def test_defaults_and_updates_are_those_of_torch(name: str) -> None:
    """In float64, so that what differs is the formula."""
    torch.manual_seed(0)
    shapes = [(4, 3)] if name == "muon" else [(4, 3), (3,)]
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    with jax.enable_x64(True):
        theirs, ours = PAIRS[name](params), getattr(ts.optim, name)()
        held = [jnp.asarray(p.detach().numpy()) for p in params]
        state, update = ours.init(held), jax.jit(ours.update)
        for _ in range(5):
            grads = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            updates, state = update([jnp.asarray(g.numpy()) for g in grads], state, held)
            held = optax.apply_updates(held, updates)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            theirs.step()
    for mine, param in zip(held, params, strict=True):
        wanted = param.detach().numpy()
        atol = COARSE.get(name, 1e-13) * np.abs(wanted).max()
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=atol)


def test_schedules_are_those_of_optax() -> None:
    ours = ts.optim.sgd(optax.linear_schedule(1.0, 0.0, 4))
    param, grad = jnp.ones(2), jnp.ones(2)
    state = ours.init(param)
    for rate in (1.0, 0.75, 0.5):
        updates, state = ours.update(grad, state, param)
        np.testing.assert_allclose(updates, -rate, atol=1e-6)  # of float32


def test_torch_checks_its_settings() -> None:
    with pytest.raises(ValueError, match="adamw: Invalid beta parameter"):
        ts.optim.adamw(betas=(1.5, 0.9))
    with pytest.raises(TypeError, match=r"adamw: .*unexpected keyword argument 'rho'"):
        ts.optim.adamw(rho=0.1)
    with pytest.raises(ValueError, match="Muon takes matrices alone"):
        ts.optim.muon().init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"ts\.optim\.adam needs the parameters"):
        ts.optim.adam().update(jnp.ones(3), ts.optim.adam().init(jnp.ones(3)))
