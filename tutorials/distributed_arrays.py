# %% [markdown]
# # Distributed arrays, from torch
#
# A torch tensor on the `jax` device is a `jax.Array` that torch sees as its own tensor. An array can be spread over
# many devices, and computation follows the data: that is all that data and tensor parallelism need. This tutorial goes
# from one tensor to a model that trains on eight devices, four ways by batch and two ways by layer.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
from itertools import pairwise

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

# %% [markdown]
# ## Tensors and arrays are one thing
#
# `device="jax"` makes a tensor that lives in an array. `.jax()` gives the array, `torch_view` goes the other way, and
# neither copies.

# %%
x = torch.randn((2048, 2048), device="jax")
assert isinstance(x.jax(), jax.Array)
assert ts.torch_view(x.jax()).jax() is x.jax()

# %% [markdown]
# Any JAX function applies to a tensor, also in place. `jax.device_put` spreads the tensor over a mesh of devices: here
# two by four, with axes named `x` and `y`.

# %%
mesh = ts.make_mesh(x=4, y=2)
y = x.apply_jax(jax.device_put, NamedSharding(mesh, P("x", "y")))
jax.debug.visualize_array_sharding(y.jax())

x.apply_jax_(jax.device_put, NamedSharding(mesh, P("x", "y")))
assert x.sharding == y.sharding

put = ts.torch_view(jax.device_put)  # a JAX function over pytrees as a torch function
pair = put({"a": y, "b": [y]}, NamedSharding(mesh, P("y", "x")))
jax.debug.visualize_array_sharding(pair["b"][0].jax())

# %% [markdown]
# ## A spec names, for each dim, the mesh axis that splits it
#
# None leaves a dim whole, a pair of axes splits one dim by both, and an axis that is not named holds copies.


# %%
def shards(spec):
    """The slice of the first device, and how many different slices there are."""
    array = x.apply_jax(jax.device_put, NamedSharding(ab, spec)).jax()
    jax.debug.visualize_array_sharding(array)
    return array.sharding.shard_shape(array.shape), len({str(s.index) for s in array.addressable_shards})


x = torch.randn((64, 32), device="jax")
ab = ts.make_mesh(a=4, b=2)
assert shards(P("a", None)) == ((16, 32), 4)
assert shards(P(None, "b")) == ((64, 16), 2)
assert shards(P(None, "a")) == ((64, 8), 4)
assert shards(P(("a", "b"), None)) == ((8, 32), 8)
assert shards(P("a", "b")) == ((16, 16), 8)
assert shards(P()) == ((64, 32), 1)

# %% [markdown]
# ## Computation follows data
#
# Elementwise operators keep the layout of their input. A product of rows split by `a` with columns split by `b` is
# split by both. No operator had to be told.

# %%
rows = torch.randn((64, 32), device="jax").shard_(NamedSharding(ab, P("a", None)))
columns = torch.randn((32, 64), device="jax").shard_(NamedSharding(ab, P(None, "b")))

wave = (2 * rows.sin()).add(1)
assert wave.sharding.is_equivalent_to(rows.sharding, 2)
product = rows @ columns
jax.debug.visualize_array_sharding(product.jax())
assert product.sharding.is_equivalent_to(NamedSharding(ab, P("a", "b")), 2)
torch.testing.assert_close(product.cpu(), rows.cpu() @ columns.cpu(), rtol=1e-4, atol=1e-4)
assert rows.clone().sharding == rows.sharding

# %% [markdown]
# Tensors that were put on different devices do not mix; JAX says which is where. The same devices in another order are
# different too. What was put nowhere in particular, like `torch.arange`, goes wherever it is needed.

# %%
first, second = (x.apply_jax(jax.device_put, SingleDeviceSharding(d)) for d in jax.devices()[:2])
shuffled = Mesh(ab.devices[::-1], ab.axis_names)
for other in (second, rows.apply_jax(jax.device_put, NamedSharding(shuffled, P("a", None)))):
    try:
        (rows if other is not second else first) + other
        raise AssertionError("tensors on different devices were added")
    except ValueError as error:
        print(str(error).splitlines()[0])
        assert "incompatible devices" in str(error)
assert (rows + torch.ones_like(x) + torch.arange(32, device="jax")).sharding.is_equivalent_to(rows.sharding, 2)

# %% [markdown]
# Inside a compiled function a layout is a constraint: `shard_` asks for it, in place or as an expression.


# %%
@ts.jax_jit
def transposed_layout(x):
    y = x.sin().shard_(NamedSharding(ab, P("b", "a")))
    y.add_(1).shard_(NamedSharding(ab, P("b", "a")))
    return y, (2 * x).shard_(NamedSharding(ab, P()))


flipped, whole = transposed_layout(rows)
assert flipped.sharding.is_equivalent_to(NamedSharding(ab, P("b", "a")), 2)
assert whole.sharding.is_fully_replicated

# %% [markdown]
# ## A neural network
#
# An ordinary module, moved with `.to("jax")`. Its `state_dict` is a pytree of tensors, `torch.func.functional_call`
# runs it as a function of that tree, and JAX's transforms take that function.


# %%
class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


SIZES, BATCH = [784, 1024, 1024, 1024, 10], 128
torch.manual_seed(0)
model = MLP(SIZES)
inputs, targets = torch.randn(BATCH, SIZES[0]), torch.randn(BATCH, SIZES[-1])
eager = F.mse_loss(model(inputs), targets)
model.to("jax")


def loss_fn(weights, inputs, targets):
    return F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), targets)


weights = {name: w.detach() for name, w in model.state_dict().items()}
value_and_grad = ts.jax_jit(ts.jax_value_and_grad(loss_fn))
loss, grads = value_and_grad(weights, inputs, targets)
torch.testing.assert_close(loss.cpu(), eager.detach())

# %% [markdown]
# ## Eight-way data parallel
#
# Split the batch, replicate the weights, and train with optax. The loop is the same as on one device: the layout of the
# data is the only difference.


# %%
def train(weights, inputs, targets, num_steps=5):
    optimizer = optax.sgd(0.5)
    opt_state = ts.call_jax(optimizer.init, weights)
    losses = []
    for _ in range(num_steps):
        loss, grads = value_and_grad(weights, inputs, targets)
        updates, opt_state = ts.call_jax(optimizer.update, grads, opt_state, weights)
        weights = ts.call_jax(optax.apply_updates, weights, updates)
        losses.append(loss.item())
    return weights, losses


batch_mesh = ts.make_mesh(batch=8)
split, replicated = NamedSharding(batch_mesh, P("batch")), NamedSharding(batch_mesh, P())
_, alone = train(weights, inputs, targets)
_, by_eight = train(put(weights, replicated), put(inputs, split), put(targets, split))
print("one device:   ", alone)
print("eight devices:", by_eight)
assert all(later < earlier for earlier, later in pairwise(by_eight))
torch.testing.assert_close(torch.tensor(by_eight), torch.tensor(alone), rtol=1e-4, atol=0)

# %% [markdown]
# ## Four-way data parallel, two-way tensor parallel
#
# Now the layers are split too. A *column-parallel* layer splits its output features, and the *row-parallel* layer after
# it splits its input features, so that nothing has to move between the two. A plan says so by parameter name.

# %%
mesh = ts.make_mesh(batch=4, model=2)
plan = ts.ShardingPlan(
    {
        "layers.1.weight": P("model", None),
        "layers.1.bias": P("model"),
        "layers.2.weight": P(None, "model"),
    },
    default=P(),
)
print(plan.resolve(model, mesh))

# %% [markdown]
# `make_train_step` makes loss, gradients and update one program, compiled once; the state keeps its layout and its
# memory from step to step. The loss function is plain torch.


# %%
def plain_loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


step = ts.make_train_step(model, plain_loss, optax.sgd(0.5), mesh=mesh, plan=plan)
state = step.init(seed=0)
losses = []
for _ in range(5):
    state, metrics = step(state, (inputs, targets))
    losses.append(float(metrics["loss"]))
print("four by two:  ", losses)
jax.debug.visualize_array_sharding(state.params["layers.1.weight"])
jax.debug.visualize_array_sharding(state.params["layers.2.weight"])

# %% [markdown]
# The same losses as before, the layouts as planned, and one compilation.

# %%
torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-4, atol=0)
assert state.params["layers.1.weight"].sharding.is_equivalent_to(NamedSharding(mesh, P("model", None)), 2)
assert state.params["layers.2.weight"].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
assert step.num_compiles == 1
trained = step.export(state)  # an ordinary module again
assert F.mse_loss(trained(inputs), targets) < eager
