"""Loops that never wait, on simulated devices."""

import pytest

from tests.oracles.processes import run_alone

START = """
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = ts.make_mesh(batch=4, model=2)
"""

STEPS = """
model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))
plan = ts.ShardingPlan({"0.weight": P("model"), "2.weight": P(None, "model")}, default=P())
step = ts.make_train_step(model, lambda model, x: model(x).square().mean(), optax.adamw(1e-3), mesh=mesh, plan=plan)
state, batch = step.init(), step.put(torch.randn(256, 64))
for _ in range(200):
    state, metrics = step(state, batch)
jax.block_until_ready(state)
"""

EAGER = """
model = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for _ in range(20) for sizes in ((64, 1024), (1024, 64))))
rules = {f"{i}.weight": P(None, "model") if i % 2 else P("model") for i in range(40)}
ts.place(model.requires_grad_(False), mesh, ts.ShardingPlan(rules, default=P()))
x = ts.torch_view(jax.device_put(torch.randn(256, 64).numpy(), NamedSharding(mesh, P("batch"))))
for _ in range(200):
    y = model(x)
print(y.sum().item())
"""


@pytest.mark.parametrize(
    "loop", [pytest.param(STEPS, id="steps"), pytest.param(EAGER, id="eager", marks=pytest.mark.slow)]
)
def test_a_long_loop_that_never_waits_comes_to_its_end(loop: str) -> None:
    """Where nobody waits, XLA aborts it at step 60 to 180 (eager: in most runs); it would wait a minute before that."""
    # XLA then has no more threads than devices, whatever the machine
    done = run_alone(START + loop, timeout_s=240, NPROC="1")
    assert done.status == 0, done.output[-2000:]
