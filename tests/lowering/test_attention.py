"""Long causal attention against eager torch, at both orders, and on a mesh by the collectives that it costs."""

from typing import Any

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.tables.cases import make_mesh
from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.ops import keeps_whole
from torch_shard._lowering.ops.attention import SHORTEST

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums of some hundred terms in another order
OURS, LONG = torch.ops.torch_shard.causal_attention.default, SHORTEST + 44  # blocks of unequal length
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
CASES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "plain": (((2, 2, LONG, 4),) * 3, {}),
    "scaled, another width": (((1, 2, LONG, 4), (1, 2, LONG, 4), (1, 2, LONG, 3)), {"scale": 0.3}),
    "grouped": (((1, 4, LONG, 4), (1, 2, LONG, 4), (1, 2, LONG, 4)), {"enable_gqa": True}),
    "more keys": (((1, 1, LONG, 4), (1, 1, LONG + 7, 4), (1, 1, LONG + 7, 4)), {}),
    "fewer keys": (((1, 1, LONG, 4), (1, 1, 150, 4), (1, 1, 150, 4)), {}),
}


def weighted(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum()


def targets(fn: Any, shapes: Shapes) -> set[Any]:
    specs = [Spec(shape, torch.float32) for shape in shapes]
    return {node.target for node in capture(lambda *x: ([fn(*x)], None), specs, keep=keeps_whole).module.graph.nodes}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_eager_torch(name: str) -> None:
    shapes, options = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)

    assert OURS in targets(attend, shapes)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    wanted = torch.autograd.grad(weighted(out), leaves)

    def fn(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = attend(*qkv)
        return weighted(out), out

    (_, found), grads = ts.jax_jit(ts.jax_value_and_grad(fn, argnums=(0, 1, 2), has_aux=True))(*inputs)
    torch.testing.assert_close(found.cpu(), out.detach(), **CLOSE)
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), other, **CLOSE)


def test_a_gradient_of_a_gradient_equals_eager_torch() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, LONG, 4), torch.randn(1, 1, LONG, 4)

    def penalty(q: torch.Tensor) -> torch.Tensor:
        q = q if q.requires_grad else q.requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no second derivative
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(weighted(out.square()), q, create_graph=True)[0].square().sum()

    q = torch.randn(1, 1, LONG, 4)
    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(penalty(leaf), leaf)[0]
    torch.testing.assert_close(ts.jax_jit(ts.jax_grad(penalty))(q).cpu(), wanted, **CLOSE)


def test_half_precision_sums_in_float32() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, LONG, 8).bfloat16() for _ in range(3)]
    fn = ts.jax_jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    out = fn(*inputs).cpu()
    assert out.dtype is torch.bfloat16
    wanted = F.scaled_dot_product_attention(*(x.float() for x in inputs), is_causal=True)
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=0.03)  # weights and output rounded to 2**-8


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True, "dropout_p": 0.5}, {}, {"attn_mask": torch.ones(LONG, LONG).tril().bool()}],
    ids=["dropout", "full", "mask"],
)
def test_other_attention_stays_as_it_is(options: dict[str, Any]) -> None:
    assert OURS not in targets(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), CASES["plain"][0])


def test_heads_over_a_mesh_cost_no_more_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's split, heads over `model`: the forward pass sums once over `model`, the backward pass once."""
    compiled = attention_step()
    assert "causal_attention" in compiled.as_text()
    ours = count_collectives(compiled)
    monkeypatch.setattr("torch_shard._lowering.ops.attention.SHORTEST", LONG + 1)
    assert ours == count_collectives(attention_step())


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


def attention_step() -> Any:
    """The optimised program of a training step."""
    rules = {f"{name}.{part}": P("model") for name in "qkv" for part in ("weight", "bias")}
    plan = ts.ShardingPlan({**rules, "o.weight": P(None, "model")}, default=P())
    torch.manual_seed(0)
    step = ts.make_train_step(
        Attention(), lambda model, x: model(x).square().mean(), optax.sgd(0.1), mesh=make_mesh((4, 2)), plan=plan
    )
    return step.lower(step.init(), torch.randn(8, LONG, 16)).compile()
