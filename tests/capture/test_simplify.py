"""Graphs without copies, and `as_strided` against eager torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_shard as ts
from tests.oracles.derivatives import agrees
from torch_shard._capture.simplify import simplify
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

    def scalar(x: torch.Tensor) -> torch.Tensor:
        out = read(x)
        return (out * torch.linspace(0.5, 2, out.numel()).view(out.shape)).square().sum()

    agrees(scalar, x)
    torch.testing.assert_close(ts.jax_jit(read)(x).cpu(), read(x))


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


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bclhn,bcshn->bclsh", (2, 3, 4, 5, 6), (2, 3, 7, 5, 6)),
        ("bzch,bzhpn->bchpn", (2, 3, 4, 5), (2, 3, 5, 6, 7)),
        ("bhqd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 3, 5)),
    ],
)
def test_batch_dims_of_einsum_stay_apart(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    def scalar(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, x, y).square().sum()

    def gradient(*given: torch.Tensor) -> torch.Tensor:
        x, y = (tensor.clone().requires_grad_() for tensor in given)
        return sum(grad.sum() for grad in torch.autograd.grad(scalar(x, y), (x, y)))

    found = graph_of(gradient, left, right)
    assert aten.matmul.default in targets(found)
    assert aten.bmm.default not in targets(found)
    torch.manual_seed(0)
    x, y = torch.randn(left), torch.randn(right)
    agrees(scalar, x, y)
    agrees(lambda y, x: scalar(x, y), y, x)


def test_copies_and_aliases_disappear() -> None:
    graph = graph_of(lambda x: (x.clone().detach().contiguous().view(3, 1).view(3) + 1).clone(), (3,))
    assert targets(graph) == [aten.add.Tensor]


def test_operators_of_others_are_not_taken_for_those_of_torch_that_are_called_alike() -> None:
    with torch.library._scoped_library("torch_shard_tests", "DEF") as library:
        library.define("clone(Tensor x) -> Tensor")
        doubled = torch.ops.torch_shard_tests.clone.default
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        found = graph.call_function(doubled, (x,))
        copied = graph.call_function(torch.ops.aten.clone.default, (found,))
        x.meta["val"] = found.meta["val"] = copied.meta["val"] = torch.empty(2)
        graph.output(([copied],))
        module = torch.fx.GraphModule({}, graph)
        simplify(module)
        assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [doubled]
