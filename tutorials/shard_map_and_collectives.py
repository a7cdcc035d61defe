# %% [markdown]
# # One device's part: `jax_shard_map` and collectives, from torch
#
# When computation follows data, the compiler decides what moves. Here you decide: a torch function is written for what
# *one device* holds, and says by name what it wants from the others. That is all that Megatron's layers are, and two of
# them follow below, equal to the plain layers in value and in gradient.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.

# %%
import functools

import jax

jax.config.update("jax_num_cpu_devices", 8)

import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    fold_in_axis,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)

torch.manual_seed(0)
mesh = ts.make_mesh(i=4, j=2)

# %% [markdown]
# ## What a device sees
#
# `in_specs` say how each argument is cut, `out_specs` how the pieces of the result fit together. The arguments need not
# be placed before: ordinary CPU tensors work. A spec names, for each dim, the mesh axis that splits it; an axis that
# it does not name holds copies.

# %%
x, w, b = torch.randn(192, 64), torch.randn(64, 128), torch.randn(128)
seen = []


@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=(P("i", None), P(None, "j"), P("j")), out_specs=P("i", "j"))
def affine(x, w, b):
    seen.append((tuple(x.shape), tuple(w.shape), tuple(b.shape)))
    return x @ w + b


y = affine(x, w, b)
jax.debug.visualize_array_sharding(y.jax())
assert seen[0] == ((48, 64), (64, 64), (64,))
assert y.shape == (192, 128)
assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("i", "j")), 2)
torch.testing.assert_close(y.cpu(), x @ w + b, rtol=1e-5, atol=1e-4)

# %% [markdown]
# ## Sums, means, extremes
#
# A row that is split over devices has a mean that no device knows alone. `pmean` averages over the devices of an axis,
# `psum`, `pmax` and `pmin` do the same, and the result is the same on all of them.


# %%
@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))
def normalise(x):
    centred = x - pmean(x.mean(1, keepdim=True), "j")
    return centred / pmean(centred.square().mean(1, keepdim=True), "j").sqrt()


rows = normalise(3 * x + 2).cpu()
torch.testing.assert_close(rows.mean(1), torch.zeros(192), rtol=0, atol=1e-6)
torch.testing.assert_close(rows.std(1, correction=0), torch.ones(192))


@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=P("i", "j"), out_specs=P())
def summary(x):
    both = ("i", "j")
    return {"sum": psum(x.sum(), both), "largest": pmax(x.amax(), both), "smallest": pmin(x.amin(), both)}


for name, found in summary(x).items():
    wanted = {"sum": x.sum(), "largest": x.amax(), "smallest": x.amin()}[name]
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-4)

# %% [markdown]
# ## Gather and scatter
#
# Weights that are stored in pieces can be put together where they are needed: `all_gather` concatenates along a dim.
# Each device holds 16 rows of `w`, and multiplies by all 64.


# %%
@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
def multiply(x, w_local):
    assert w_local.shape == (16, 128)
    w = all_gather(w_local, "i", dim=0)
    assert w.shape == (64, 128)
    return x @ w


# The pieces are the same numbers, so whole numbers give the plain product to the bit.
whole_x, whole_w = torch.randint(-9, 9, (192, 64)).float(), torch.randint(-9, 9, (64, 128)).float()
assert torch.equal(multiply(whole_x, whole_w).cpu(), whole_x @ whole_w)

# %% [markdown]
# `psum_scatter` is its mirror: a sum over devices of which each keeps its part. `ppermute` passes tensors on, here
# round robin. `all_to_all` turns what is split by rows into what is split by columns.

# %%
line = ts.make_mesh(jax.devices()[:4], i=4)
on_line = functools.partial(ts.jax_shard_map, mesh=line, in_specs=P("i"), out_specs=P("i"))

digits = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 1, 2]])
column_sums = on_line(lambda row: psum_scatter(row[0], "i"))(digits)
jax.debug.visualize_array_sharding(column_sums.jax())
assert column_sums.tolist() == [22, 20, 12, 17]

turned = on_line(lambda x: ppermute(x, "i", [(k, (k + 1) % axis_size("i")) for k in range(axis_size("i"))]))(
    torch.arange(4)
)
assert turned.tolist() == [3, 0, 1, 2]

columns = on_line(lambda row: all_to_all(row, "i", split_dim=1, concat_dim=0).T)(digits)
assert torch.equal(columns.cpu(), digits.T)

# %% [markdown]
# ## Who am I?


# %%
@ts.jax_jit
@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=(), out_specs=P("i", "j"))
def places():
    return torch.stack([axis_index("i"), axis_index("j")]).view(1, 1, 2)


print(places().tolist())
assert places().flatten(0, 1).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1]]

# %% [markdown]
# ## Random numbers
#
# All devices draw the same numbers, unless you say along which axis they shall differ: `fold_in_axes` for the whole
# function, `with fold_in_axis(...)` for a part of it, `fold_in_axis(key, axis)` for a key of your own. Along the other
# axes they go on to agree, as copies of one activation must.


# %%
def count_streams(draws):
    """How many different rows of numbers there are along i, and along j."""
    return len(draws[:, 0].unique(dim=0)), len(draws[0, :].unique(dim=0))


dropout = nn.Dropout(0.5)


def draw(x):
    return torch.rand(1, 1, 16), dropout(x.new_ones(1, 1, 64))


@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=P(), out_specs=P("i", "j"))
def draw_apart_in_part(x):
    with fold_in_axis("i"):
        apart = torch.rand(1, 1, 16)
    return apart, torch.rand(1, 1, 16)


@functools.partial(ts.jax_shard_map, mesh=mesh, in_specs=P(), out_specs=P("i", "j"))
def keys(key):
    return fold_in_axis(key, "i").long().view(1, 1, 2)


specs = {"mesh": mesh, "in_specs": P(), "out_specs": P("i", "j")}
zero = torch.zeros(())
for values in ts.jax_shard_map(draw, **specs)(zero):
    assert count_streams(values.cpu()) == (1, 1)
for values in ts.jax_shard_map(draw, fold_in_axes="i", **specs)(zero):
    assert count_streams(values.cpu()) == (4, 1)
for values in ts.jax_shard_map(draw, fold_in_axes=("i", "j"), **specs)(zero):
    assert count_streams(values.cpu()) == (4, 2)
apart, alike = draw_apart_in_part(zero)
assert count_streams(apart.cpu()) == (4, 1)
assert count_streams(alike.cpu()) == (1, 1)
key = ts.torch_view(jax.random.key_data(jax.random.key(7)))
assert count_streams(keys(key).cpu()) == (4, 1)

# %% [markdown]
# ## A tensor-parallel MLP
#
# Megatron's: the first layer is split by its output (columns), the second by its input (rows), so that the
# activation between never moves, and one `psum` at the end makes up the product. The bias that belongs to the whole sum
# is added once, after it.
#
# Shapes: B batch, D width, F hidden, of which a device holds a part.


# %%
def parallel_mlp(x_BD, up_FD, up_F, down_DF, down_D):
    hidden_BF = F.gelu(F.linear(x_BD, up_FD, up_F))
    return psum(F.linear(hidden_BF, down_DF), "model") + down_D


def plain_mlp(x_BD, up_FD, up_F, down_DF, down_D):
    return F.linear(F.gelu(F.linear(x_BD, up_FD, up_F)), down_DF, down_D)


MLP_SPECS = (P("batch"), P("model"), P("model"), P(None, "model"), P())

# %% [markdown]
# ## Cross entropy over a vocabulary that no device holds
#
# The logits of a language model are its largest tensor. Split by vocabulary they need never meet: the cross entropy of
# a row is the logarithm of a sum of exponentials, less one logit. The largest logit (`pmax`, for the sake of the
# exponentials; it cancels, so it needs no gradient), the sum and the logit that was asked for are each one number a
# row. A target that lives on another device is masked here, and picked there.
#
# Shapes: V vocabulary, of which a device holds a part.


# %%
def parallel_cross_entropy(x_BD, head_VD, target_B):
    logits_BV = F.linear(x_BD, head_VD)
    largest_B = pmax(logits_BV.detach().amax(1), "model")
    shifted_BV = logits_BV - largest_B[:, None]

    index_B = target_B - axis_index("model") * head_VD.shape[0]
    is_mine_B = (index_B >= 0) & (index_B < head_VD.shape[0])
    picked_B = shifted_BV.gather(1, torch.where(is_mine_B, index_B, 0)[:, None])[:, 0]

    total_B, picked_B = psum((shifted_BV.exp().sum(1), torch.where(is_mine_B, picked_B, 0)), "model")
    return pmean((total_B.log() - picked_B).mean(), "batch")


def plain_cross_entropy(x_BD, head_VD, target_B):
    return F.cross_entropy(F.linear(x_BD, head_VD), target_B)


# %% [markdown]
# Put together, a small language model's last layers. The gradient goes through every collective, and is the gradient of
# the plain program: nothing has to be averaged or corrected afterwards.


# %%
def parallel_loss(x, mlp, head, target):
    return parallel_cross_entropy(x + parallel_mlp(x, *mlp), head, target)


def plain_loss(x, mlp, head, target):
    return plain_cross_entropy(x + plain_mlp(x, *mlp), head, target)


B, D, HIDDEN, V = 16, 32, 64, 104
x, head, target = torch.randn(B, D), torch.randn(V, D) / 6, torch.randint(0, V, (B,))
mlp = (torch.randn(HIDDEN, D) / 6, torch.randn(HIDDEN), torch.randn(D, HIDDEN) / 8, torch.randn(D))

leaves = [t.requires_grad_() for t in (x, *mlp, head)]
wanted = plain_loss(x, mlp, head, target)
wanted_grads = torch.autograd.grad(wanted, leaves)
leaves = [t.requires_grad_(False) for t in leaves]

for sizes in [{"batch": 4, "model": 2}, {"batch": 2, "model": 4}, {"model": 8, "batch": 1}]:
    mesh = ts.make_mesh(**sizes)
    loss_fn = ts.jax_shard_map(
        parallel_loss, mesh=mesh, in_specs=(P("batch"), MLP_SPECS[1:], P("model"), P("batch")), out_specs=P()
    )
    loss, grads = ts.jax_jit(ts.jax_value_and_grad(loss_fn, argnums=(0, 1, 2)))(x, mlp, head, target)
    torch.testing.assert_close(loss.cpu(), wanted.detach())
    found_grads = (grads[0], *grads[1], grads[2])
    for found, grad in zip(found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(found.cpu(), grad, rtol=1e-4, atol=1e-6)  # float32, sums in another order
    assert grads[2].sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    print(sizes, float(loss))
jax.debug.visualize_array_sharding(grads[2].jax())

# %% [markdown]
# The compiled program says what it communicates. Nowhere are logits gathered: no `all-gather` is in it.

# %%
program = jax.jit(ts.jax_view(ts.jax_value_and_grad(loss_fn, argnums=(0, 1, 2))))
text = program.lower(*ts.jax_view((x, mlp, head, target))).compile().as_text()
assert " all-reduce(" in text
assert " all-gather(" not in text
