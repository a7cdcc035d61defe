"""What the report of a step says of attention that has no kernel on its devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._lowering.ops.attention import SHORTEST

LONG = SHORTEST + 128
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    places = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, (places[None, :] - places[:, None]) * 0.1)


def odd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.arange(q.shape[2]).expand(q.shape[2], -1) % 3 > 0)


def trained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, q[:, :1, :, :1].expand(-1, 1, -1, q.shape[2]))


def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(50 * torch.tanh(q @ k.mT / 50), -1), 0.1) @ v


class Attention(nn.Module):
    def __init__(self, attend: Attend, heads: int = 4) -> None:
        super().__init__()
        self.attend, self.heads, self.qkv = attend, heads, nn.Linear(12, 36)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.attend(*qkv.unbind()).transpose(1, 2).flatten(2)


def report(
    *layers: nn.Module, mesh: Any = None, length: int = LONG, rows: int = 4, dtype: Any = torch.bfloat16
) -> list[str]:
    step = step_of(
        nn.Sequential(*layers), mesh=mesh or ts.make_mesh(topology="v5e:2x2", batch=2, model=2), compute_dtype=dtype
    )
    step.lower(step.structs, torch.empty(rows, length, 12, device="meta"))
    return [line for line in step.report().splitlines() if "attention" in line]


ALL = f"attention keeps all weights, (4, 4, {LONG}, {LONG}), and has no kernel: "
BLOCKS = "attention runs in blocks of queries, without a kernel: "
SAID: dict[str, tuple[nn.Module, str]] = {
    "all dropped": (
        Attention(lambda *qkv: causal(*qkv, dropout_p=1.0)),
        f"{ALL}it drops of {16 * LONG * LONG} weights (dropout_p=1), blocks of fewer than",
    ),
    "broadcast": (
        Attention(lambda q, k, v: causal(q, k[:, :1], v[:, :1])),
        f"{ALL}queries, keys and values are (4, 4, {LONG}, 3), (4, 1, {LONG}, 3) and (4, 1, {LONG}, 3), which do not",
    ),
    "written out": (
        Attention(written),
        f"{ALL}it is written out as softmax and products. Use torch.nn.functional.scaled_dot",
    ),
    "soft cap": (Attention(capped), f"{ALL}it is written out, with a soft cap of the scores"),
    "bias": (
        Attention(biased),
        f"{BLOCKS}its mask adds numbers to the scores (torch.bfloat16; the biases of T5 and ALiBi)",
    ),
    "trained": (Attention(trained), f"{BLOCKS}its mask is trained"),
    "unknown": (Attention(odd), f"{BLOCKS}its mask ({LONG}, {LONG}) is of no known form: key padding (B, 1, 1, S), a "),
    "dropout": (
        Attention(lambda *qkv: causal(*qkv, dropout_p=0.1)),
        f"{BLOCKS}it drops weights (dropout_p=0.1)",
    ),
    "heads": (
        Attention(causal, heads=3),
        "attention has its kernel, but does not divide over the mesh (3 heads over model=2)",
    ),
}


def test_attention_without_a_kernel_says_why() -> None:
    found = report(*(layer for layer, _ in SAID.values()))
    wanted = [f"{number}: {why}" for number, (_, why) in enumerate(SAID.values())]
    assert len(found) == len(wanted)
    for line in wanted:
        assert any(each.startswith(line) for each in found), (line, found)


def test_what_has_its_kernel_and_what_is_short_says_nothing() -> None:
    assert report(Attention(causal)) == []
    assert report(Attention(lambda *qkv: causal(*qkv, dropout_p=0.1)), Attention(written), length=64) == []
    assert report(Attention(causal), Attention(lambda *qkv: causal(*qkv, dropout_p=0.1)), length=256) == []


def test_layers_in_a_loop_are_named_together() -> None:
    (line,) = report(*(Attention(causal) for _ in range(5)), dtype=None)
    assert line.startswith(f"0, ..., 4 (5 modules): {BLOCKS}")
    assert "it computes in float32, and the kernel multiplies in half precision. Make the step with compute" in line


def test_the_cpu_has_no_kernels_to_speak_of() -> None:
    assert report(Attention(odd), Attention(causal), mesh=ts.make_mesh(batch=2, model=2)) == []


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (4096, "0: under its causal mask devices exchange half of their queries, and so compute as much."),
        (
            2048,
            "0: under its causal mask devices keep the queries that they have: that takes 4096 queries at least, and",
        ),
    ],
)
def test_causal_attention_over_a_context_says_whether_it_is_balanced(length: int, said: str) -> None:
    mesh = ts.make_mesh(topology="v5e:2x2", batch=2, context=2)
    step = step_of(
        nn.Sequential(Attention(causal)),
        mesh=mesh,
        plan=ts.ShardingPlan({}, default=P(), context=ts.Context("context")),
        compute_dtype=torch.bfloat16,
        batch_spec=P("batch", "context"),
    )
    step.lower(step.structs, torch.empty(2, length, 12, device="meta"))
    assert said in step.report()
