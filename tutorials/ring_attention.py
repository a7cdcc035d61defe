# %% [markdown]
# # Ring attention: a sequence longer than one device, from torch
#
# Attention needs every key for every query. When the sequence is split over devices, no device has every key, and
# gathering them would cost the memory that the split was for. Ring attention passes them on instead: each device keeps
# its queries, attends to the block of keys that it holds, sends the block to its neighbour and gets another, until
# all blocks have come by. A running maximum and a running sum make one softmax of the pieces.
#
# It simulates eight devices on the CPU. On a machine with accelerators, leave the first line out.
#
# Shapes: N batch, H heads, T the device's part of the sequence, S the part of the keys that is visiting, E width of a
# head.

# %%
import functools
import math

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard.collectives import all_gather, axis_index, axis_size, ppermute, psum

# %% [markdown]
# ## The function
#
# The maximum is there for the sake of the exponentials only: it cancels, and needs no gradient. In causal attention the
# first block is the device's own, whose diagonal is always allowed, so that the maximum is finite from then on.


# %%
def pass_on(*blocks):
    size = axis_size("seq")
    return ppermute(blocks, "seq", [(d, (d + 1) % size) for d in range(size)])


def scores(q_NHTE, k_NHSE, hop, is_causal):
    """Against the block of keys that began its way `hop` devices before this one."""
    scores_NHTS = q_NHTE @ k_NHSE.mT / math.sqrt(q_NHTE.shape[-1])
    if not is_causal:
        return scores_NHTS
    here, length = axis_index("seq"), q_NHTE.shape[2]
    first_key = (here - hop) % axis_size("seq") * length
    is_later_TS = first_key + torch.arange(length) > (here * length + torch.arange(length))[:, None]
    return scores_NHTS.masked_fill(is_later_TS, -math.inf)


def ring_attention(q_NHTE, k_NHSE, v_NHSE, is_causal=False):
    best_NHT1 = q_NHTE.new_full((*q_NHTE.shape[:3], 1), -math.inf)
    total_NHT1 = torch.zeros_like(best_NHT1)
    out_NHTE = torch.zeros_like(q_NHTE)
    for hop in range(axis_size("seq")):
        if hop > 0:
            k_NHSE, v_NHSE = pass_on(k_NHSE, v_NHSE)
        scores_NHTS = scores(q_NHTE, k_NHSE, hop, is_causal)
        best_before, best_NHT1 = best_NHT1, torch.maximum(best_NHT1, scores_NHTS.detach().amax(-1, keepdim=True))
        shrink_NHT1 = (best_before - best_NHT1).exp()
        weights_NHTS = (scores_NHTS - best_NHT1).exp()
        total_NHT1 = total_NHT1 * shrink_NHT1 + weights_NHTS.sum(-1, keepdim=True)
        out_NHTE = out_NHTE * shrink_NHT1 + weights_NHTS @ v_NHSE
    return out_NHTE / total_NHT1


# %% [markdown]
# ## Equal to attention, with all its gradients
#
# In the sum that is differentiated, each element of the result has a weight of its own, so that no two are confused.

# %%
SPEC = P("batch", None, "seq")


def gradients_of(attention, mesh, is_causal):
    """A function that gives the gradients of a loss by q, k and v, and the result."""

    def loss_fn(q, k, v, weights):
        out = attention(q, k, v, is_causal)
        return psum((out * weights).sum(), ("batch", "seq")), out

    mapped = ts.jax_shard_map(loss_fn, mesh=mesh, in_specs=SPEC, out_specs=(P(), SPEC))
    return ts.jax_grad(mapped, (0, 1, 2), has_aux=True)


def assert_equals_attention(gradients, is_causal, q, k, v, weights):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), leaves)
    grads, out = ts.jax_jit(gradients)(q, k, v, weights)
    for mine, eager in zip((out, *grads), (wanted.detach(), *wanted_grads), strict=True):
        torch.testing.assert_close(mine.cpu(), eager, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    return out


torch.manual_seed(0)
inputs = torch.randn(4, 4, 2, 512, 16).unbind()
mixed = ts.make_mesh(batch=2, seq=4)
out = assert_equals_attention(gradients_of(ring_attention, mixed, True), True, *inputs)
print(out.jax().sharding)

# %% [markdown]
# ## In a model
#
# `jax_shard_map` can stand anywhere in a model: around it the compiler shards as the plan says, within it the function
# does. The same small language model is trained with torch's attention and with the ring, tokens split by batch and by
# sequence, and gives the same losses.


# %%
class Block(nn.Module):
    def __init__(self, width, num_heads, attend):
        super().__init__()
        self.num_heads, self.attend = num_heads, attend
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_NTD):
        q, k, v = self.qkv(self.norm(x_NTD)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return x_NTD + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def train(attend, mesh, tokens):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 32), Block(32, 4, attend), nn.Linear(32, 50))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

    plan = ts.ShardingPlan({}, default=P())
    step = ts.make_train_step(model, loss_fn, optax.adam(1e-2), mesh=mesh, plan=plan, batch_spec=P("batch", "seq"))
    state, losses = step.init(seed=0), []
    for _ in range(5):
        state, metrics = step(state, {"tokens": tokens[:, :-1], "next": tokens[:, 1:]})
        losses.append(float(metrics["loss"]))
    return torch.tensor(losses)


tokens = torch.randint(0, 50, (4, 65))
causal_ring = functools.partial(ring_attention, is_causal=True)
pairs = ts.make_mesh(batch=4, seq=2)
by_ring = train(ts.jax_shard_map(causal_ring, mesh=pairs, in_specs=SPEC, out_specs=SPEC), pairs, tokens)
by_torch = train(functools.partial(F.scaled_dot_product_attention, is_causal=True), pairs, tokens)
print(by_ring)
torch.testing.assert_close(by_ring, by_torch, rtol=1e-4, atol=0)

# %% [markdown]
# ## What a device holds
#
# No program above has an `all-gather`: keys only ever come one block at a time. That is not the whole truth about
# memory, however. The loop over hops is unrolled, and a compiler that may run hops side by side may also hold their
# blocks side by side; and what autograd keeps for the backward pass is every block and every weight that came by. The
# gradient then needs nearly as much as if the keys had been gathered.
#
# For sequences that are long in earnest, the hops are a loop of the compiled program: JAX has one, and `jax_view` lets
# it take a torch function. And the backward pass goes around the ring once more: from the logarithm of the sum, which
# is one number for each query, it computes the weights again, and the gradients of a block travel with it. That is a
# `torch.autograd.Function` as one would write it for torch.


# %%
def loop(start, stop, body, carry):
    return ts.call_jax(jax.lax.fori_loop, start, stop, ts.jax_view(body), carry)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        def hop(index, carry):
            out, before, k, v = carry
            k, v = pass_on(k, v)
            scores_NHTS = scores(q, k, index, is_causal)
            log_sum = torch.logaddexp(before, scores_NHTS.logsumexp(-1, keepdim=True))
            return out * (before - log_sum).exp() + (scores_NHTS - log_sum).exp() @ v, log_sum, k, v

        scores_NHTS = scores(q, k, 0, is_causal)
        own = scores_NHTS.softmax(-1) @ v, scores_NHTS.logsumexp(-1, keepdim=True), k, v
        out, log_sum, _, _ = loop(1, axis_size("seq"), hop, own)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sum = ctx.saved_tensors
        shift = (grad * out).sum(-1, keepdim=True)

        def hop(index, carry):
            grad_q, grad_k, grad_v, k, v = carry
            weights = (scores(q, k, index, ctx.is_causal) - log_sum).exp()
            by_scores = weights * (grad @ v.mT - shift) / math.sqrt(q.shape[-1])
            to_pass = grad_k + by_scores.mT @ q, grad_v + weights.mT @ grad, k, v
            return grad_q + by_scores @ k, *pass_on(*to_pass)

        zeros = 0 * q, 0 * k, 0 * v  # made of what varies over the devices, as what the loop carries must
        grad_q, grad_k, grad_v, _, _ = loop(0, axis_size("seq"), hop, (*zeros, k, v))
        return grad_q, grad_k, grad_v, None


def gathered_attention(q, k, v, is_causal):
    """What the ring is there to avoid."""
    return F.scaled_dot_product_attention(q, *all_gather((k, v), "seq", dim=2))


# %% [markdown]
# The result is checked as above, on a ring of all eight devices. Then the compiler is asked what each program needs on
# a device, besides arguments and results.


# %%
long = ts.make_mesh(batch=1, seq=8)


def compile_for_shards(gradients):
    blocks = (jax.ShapeDtypeStruct(x.shape, "float32", sharding=NamedSharding(long, SPEC)) for x in inputs)
    return jax.jit(ts.jax_view(gradients)).lower(*blocks).compile()


in_a_loop = gradients_of(RingAttention.apply, long, False)
assert_equals_attention(in_a_loop, False, *inputs)

gathered = compile_for_shards(gradients_of(gathered_attention, long, False))
unrolled = gradients_of(ring_attention, long, False)
rings = {"unrolled": compile_for_shards(unrolled), "in a loop": compile_for_shards(in_a_loop)}
assert " all-gather(" in gathered.as_text()
assert not any(" all-gather(" in ring.as_text() for ring in rings.values())

needed = {name: x.memory_analysis().temp_size_in_bytes for name, x in {"gathered": gathered, **rings}.items()}
for name, num_bytes in needed.items():
    print(f"{name}: {num_bytes / 2**20:.1f} MiB")
assert needed["in a loop"] < min(needed["unrolled"], needed["gathered"]) / 4
