"""What the fast lowerings gain.

Each is value and gradient of one function of torch against the same function written in plain torch operators; both
sides go through the same capture, and must agree before they are timed. Times are of sides run in turn in this one
process; compiling counts the capture. Bytes are XLA's own count of temporary memory.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from benchmarks.rows import Row, timed
from benchmarks.timing import round_robin, seconds

Fn = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """Two ways to write a function; gradients are those of the floating-point arguments.

    Attributes:
        name: What is measured.
        ours: Through the fast lowering.
        plain: In plain torch operators.
        args: Of both.
        specs: How each argument is split on a mesh of 4 by 2, for cases that are about a mesh.
    """

    name: str
    ours: Fn
    plain: Fn
    args: tuple[torch.Tensor, ...]
    specs: tuple[P, ...] | None = None


# ---- the same in plain operators -------------------------------------------------------------------------------


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    mask = torch.ones(q.shape[2], k.shape[2]).tril().bool() if mask is None else mask
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1) @ v


def plain_lstm(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h = c = x.new_zeros(x.shape[1], w_hh.shape[1])
    steps = []
    for x_t in x:
        i, f, g, o = (x_t @ w_ih.T + h @ w_hh.T + bias).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        steps.append(h)
    return torch.stack(steps)


def plain_gru(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h, steps = x.new_zeros(x.shape[1], w_hh.shape[1]), []
    for x_t in x:
        given, own = (x_t @ w_ih.T + bias).chunk(3, -1), (h @ w_hh.T).chunk(3, -1)
        r, z = (given[0] + own[0]).sigmoid(), (given[1] + own[1]).sigmoid()
        n = (given[2] + r * own[2]).tanh()
        h = (1 - z) * n + z * h
        steps.append(h)
    return torch.stack(steps)


def plain_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(logits * 1, -1).gather(-1, target[:, None]).mean()


def plain_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """By the matrix of all windows."""
    windows = F.unfold(x, weight.shape[2:], padding=1)
    return (weight.flatten(1) @ windows).view(len(x), -1, *x.shape[2:]) + bias[:, None, None]


def plain_experts(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Each row with a copy of its expert's matrix."""
    return torch.bmm(x[:, None], weight[expert])[:, 0]


def plain_embedding(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return (tokens[..., None] == torch.arange(table.shape[0])).to(table.dtype) @ table


# ---- through the fast lowerings --------------------------------------------------------------------------------


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def lstm(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(1, x.shape[1], w_hh.shape[1])
    weights = [w_ih, w_hh, bias, torch.zeros_like(bias)]
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, False)[0]


def gru(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(1, x.shape[1], w_hh.shape[1])
    return torch.gru(x, state, [w_ih, w_hh, bias, torch.zeros_like(bias)], True, 1, 0.0, True, False, False)[0]


def grouped(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Rows arrive sorted by expert."""
    counts = (expert[:, None] == torch.arange(len(weight))).sum(0)
    return F.grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))


def cases(quick: bool) -> Iterator[Case]:
    """All of them; a quick run takes small sizes."""
    scale = 4 if quick else 1
    randn = torch.randn

    for length in (256 // scale, 512 // scale, 1024 // scale):
        yield Case(f"attention, causal, {length}", causal, plain_attention, (randn(2, 4, length, 32),) * 3)
    length = 512 // scale
    q, kv, mask = randn(2, 8, length, 32), randn(2, 2, length, 32), torch.rand(length, length).tril().bool()
    yield Case(f"attention, causal, grouped, {length}", causal, plain_attention, (q, kv, kv))
    masked = F.scaled_dot_product_attention
    mask[:, 0] = True  # no row without a key: there the plain form is NaN
    yield Case(f"attention, bool mask, {length}", masked, plain_attention, (q, q, q, mask))
    for length in (8,) if quick else (8, 32):  # the plain form takes a second to compile for each step
        weights = [randn(4 * 64, 32) / 6, randn(4 * 64, 64) / 8, randn(4 * 64)]
        yield Case(f"LSTM, {length} steps", lstm, plain_lstm, (randn(length, 16, 32), *weights))
        weights = [w[: 3 * 64] for w in weights]
        yield Case(f"GRU, {length} steps", gru, plain_gru, (randn(length, 16, 32), *weights))
    x, weight, bias = randn(4096 // scale, 256), torch.linspace(0.5, 1.5, 256), randn(256)
    yield Case("layer_norm", lambda x, w, b: F.layer_norm(x, (256,), w, b), plain_layer_norm, (x, weight, bias))
    yield Case("rms_norm", lambda x, w: F.rms_norm(x, (256,), w, 1e-5), plain_rms_norm, (x, weight))
    logits, target = randn(1024 // scale, 8192), torch.randint(0, 8192, (1024 // scale,))
    yield Case("cross_entropy, 8192 classes", F.cross_entropy, plain_cross_entropy, (logits, target))
    image, kernel = randn(8, 32, 64 // scale, 64 // scale), randn(64, 32, 3, 3) / 17
    yield Case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), plain_conv, (image, kernel, randn(64)))
    rows, experts = randn(1024 // scale, 128), randn(8, 128, 128) / 11
    expert = torch.randint(0, 8, (1024 // scale,)).sort().values
    yield Case("grouped_mm, 8 experts", grouped, plain_experts, (rows, experts, expert))
    table, tokens = randn(8192, 64), torch.randint(0, 8192, (16, 64))
    split = (P("model"), P("batch"))
    yield Case("embedding, vocabulary split", lambda w, t: F.embedding(t, w), plain_embedding, (table, tokens), split)


# ---- measuring -------------------------------------------------------------------------------------------------


def compiled(fn: Fn, case: Case) -> tuple[Callable[[], Any], float, int]:
    """A call of value and gradients, with the seconds to compile it and its temporary bytes."""
    inexact = tuple(i for i, x in enumerate(case.args) if x.is_floating_point())

    def scalar(*args: torch.Tensor) -> torch.Tensor:
        out = fn(*args)
        return (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum()

    args, options = ts.jax_view(ts.torch_view(case.args)), {}
    args = jax.tree.map(lambda x: jax.numpy.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x, args)
    if case.specs is not None:
        shardings = tuple(NamedSharding(ts.make_mesh(batch=4, model=2), spec) for spec in case.specs)
        args = jax.device_put(args, shardings)
        options = {"out_shardings": (None, tuple(shardings[i] for i in inexact))}
    jitted = jax.jit(ts.jax_view(ts.jax_value_and_grad(scalar, argnums=inexact)), **options)
    programs: list[Any] = []
    took = seconds(lambda: programs.append(jitted.lower(*args).compile()))
    program = programs[0]
    return lambda: jax.block_until_ready(program(*args)), took, program.memory_analysis().temp_size_in_bytes


def measured(case: Case, rounds: int) -> Row:
    """Both sides, once they agree."""
    (ours, ours_s, ours_bytes), (plain, plain_s, plain_bytes) = (compiled(f, case) for f in (case.ours, case.plain))
    for found, wanted in zip(jax.tree.leaves(ours()), jax.tree.leaves(plain()), strict=True):
        largest = np.abs(wanted).max(initial=0)  # float32, sums in another order
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * largest, err_msg=case.name)
    times = round_robin({"ours": ours, "plain": plain}, rounds)
    note = f"temporary {ours_bytes / 1e6:.1f} : {plain_bytes / 1e6:.1f} MB, compiled in {ours_s:.1f} : {plain_s:.1f} s"
    return timed(f"{case.name} ÷ plain operators", times["ours"], times["plain"], note=note)


def rows(quick: bool) -> Iterator[Row]:
    """Value and gradient of each case, ours over plain operators."""
    torch.manual_seed(0)
    for case in cases(quick):
        yield measured(case, 3 if quick else 15)
