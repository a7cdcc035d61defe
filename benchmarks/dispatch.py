"""Time until the call of a step returns, over that of a plain `jax.jit` on a state of as many arrays, donated alike.

The arrays are frozen parameters, which the program passes through: what is timed is Python and JAX's dispatch, not the
program. Our call checks and places the batch; that of the plain jit lies on the device already.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import torch_shard as ts
from benchmarks.rows import Row, timed
from benchmarks.timing import seconds


def rows(quick: bool) -> Iterator[Row]:
    """At 300 and at 3,000 leaves."""
    for leaves in (300, 3000):
        ours, raw = _ours(leaves), _raw(leaves)
        times = np.array([_pair(ours, raw, i) for i in range(20 if quick else 200)])[5:]
        yield timed(f"calling step ÷ raw jit, {leaves} leaves", times[:, 0], times[:, 1], 1.3)


def _pair(ours: Callable[[], Any], raw: Callable[[], Any], turn: int) -> tuple[float, float]:
    """Seconds of each, the one that goes first in turn; nothing runs while the other is timed."""
    order = (ours, raw) if turn % 2 else (raw, ours)
    times = {}
    for call in order:
        out: list[Any] = []
        times[call] = seconds(lambda call=call, out=out: out.append(call()))
        jax.block_until_ready(out)
    return times[ours], times[raw]


def _ours(leaves: int) -> Callable[[], Any]:
    model = nn.ParameterList(nn.Parameter(torch.ones(4), requires_grad=i == 0) for i in range(leaves))
    step = ts.make_train_step(
        model,
        lambda model, batch: (batch * model[0]).sum(),
        optax.sgd(1e-3),
        mesh=ts.make_mesh(batch=1),
        plan=ts.ShardingPlan({}, default=jax.P()),
        scan_layers=False,  # stacked, there would be two leaves
    )
    held, batch = [step.init(seed=0)], torch.ones(2, 4)

    def call() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics

    return call


def _raw(leaves: int) -> Callable[[], Any]:
    optimizer = optax.sgd(1e-3)

    def step(state: Any, batch: jax.Array) -> Any:
        params, frozen, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: (batch * p["0"]).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), frozen, opt_state), metrics

    params = {str(i): jnp.ones(4) for i in range(leaves)}
    first = {"0": params.pop("0")}
    jitted, batch = jax.jit(step, donate_argnums=0), jnp.ones((2, 4))
    held = [(first, params, optimizer.init(first))]

    def call() -> Any:
        held[0], metrics = jitted(held[0], batch)
        return metrics

    return call
