"""A loop that never waits, on simulated devices."""

import os
import subprocess
import sys

LOOP = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import optax, torch, torch_shard as ts
from jax.sharding import PartitionSpec as P

model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))
plan = ts.ShardingPlan({"0.weight": P("model"), "2.weight": P(None, "model")}, default=P())
mesh = ts.make_mesh(batch=4, model=2)
step = ts.make_train_step(model, lambda model, x: model(x).square().mean(), optax.adamw(1e-3), mesh=mesh, plan=plan)
state, batch = step.init(), step.put(torch.randn(256, 64))
for _ in range(200):
    state, metrics = step(state, batch)
jax.block_until_ready(state)
"""


def test_a_long_loop_that_never_waits_comes_to_its_end() -> None:
    """Without a bound XLA aborts it at step 60 to 180; it would wait a minute before that."""
    environ = {**os.environ, "NPROC": "1"}  # XLA then has no more threads than devices, whatever the machine
    done = subprocess.run([sys.executable, "-c", LOOP], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
