# %% [markdown]
# # One function on every device: `tpmap`
#
# `tpmap` runs a torch function once per device, as one compiled program. You write the function for what one device
# sees and say for each argument how it reaches the devices; the axis of the devices stays out of sight. This tutorial
# goes through the kinds of arguments, random numbers, what comes back, and what helps when something is wrong.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import contextlib
import functools
import io

import jax

jax.config.update("jax_num_cpu_devices", 8)

import torch

import torch_shard as ts
from torch_shard.collectives import axis_index, pmean, psum

# %% [markdown]
# ## A noisy product
#
# Sixteen rows of data are split among the devices (`"shard"`), every device gets the whole matrix (`"broadcast"`), and
# a key of its own (`"rng"`), from which torch's random functions draw. `"static"` is for Python values.


# %%
def noisy_product(data, matrix, key, scale):
    assert (data.shape, matrix.shape, key.shape) == ((2, 8), (8, 5), (2,))  # what one device sees
    return data @ matrix + scale * torch.randn(2, 5)


torch.manual_seed(0)
data, matrix = torch.randn(16, 8), torch.randn(8, 5)
kinds = ["shard", "broadcast", "rng", "static"]
mapped = ts.tpmap(noisy_product, "devices", kinds)
result = mapped(data, matrix, jax.random.key(0), 0.1)
assert result.shape == (8, 2, 5)
print(result.sharding)

# %% [markdown]
# Results have a leading dim of devices, and stay where they are. `wrap_return` makes of them what you like; `"shard"`
# undoes what `"shard"` does. Without noise, this is the plain product.

# %%
flat = ts.tpmap(noisy_product, "devices", kinds, wrap_return=lambda result: result.reshape(-1, *result.shape[2:]))
assert flat(data, matrix, 0, 0.1).shape == (16, 5)  # an integer is a seed
joined = ts.tpmap(noisy_product, "devices", kinds, wrap_return="shard")
torch.testing.assert_close(joined(data, matrix, 0, 0.0).cpu(), data @ matrix)

noise = (flat(data, matrix, 0, 0.1).cpu() - data @ matrix).reshape(8, 10)
assert len({tuple(row) for row in noise.tolist()}) == 8  # another on each device
assert torch.equal(flat(data, matrix, 0, 0.1).cpu(), flat(data, matrix, 0, 0.1).cpu())  # the same for a seed

# %% [markdown]
# ## Rolling dice
#
# As a decorator, with `functools.partial`. Arguments and results are pytrees, and collectives work by the name of the
# axis. Nothing touches a device before the first call.


# %%
@functools.partial(ts.tpmap, axis_name="table", argtypes=["rng", "static"], kwargtypes={"loaded": "broadcast"})
def roll(key, num_rolls, *, loaded):
    faces = torch.randint(0, 6, (num_rolls,))
    faces = torch.where(torch.rand(num_rolls) < loaded["chance"], loaded["face"], faces)
    counts = torch.nn.functional.one_hot(faces, 6).sum(0)
    return {"here": counts, "everywhere": psum(counts, "table"), "table": axis_index("table")}


rolls = roll(jax.random.key(7), 600, loaded={"chance": 0.0, "face": 5})
print(rolls["here"])
assert rolls["here"].sum(1).tolist() == [600] * 8
assert len({tuple(counts) for counts in rolls["here"].tolist()}) == 8
assert roll(7, 600, loaded={"chance": 1.0, "face": 5})["everywhere"][0].tolist() == [0, 0, 0, 0, 0, 4800]

# %% [markdown]
# `unshard` gives one tree per device, for plain Python loops. Where a program runs as several processes,
# `gather_from_jax_processes` brings one tree from each; here there is one.

# %%
tables = ts.unshard(rolls)
assert len(tables) == 8
for number, table in enumerate(tables):
    assert table["table"].item() == number
    assert torch.equal(table["everywhere"], sum(other["here"] for other in tables))

(mine,) = ts.gather_from_jax_processes(tables)
assert mine[3]["here"].tolist() == tables[3]["here"].tolist()

# %% [markdown]
# ## Training on every device
#
# Each device computes gradients of its own part of the batch, and takes the mean over all. `"thru"` is for what has its
# row for each device already: the weights, which stay where they are from step to step. Gradients flow through `tpmap`
# as well as within it.


# %%
def loss_fn(weights, x, y):
    return (x @ weights["w"] + weights["b"] - y).square().mean()


@functools.partial(ts.tpmap, axis_name="devices", argtypes=["thru", "shard", "shard"])
def update(weights, x, y):
    loss, grads = ts.jax_value_and_grad(loss_fn)(weights, x, y)
    grads = pmean(grads, "devices")
    return {name: w - 0.1 * grads[name] for name, w in weights.items()}, pmean(loss, "devices")


x, truth = torch.randn(64, 3), torch.tensor([1.0, -2.0, 0.5])
y = x @ truth + 3
weights = {"w": torch.zeros(8, 3), "b": torch.zeros(8)}
for _ in range(100):
    weights, losses = update(weights, x, y)
torch.testing.assert_close(weights["w"][0].cpu(), truth, atol=1e-3, rtol=0)

mean_loss = ts.tpmap(lambda w, x, y: loss_fn({"w": w, "b": 0}, x, y), "devices", ["broadcast", "shard", "shard"])
through = ts.jax_grad(lambda w: mean_loss(w, x, y).mean())(torch.zeros(3))
plain = torch.func.grad(lambda w: loss_fn({"w": w, "b": 0}, x, y))(torch.zeros(3))
torch.testing.assert_close(through.cpu(), plain)

# %% [markdown]
# The replicas must not drift apart. `assert_replica_integrity` compares them on all devices of all processes; with
# `device_axis=True`, rows of the leading dim count as replicas. Take the mean away, and it says where they differ.

# %%
ts.assert_replica_integrity(weights, device_axis=True)
ts.assert_replica_integrity(weights)  # arrays as JAX has them: here each device holds a part, and there are no replicas

spoiled = {**weights, "b": weights["b"] + 0.5 * (torch.arange(8, device="jax") == 3)}
try:
    ts.assert_replica_integrity(spoiled, device_axis=True)
    raise SystemExit("replicas that differ were accepted")
except AssertionError as error:
    print(error)
    assert "['b']: row 3 on CPU 3 differs from" in str(error)

# %% [markdown]
# ## Looking inside
#
# `debug_print` prints from within a compiled function, once for each device and in no particular order.


# %%
@functools.partial(ts.tpmap, axis_name="devices", argtypes=["shard"])
def watched(x):
    ts.debug_print("device {} sees {shape}", axis_index("devices"), shape=tuple(x.shape))
    return x


with contextlib.redirect_stdout(io.StringIO()) as printed:
    watched(torch.ones(16, 4))
    jax.effects_barrier()  # wait for all of them
print(printed.getvalue())
assert sorted(printed.getvalue().splitlines()) == [f"device {i} sees (2, 4)" for i in range(8)]

# %% [markdown]
# ## Mistakes, and kinds of your own
#
# Arguments are checked before anything runs, and errors name them.

# %%
mistakes = {
    "Did you mean 'broadcast'?": lambda: ts.tpmap(noisy_product, "devices", ["shard", "brodcast", "rng", "static"]),
    "takes 4 positional arguments": lambda: mapped(data, matrix, 0),
    "the keyword 'load'": lambda: roll(0, 6, load=None),
    "data (15, 8) has 15 rows, which do not divide among 8 devices": lambda: mapped(data[:15], matrix, 0, 0.1),
}
for message, mistake in mistakes.items():
    try:
        mistake()
        raise SystemExit("a mistake was accepted")
    except ValueError as error:
        print(error, end="\n\n")
        assert message in str(error)

# %% [markdown]
# An `ArgKind` says how an argument is spread over the devices, and how that is undone: here rows are dealt like cards.

# %%
dealt = ts.ArgKind(
    spread=lambda x, num_devices: x.reshape(-1, num_devices, *x.shape[1:]).movedim(1, 0),
    join=lambda x: x.movedim(0, 1).flatten(0, 1),
)
cards = torch.arange(16)
assert ts.tpmap(lambda hand: hand, "players", [dealt])(cards)[0].tolist() == [0, 8]
assert torch.equal(ts.tpmap(lambda hand: hand, "players", [dealt], wrap_return=dealt)(cards).cpu(), cards.int())
