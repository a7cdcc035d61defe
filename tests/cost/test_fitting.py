"""What programs take of a device's memory, and those that a compiler refuses for want of it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._cost.fitting import TooLarge, compile_or_refuse, memory_of_program
from torch_shard._sharding import memory_of
from torch_shard._train import programs
from validation.fuzz.programs import Case


class Lowered:
    """Stands for JAX's, whose compiler says this."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self) -> Any:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.5G of 15.75G hbm.", int(26.5 * 2**30)),
        ("RESOURCE_EXHAUSTED: the program (512M) exceeds", 2**29),
        ("RESOURCE_EXHAUSTED: it does not say", None),
    ],
)
def test_a_refusal_says_what_the_program_needs(message: str, num_bytes: int | None) -> None:
    lowered: Any = Lowered(message + "\nand more")
    assert compile_or_refuse(lowered) == TooLarge(message, num_bytes)


def test_another_error_stays_one() -> None:
    lowered: Any = Lowered("INTERNAL: broken")
    with pytest.raises(RuntimeError, match="INTERNAL"):
        compile_or_refuse(lowered)


def test_what_the_compiler_refuses_does_not_fit_into_any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([TooLarge("no", 2**35), TooLarge("no", None)])
    monkeypatch.setattr(programs, "compile_or_refuse", lambda lowered: next(refusals, None) or lowered.compile())
    step = step_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), mesh=(1, 1), remat=2**40)
    step.preview(torch.empty(8, 8))
    assert "remat='block' takes" in step.report()
    refusals = iter([TooLarge("no", 2**35), TooLarge("no", None), TooLarge("no", 2**34)])
    with pytest.raises(
        ValueError, match=r"'none' takes more than the device has, \d+, 'dots' takes more than the device"
    ):
        step.preview(torch.empty(16, 8))


@pytest.mark.slow  # compiles for TPUs twice
@pytest.mark.usefixtures("optimized")
def test_a_program_for_tpus_takes_what_their_compiler_counts() -> None:
    """It refuses a program by this number, and not by the sum of its parts, which is larger."""
    device = ts.make_mesh(topology="v5e:2x2", batch=1).devices.flat[0]
    limit = memory_of(device)
    assert limit is not None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32)).mean()

    optimizer = optax.adamw(1e-3)

    def step(weights: jax.Array, moments: optax.OptState, x: jax.Array) -> Any:
        grads = jax.grad(loss)(weights, x)
        updates, moments = optimizer.update(grads / jnp.linalg.norm(grads), moments, weights)
        return optax.apply_updates(weights, updates), moments

    def compiled(num_layers: int) -> jax.stages.Compiled | TooLarge:
        on_one = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.eval_shape(lambda: (jnp.zeros((num_layers, 2048, 2048)), jnp.zeros((8192, 2048), jnp.bfloat16)))
        given = (shapes[0], jax.eval_shape(optimizer.init, shapes[0]), shapes[1])
        given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_one), given)
        return compile_or_refuse(jax.jit(step, donate_argnums=(0, 1)).lower(*given))

    fits, too_large = compiled(150), compiled(160)
    assert isinstance(fits, jax.stages.Compiled)
    assert isinstance(too_large, TooLarge)
    memory, of_parts = (memory_of_program(fits, platform) for platform in ("tpu", "any other"))
    assert memory.peak <= limit < of_parts.peak
    assert too_large.num_bytes == pytest.approx(memory.peak * 160 / 150, rel=0.01)  # the compiler says two decimals


def test_what_the_partitioner_breaks_is_refused_in_our_words() -> None:
    """Of products of three axes XLA makes slices that are larger than what they cut (jaxlib 0.10.2; by the fuzzer)."""
    with jax.enable_x64(True):
        case = Case(
            8294,
            "images",
            {"b0": ("reused", 507412379), "b1": ("bilinear", 184339942)},
            (("extra", 2), ("batch", 2), ("model", 2)),
            rules={"blocks.b0.inner.weight": P(None, "model"), "blocks.b1.weight": P(None, None, "extra")},
            options={"twice": True},
        )
        step = case.make_step(case.make_model())
        state = step.init(seed=0)
        message = r"cannot split this step over \(extra=2, batch=2, model=2\): INVALID_ARGUMENT.* Split fewer entries"
        with pytest.raises(NotImplementedError, match=message):
            step(state, case.make_batch())
        assert not any(array.is_deleted() for array in jax.tree.leaves(state))


def test_xlas_warnings_of_what_it_gathers_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = ts.make_mesh(batch=4, model=2)

    def lowered(scale: float) -> jax.stages.Lowered:
        def fn(x: jax.Array) -> jax.Array:
            split = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(("batch", "model"))))
            return jax.lax.with_sharding_constraint(jnp.cos(split) * scale, NamedSharding(mesh, P(None, "model")))

        return jax.jit(fn).lower(jax.ShapeDtypeStruct((32, 16), "float32", sharding=NamedSharding(mesh, P())))

    compile_or_refuse(lowered(2.0))
    assert "rematerialization" not in capfd.readouterr().err
    lowered(3.0).compile()
    assert "Involuntary full rematerialization" in capfd.readouterr().err
