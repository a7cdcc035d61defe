"""What adapted functions do besides: lines printed, as often as the code runs; random states, read and set."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import sgd_step
from torch_shard.collectives import axis_index


def speak(x: torch.Tensor) -> torch.Tensor:
    ts.debug_print("sum {} of {shape}", x.sum(), shape=tuple(x.shape))
    return (x * x).sum()


X = torch.arange(4.0)

ONCE: dict[str, Callable[[], Any]] = {
    "eager": lambda: speak(X),
    "eager, with gradients": lambda: speak(X.to("jax").requires_grad_()).backward(),
    "jit": lambda: ts.jax_jit(speak)(X),
    "jit in jit": lambda: ts.jax_jit(ts.jax_jit(speak))(X),
    "jit in a captured function": lambda: ts.jax_jit(lambda x: ts.jax_jit(speak)(x) + 1)(X),
    "value_and_grad": lambda: ts.jax_jit(ts.jax_value_and_grad(speak))(X),
    "grad of jit": lambda: ts.jax_jit(ts.jax_grad(ts.jax_jit(speak)))(X),
    "JAX's grad": lambda: jax.grad(ts.jax_view(speak))(jnp.arange(4.0)),
    "cond": lambda: ts.jax_jit(lambda x: torch.cond(x.sum() > 0, speak, lambda x: x.sum(), (x,)))(X),
    "vmap": lambda: ts.jax_vmap(speak)(X[None]),
    "within a view, without a key": lambda: ts.jax_view(lambda x: ts.jax_jit(speak)(x) + 1)(jnp.arange(4.0)),
}


def lines(capfd: pytest.CaptureFixture[str]) -> collections.Counter[str]:
    jax.effects_barrier()
    return collections.Counter(capfd.readouterr().out.splitlines())


@pytest.mark.parametrize("name", ONCE)
def test_prints_once(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    ONCE[name]()
    assert lines(capfd) == {"sum 6.0 of (4,)": 1}


def test_prints_at_each_call_of_a_compiled_function(capfd: pytest.CaptureFixture[str]) -> None:
    fn = ts.jax_jit(speak)
    fn(X), fn(X)
    assert lines(capfd) == {"sum 6.0 of (4,)": 2}


def test_prints_after_its_gradient_has_been_captured(capfd: pytest.CaptureFixture[str]) -> None:
    inner = ts.jax_jit(speak)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + speak(x)

    pure = functools.partial(ts.jax_view(outer), key=jax.random.key(0))
    jax.grad(pure)(jnp.arange(4.0))
    lines(capfd)
    pure(jnp.arange(4.0))
    assert lines(capfd) == {"sum 6.0 of (4,)": 2}
    inner(X)
    assert lines(capfd) == {"sum 6.0 of (4,)": 1}


MAPS: dict[str, Callable[[Any], Any]] = {
    "jax_shard_map": lambda f: ts.jax_shard_map(f, mesh=ts.make_mesh(i=8), in_specs=P("i"), out_specs=P("i")),
    "jax_shard_map, unchecked": lambda f: ts.jax_shard_map(
        f, mesh=ts.make_mesh(i=8), in_specs=P("i"), out_specs=P("i"), check_vma=False
    ),
    "jax_pmap": lambda f: lambda x: ts.jax_pmap(f, axis_name="i")(x.view(8, 2)),
    "jax_vmap": lambda f: lambda x: ts.jax_vmap(f, axis_name="i")(x.view(8, 2)),
    "tpmap": lambda f: ts.tpmap(f, "i", ["shard"]),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_prints_once_for_each_device(name: str, compiled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        ts.debug_print(f"device {{}} sees {tuple(x.shape)}, {{first}}", axis_index("i"), first=x[0])
        return x

    fn = MAPS[name](f)
    (ts.jax_jit(fn) if compiled else fn)(torch.arange(16.0))
    assert lines(capfd) == {f"device {i} sees (2,), {2.0 * i}": 1 for i in range(8)}


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        ts.debug_print("least {} of {}", y.amin().clamp(max=0), y.shape[0])
        return y


@pytest.mark.parametrize("remat", ["none", "block"])
def test_prints_once_for_each_layer_of_a_step(remat: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ts.debug_print("batch of {}", x.sum())
        return model(x).square().mean()

    model = nn.Sequential(Loud(), Loud(), Loud())
    step = sgd_step(model, loss_fn, remat=remat)
    step(step.init(seed=0), torch.ones(2, 4))
    assert lines(capfd) == {"batch of 8.0": 1, "least 0.0 of 2": 3}


def test_seeding_within_a_captured_function_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand(2)

    with pytest.raises(NotImplementedError, match=r"(?s)test_effects\.py.*seeded within a captured function"):
        ts.jax_jit(fn)(torch.ones(2))


def test_states_of_the_generator_replay_draws() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        state = torch.get_rng_state()
        first, second = torch.rand(4), torch.rand(4)
        torch.set_rng_state(state)
        return [x + first, x + second, x + torch.rand(4)]

    first, second, again = (out.cpu() for out in ts.jax_jit(fn)(torch.zeros(4)))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
