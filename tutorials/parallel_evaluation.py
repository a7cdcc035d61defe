# %% [markdown]
# # Parallel evaluation: `jax_vmap`, `jax_pmap` and named axes, from torch
#
# `jax_vmap` maps a torch function over the rows of a batch on one device, `jax_pmap` over as many devices. A mapped
# axis may have a name, and then the mapped function can ask for what the other rows or devices have. With that,
# training by data parallelism takes one more line than training.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import functools

import jax

jax.config.update("jax_num_cpu_devices", 8)

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import torch_shard as ts
from torch_shard.collectives import pmean, psum

# %% [markdown]
# ## A function of one row
#
# A window slides over `x`; each place gives one weighted sum.


# %%
def convolve(x, w):
    return x.unfold(0, len(w), 1) @ w


x, w = torch.arange(5.0), torch.tensor([2.0, 3.0, 4.0])
print(convolve(x, w))
assert convolve(x, w).tolist() == [11, 20, 29]

# %% [markdown]
# ## Mapped over rows, and over devices
#
# One row for each of eight devices. The function is the same; the name of the transform says where it runs.

# %%
xs, ws = torch.arange(40.0).view(8, 5), w.expand(8, 3)
assert len(xs) == jax.local_device_count()
wanted = torch.stack([convolve(row, w) for row in xs])

by_vmap = ts.jax_vmap(convolve)(xs, ws)
by_pmap = ts.jax_pmap(convolve)(xs, ws)
assert by_vmap.tolist() == by_pmap.tolist() == wanted.tolist()
assert by_pmap[:2].tolist() == [[11, 20, 29], [56, 65, 74]]
assert by_pmap[-1].tolist() == [326, 335, 344]
print(by_pmap)
jax.debug.visualize_array_sharding(by_pmap.jax())

# %% [markdown]
# Results stay where they were made, and mapping them again moves nothing: here the second window of each row is the
# result of the first, and JAX is told to refuse any transfer between devices. (`jax_view` makes a JAX function of it,
# which does not even send a random key.)

# %%
convolve_arrays = ts.jax_view(ts.jax_pmap(convolve))
xs_there = ts.jax_view(ts.jax_pmap(torch.clone)(xs))
with jax.transfer_guard_device_to_device("disallow"):
    twice = ts.torch_view(convolve_arrays(xs_there, by_pmap.jax()))
assert twice.sharding.is_equivalent_to(by_pmap.sharding, 2)
assert twice[0].tolist() == [78, 138, 198]
assert twice[-1].tolist() == [36198, 37203, 38208]

# %% [markdown]
# An argument that is the same for all rows need not be repeated by hand.

# %%
assert ts.jax_pmap(convolve, in_axes=(0, None))(xs, w).tolist() == wanted.tolist()
assert ts.jax_vmap(convolve, in_axes=(0, None))(xs, w).tolist() == wanted.tolist()

# %% [markdown]
# ## Named axes
#
# A name for the mapped axis lets the function reach across it: `psum` adds up what all devices, or all rows, have. Each
# column of the result is divided by its sum.


# %%
def normalised_convolve(x, w, axis="rows"):
    y = convolve(x, w)
    return y / psum(y, axis)


by_devices = ts.jax_pmap(normalised_convolve, axis_name="rows", in_axes=(0, None))(xs, w)
by_rows = ts.jax_vmap(normalised_convolve, axis_name="rows", in_axes=(0, None))(xs, w)
for found in (by_devices.cpu(), by_rows.cpu()):
    torch.testing.assert_close(found, wanted / wanted.sum(0))
    torch.testing.assert_close(found.sum(0), torch.ones(3))
    torch.testing.assert_close(found[0], torch.tensor([0.00816024, 0.01408451, 0.019437]))

# %% [markdown]
# Maps nest, and each collective refers to the axis that it names: here rows of devices, and places on one device.

# %%
grid = torch.arange(24.0).view(8, 3) + 1


def shares(x):
    return torch.stack([x / psum(x, "rows"), x / psum(x, "places"), x / psum(x, ("rows", "places"))])


nested = ts.jax_pmap(ts.jax_vmap(shares, axis_name="places"), axis_name="rows")(grid).cpu()
by_column, by_row, by_all = nested.unbind(-1)
torch.testing.assert_close(by_column, grid / grid.sum(0))
torch.testing.assert_close(by_row, grid / grid.sum(1, keepdim=True))
torch.testing.assert_close(by_all, grid / grid.sum())
within = ts.jax_vmap(ts.jax_vmap(shares, axis_name="places"), axis_name="rows")(grid).cpu()
torch.testing.assert_close(within, nested)

# %% [markdown]
# Outside of any map there is no axis to name. The error says so, and who would bind it.

# %%
try:
    normalised_convolve(x, w)
    raise AssertionError("a collective ran outside of any map")
except NameError as error:
    print(error)
    message = str(error)
assert "'rows'" in message
assert all(adapter in message for adapter in ("jax_shard_map", "jax_pmap", "jax_vmap"))

# %% [markdown]
# ## Data-parallel linear regression
#
# Eight devices hold 16 points each of y = 2x - 1 + noise. Each computes the gradient on its own points; `pmean` makes
# the same mean gradient of them on all devices, and so their copies of the weights stay the same.

# %%
torch.manual_seed(3)
points = torch.randn(128)
targets = 2 * points - 1 + 0.5 * torch.randn(128)  # noise of variance 0.25


def loss_fn(weights, x, y):
    return F.mse_loss(weights["w"] * x + weights["b"], y)


@functools.partial(ts.jax_pmap, axis_name="devices", donate_argnums=0)
def update(weights, x, y):
    loss, grads = ts.jax_value_and_grad(loss_fn)(weights, x, y)
    grads = pmean(grads, "devices")
    return {name: weight - 0.005 * grads[name] for name, weight in weights.items()}, pmean(loss, "devices")


x_by_device, y_by_device = ts.jax_pmap(lambda x, y: (x.clone(), y.clone()))(points.view(8, 16), targets.view(8, 16))
weights = {"w": torch.zeros(8), "b": torch.zeros(8)}  # a copy for each device
for _ in range(1000):
    weights, loss = update(weights, x_by_device, y_by_device)

# %% [markdown]
# The replicas are equal to the bit, and the fit is that of eager torch on all points at once.

# %%
ts.assert_replica_integrity(weights, device_axis=True)
fitted = {name: replicas[0].cpu() for name, replicas in weights.items()}
print(fitted, "loss", loss[0].item())
assert abs(fitted["w"] - 2) < 0.1
assert abs(fitted["b"] + 1) < 0.1
assert abs(loss[0].cpu() - 0.25) < 0.1  # 128 points give the variance of the noise to an eighth of it (one sigma)

eager = {name: torch.zeros((), requires_grad=True) for name in weights}
optimizer = torch.optim.SGD(eager.values(), lr=0.005)
for _ in range(1000):
    optimizer.zero_grad()
    loss_fn(eager, points, targets).backward()
    optimizer.step()
for name, value in fitted.items():
    torch.testing.assert_close(value, eager[name].detach(), rtol=1e-4, atol=1e-5)  # a thousand roundings of float32

# %%
figure, axes = plt.subplots()
axes.scatter(points, targets, s=8, label="y = 2x - 1 + noise")
ends = torch.stack([points.min(), points.max()])
axes.plot(ends, fitted["w"] * ends + fitted["b"], color="C1", label=f"{fitted['w']:.2f}x - {-fitted['b']:.2f}")
axes.legend()
figure.savefig("linear_regression.png")
plt.show()
assert loss[0].cpu() <= F.mse_loss(2 * points - 1, targets)  # the line fits the points better than the truth does
