"""States of two steps that share arrays, and states in which the user has put numbers."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import anew
from tests.tables.cases import BATCH, WHOLE, make_mesh

X = torch.linspace(-1, 1, BATCH * 8).view(BATCH, 8)


class Pair(nn.Module):
    """A generator and its critic, one of which is frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(8, 8), nn.Linear(8, 1)
        self.get_submodule(frozen).requires_grad_(False)


def loss_of_g(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model.d(model.g(x)) - 1).square().mean()


def loss_of_d(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.d(model.g(x)).square().mean() + (model.d(x) - 1).square().mean()


def make(model: nn.Module, loss_fn: Any, optimizer: optax.GradientTransformation | None = None) -> Any:
    return ts.make_train_step(model, loss_fn, optimizer or optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=WHOLE)


def test_states_that_share_arrays_are_refused_by_name_and_copies_are_as_in_torch() -> None:
    def steps_of_pairs() -> Any:
        return make(Pair("d"), loss_of_g), make(Pair("g"), loss_of_d)

    said = (
        r"make_train_step: arrays of this state are gone, as another state that shares them was donated to a step: par"
        r"ams\['g.weight'\], params\['g.bias'\]. A .*jax.tree.map\(jnp.copy, other.params\)"
    )
    for shared in (lambda params: params, dict):
        steps = steps_of_pairs()
        g, d = (step.init() for step in steps)
        steps[1](dataclasses.replace(d, frozen=shared(g.params)), X)
        with refuses(said, ValueError):
            steps[0](g, X)
    with refuses("make_eval_step: arrays of this state are gone", ValueError):
        steps[0].evaluation()(g, X)

    steps = steps_of_pairs()
    g, d = (step.init() for step in steps)
    models = Pair("d"), Pair("g")
    for _ in range(2):
        d = dataclasses.replace(d, frozen=jax.tree.map(jnp.copy, g.params))
        d, _ = steps[1](d, X)
        g = dataclasses.replace(g, frozen=jax.tree.map(jnp.copy, d.params))
        g, _ = steps[0](g, X)
        for model, loss_fn, name in ((models[1], loss_of_d, "d"), (models[0], loss_of_g, "g")):
            loss_fn(model, X).backward()
            for parameter in model.get_submodule(name).parameters():
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
            for other in models:
                other.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    np.testing.assert_allclose(g.params["g.weight"], models[0].g.weight.detach(), rtol=1e-5, atol=1e-7)  # float32


def two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_one_array_under_two_names_is_copied_or_refused() -> None:
    step, wanted = make(two(), squares), two()
    state = step.init()
    params = dict(state.params)
    state = dataclasses.replace(state, params={**params, "2.weight": params["0.weight"]})
    state, metrics = step(state, X)
    wanted.load_state_dict({**wanted.state_dict(), "2.weight": wanted.state_dict()["0.weight"]})
    np.testing.assert_allclose(metrics["loss"], squares(wanted, X).item(), rtol=1e-6)
    twice = dataclasses.replace(state, num_batches=state.step)
    said = "the state has one array in several places: step, num_batches. A step reuses each array of its state once."
    with refuses(re.escape(said), ValueError):
        step(twice, X)
    step(state, X)  # nothing was lost


NUMBERS = [np.float32(0.02), 0.02, np.float64(0.02), np.array(0.02), torch.tensor(0.02), jnp.float32(0.02)]


def test_a_rate_that_was_set_is_that_of_the_next_step(tmp_path: Path) -> None:
    step = make(two(), squares, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    other = make(two(), squares, optax.sgd(0.02))
    wanted, metrics = other(other.init(), X)
    evaluate = step.evaluation()
    for number, rate in enumerate(NUMBERS):
        state = anew(step, two()).init()
        state.opt_state.hyperparams["learning_rate"] = rate
        with ts.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(state)
            checkpointer.wait()
            restored = checkpointer.restore(step)
        assert float(evaluate(state, X)["loss"]) == pytest.approx(float(metrics["loss"]))
        for given in (state, restored):
            found, _ = step(given, X)
            # float32: two programs, of which one is given the rate
            np.testing.assert_allclose(found.params["0.weight"], wanted.params["0.weight"], rtol=1e-5, atol=1e-7)
    found.opt_state.hyperparams["learning_rate"] = np.float32(0.03)
    step(found, X)
    assert step.num_compiles == 1


def test_other_things_in_a_state_are_refused_by_name() -> None:
    step = make(two(), squares, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    state = step.init()
    state.opt_state.hyperparams["learning_rate"] = "fast"
    said = (
        r"make_train_step: opt_state.hyperparams\['learning_rate'\] of the state must be an array or a number, got str"
    )
    with refuses(said, TypeError):
        step(state, X)
    state = dataclasses.replace(step.init(), num_batches=0.5)  # pyright: ignore[reportArgumentType]
    with refuses("num_batches of the state must be int32, got 0.5", TypeError):
        step(state, X)
    state, _ = step(dataclasses.replace(step.init(), step=3, num_batches=np.int64(3)), X)  # pyright: ignore
    assert (int(state.step), int(state.num_batches)) == (4, 4)
