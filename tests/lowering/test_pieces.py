"""Values in pieces through captured graphs: eager torch's numbers, and no move between devices for a cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from torch_shard._capture import Spec
from torch_shard._common.fx import outputs_of
from torch_shard._common.pieces import InPieces, whole
from torch_shard._lowering import Program, lower, mark_pieces

B, T, D, H = 8, 4, 16, 4


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.reshape(B, T, H, -1).transpose(1, 2) for part in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _chunk(x, w, b):
    return _attend(*torch.nn.functional.linear(x, w, b).chunk(3, -1))


def _slices(x, w, b):
    y = torch.nn.functional.linear(x, w) + b
    return _attend(y[..., :D], y[..., D : 2 * D].tanh(), y[..., 2 * D :])


def _unbind(x, w, b):
    q, k, v = torch.nn.functional.linear(x, w, b).view(B, T, 3, H, -1).unbind(2)
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _permuted(x, w, b):
    qkv = torch.nn.functional.linear(x, w, b).reshape(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])


def _heads(x, w, b):
    y = torch.nn.functional.linear(x, w, b).view(B, T, 3 * H, -1).transpose(1, 2)
    q, k, v = y.chunk(3, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _conv1d(x, w, b):
    y = torch.addmm(b, x.view(-1, D), w).view(B, T, 3 * D)
    return _attend(*y.split(D, dim=2))


def _gated(x, w, b):
    gate, up = torch.nn.functional.linear(x, w, b).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _experts(x, w, b):
    gate, up = torch.bmm(x, w.transpose(1, 2)).chunk(2, -1)
    return torch.nn.functional.gelu(gate) * (up + b.view(2, -1)[0])


def _bfloat16(x, w, b):
    y = torch.nn.functional.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
    gate, up = y.chunk(2, -1)
    return (gate.sigmoid() * up).float()


# the function, the weight's shape, its pieces and their dim from the end, its spec in pieces
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], int, int]] = {
    "chunk": (_chunk, (3 * D, D), 3, -2),
    "slices": (_slices, (3 * D, D), 3, -2),
    "unbind": (_unbind, (3 * D, D), 3, -2),
    "permuted": (_permuted, (3 * D, D), 3, -2),
    "heads": (_heads, (3 * D, D), 3, -2),
    "conv1d": (_conv1d, (D, 3 * D), 3, -1),
    "gated": (_gated, (2 * D, D), 2, -2),
    "experts": (_experts, (B, 2 * D, D), 2, -2),
    "bfloat16": (_bfloat16, (2 * D, D), 2, -2),
}


def _with_grads(fn, frozen: bool):
    def run(x, w, b, out):
        loss = (fn(x, w, b) * out).tanh().square().mean()
        return [loss, *torch.autograd.grad(loss, [x] if frozen else [x, w, b])], None

    return run


@pytest.mark.parametrize(("case", "frozen"), [*((case, False) for case in CASES), ("chunk", True)])
def test_pieces_stay_apart_and_give_torchs_numbers(case: str, frozen: bool):
    fn, shape, num, dim = CASES[case]
    torch.manual_seed(0)
    out = fn(torch.zeros(B, T, D), torch.zeros(shape), torch.zeros(num * D)).shape
    values = [0.3 * torch.randn(s) for s in ((B, T, D), shape, (num * D,), (1,) * len(out))]
    wants = [torch.is_tensor(v) and i < (1 if frozen else 3) for i, v in enumerate(values)]
    run = _with_grads(fn, frozen)
    expected, _ = run(*(v.clone().requires_grad_(w) for v, w in zip(values, wants, strict=True)))
    program = Program(run, [Spec(tuple(v.shape), v.dtype, w) for v, w in zip(values, wants, strict=True)], "test")
    graph = program.graph.module
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    _, _, *grads = outputs_of(graph.graph)
    cuts = [(num, dim), (num, -1)]
    mark_pieces(graph.graph, dict(zip(inputs[1:3], cuts, strict=True)), zip(grads, cuts, strict=False))

    mesh = ts.make_mesh(batch=4, model=2)
    arrays: list[Any] = [jnp.asarray(v.numpy()) for v in values]
    arrays[1:3] = [InPieces.of(a, *c) for a, c in zip(arrays[1:3], cuts, strict=True)]
    in_pieces: Any = InPieces  # of specs
    specs = [P("batch"), in_pieces(_along(arrays[1].array.ndim, dim), dim), in_pieces(P(None, "model"), -1), P()]
    if case == "experts":
        specs[0] = P()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
    outs = [NamedSharding(mesh, P()), *shardings[: 1 if frozen else 3]]
    placed = jax.device_put(arrays, shardings)
    jitted = jax.jit(lambda *a: lower(graph)(None, *a), out_shardings=outs)
    found = jitted(*placed)
    assert [isinstance(value, InPieces) for value in found] == [False, False, True, True][: len(found)]
    for value, want in zip(found, expected, strict=True):
        tolerance = 2e-2 if case == "bfloat16" else 1e-5
        np.testing.assert_allclose(whole(value), want.detach().numpy(), rtol=tolerance, atol=tolerance)
    moves = count_collectives(jitted.lower(*placed).compile())
    assert set(moves) <= {"all-reduce"}, moves


def _along(ndim: int, dim: int) -> P:
    return P(*("model" if i == ndim + dim else None for i in range(ndim)))
