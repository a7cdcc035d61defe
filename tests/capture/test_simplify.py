"""Graphs without copies, and `as_strided` against eager torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_shard as ts
from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.ops import keeps_whole

READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: (2 * x).as_strided((3, 3), (4, 1)),
    "transposed": lambda x: (2 * x).t().as_strided((2, 2), (1, 2)),
    "transposed_input": lambda x: x.t().as_strided((2, 3), (1, 2)),
    "own_offset": lambda x: (2 * x).t()[1:].as_strided((2, 2), (1, 2)),
    "offset": lambda x: (2 * x).t()[1:].as_strided((2, 2), (1, 2), 1),
    "row": lambda x: (2 * x)[1].as_strided((4,), (1,)),
    "overlapping": lambda x: (2 * x)[:, 1:].as_strided((2, 3, 2), (4, 1, 1)),
    "channels_last": lambda x: (
        x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last).as_strided((3, 2), (2, 1))
    ),
    "expanded": lambda x: x[:1].expand(3, 4).as_strided((2, 2), (0, 1)),
    "permuted": lambda x: (2 * x).view(3, 2, 2).permute(2, 0, 1).as_strided((5,), (2,), 1),
    "diagonal": lambda x: torch.diagonal(2 * x.t()).as_strided((2,), (5,)),
}


@pytest.mark.parametrize("name", READS)
def test_reads_what_torch_reads(name: str) -> None:
    torch.manual_seed(0)
    read, x = READS[name], torch.randn(3, 4)

    def scalar(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = read(x)
        return (out * torch.linspace(0.5, 2, out.numel()).view(out.shape)).square().sum(), out

    leaf = x.clone().requires_grad_()
    value, out = scalar(leaf)
    (_, found), grad = ts.jax_value_and_grad(scalar, has_aux=True)(x)
    torch.testing.assert_close(found.cpu(), out.detach())
    torch.testing.assert_close(grad.cpu(), torch.autograd.grad(value, leaf)[0])


def test_memory_that_no_tensor_fills_is_refused() -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided((3, 4), (8, 2)).copy_(x).as_strided((2, 2), (2, 1))

    with pytest.raises(NotImplementedError, match=r"strides \(8, 2\), whose memory .* cannot reconstruct"):
        ts.jax_jit(read)(torch.randn(3, 4))


aten = torch.ops.aten


def graph_of(fn: Any, *shapes: tuple[int, ...]) -> Any:
    return capture(lambda *args: ([fn(*args)], None), [Spec(s, torch.float32) for s in shapes], keep=keeps_whole)


def targets(graph: Any) -> list[Any]:
    return [n.target for n in graph.module.graph.nodes if n.op == "call_function"]


def test_batch_dims_of_products_stay_apart() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ k

    found = targets(graph_of(attention, (2, 3, 4, 5), (2, 3, 4, 5)))
    assert found.count(aten.matmul.default) == 2
    assert not {aten.bmm.default, aten.view.default, aten.reshape.default} & set(found)


def test_copies_and_aliases_disappear() -> None:
    graph = graph_of(lambda x: (x.clone().detach().contiguous().view(3, 1).view(3) + 1).clone(), (3,))
    assert targets(graph) == [aten.add.Tensor]
