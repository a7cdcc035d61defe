"""Several processes: a live model is read by all of them, or it is an error within seconds."""

from tests.oracles.processes import run_job, run_processes

TRAINED = """
import copy, io, optax, time
import numpy as np
from jax.sharding import PartitionSpec as P
from torch import nn

mesh = ts.make_mesh(batch=jax.device_count())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.BatchNorm1d(8), nn.Linear(8, 4))

def squares(model, batch):
    return model(batch).square().mean()

def batches(num):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=generator) for _ in range(num)]

def in_torch():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    for batch in batches(2):
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        model[1].inner.weight.mul_(0.5)
        model[4].weight.clamp_(-0.1, 0.1)
    for batch in batches(2):
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()
    return model, optimizer

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
plan = ts.ShardingPlan({"*.inner.weight": P(None, "batch"), "4.weight": P(None, "batch")}, default=P())
step = ts.make_train_step(model, squares, optimizer, mesh=mesh, plan=plan)
state = step.init(seed=0)
for batch in batches(2):
    state, _ = step(state, batch)
"""


def test_all_processes_read_and_write_the_model_as_in_torch():
    run_processes(
        TRAINED
        + """
with torch.no_grad():
    model[1].inner.weight.mul_(0.5)
    model[4].weight.clamp_(-0.1, 0.1)
for batch in batches(2):
    state, _ = step(state, batch)
twin, twins = in_torch()
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file, weights_only=True)
for name, value in twin.state_dict().items():
    torch.testing.assert_close(saved["model"][name], value, rtol=1e-4, atol=1e-5)  # Adam divides by small numbers
for number, own in twins.state_dict()["state"].items():
    for key, value in own.items():
        torch.testing.assert_close(saved["optimizer"]["state"][number][key], value, rtol=1e-4, atol=1e-5)
model.eval()
with torch.no_grad():
    found = model(batches(1)[0].to("jax"))
    wanted = twin.eval()(batches(1)[0])
torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)
model.to("cpu")
torch.testing.assert_close(model[4].weight, twin[4].weight, rtol=1e-4, atol=1e-5)
""",
        2,
    )


def test_what_one_process_has_whole_it_reads_alone_and_the_rest_is_an_error_in_words():
    ends = run_job(
        TRAINED
        + """
if rank == 0:
    assert model[4].bias.tolist() == np.asarray(state.params["4.bias"]).tolist()  # whole on each device
mark()
if rank == 0:
    torch.save(model.state_dict(), io.BytesIO())
for batch in batches(3):
    state, _ = step(state, batch)
jax.block_until_ready(state.params)
""",
        2,
        num_devices=2,
    )
    output = ends[0].output
    assert ends[0].status != 0
    assert ends[0].seconds < 30
    assert "the reading of 0.inner.weight" in output
    assert "ts.export_torch(state, path)" in output
