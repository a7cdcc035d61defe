"""What a layer saves for its backward pass: never more bytes than any other choice, found by trying all of them."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

from torch_shard._capture.trace import Spec, capture
from torch_shard._common.fx import depending_on, outputs_of
from torch_shard._lowering.ops import keeps_whole
from torch_shard._scan.partition import _is_there, _num_bytes, min_cut_residuals


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weight).chunk(2, -1)
    return x + (F.silu(gate) * up)[..., :4]


def widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).bfloat16().float().exp().sum(-1, keepdim=True) * x.sin()


def expanded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.sum(-1, keepdim=True).tanh().expand(3, 4) @ weight).relu()


def joint(layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Node]:
    """The nodes of a layer of `(x, weight)`, forward, and backward from a third input."""

    def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[list[torch.Tensor], None]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            out = layer(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)], None

    shape = tuple(layer(torch.ones(3, 4), torch.ones(4, 8)).shape)
    specs = [Spec(shape, torch.float32) for shape in ((3, 4), (4, 8), shape)]
    return list(capture(run, specs, keep=keeps_whole).module.graph.nodes)


def suffices(saved: set[Node], grads: list[Node], cotangent: Node) -> bool:
    """Tell whether gradients come from these values, the cotangent and what is elementwise or a view."""
    behind = depending_on([cotangent])
    todo = list(grads)
    while todo:
        node = todo.pop()
        if node in saved or node is cotangent:
            continue
        if node.op == "placeholder" or (node not in behind and _is_there(node)):
            return False
        todo += node.all_input_nodes
    return True


@pytest.mark.parametrize(
    ("layer", "at_hand"), [(gated, (1,)), (widened, ()), (widened, (1,)), (expanded, ())]
)  # of `gated` there are too many choices with weights to save
def test_no_choice_takes_fewer_bytes(
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], at_hand: tuple[int, ...]
) -> None:
    nodes = joint(layer)
    inputs = [node for node in nodes if node.op == "placeholder"]
    grads, free = outputs_of(nodes[0].graph)[1:], {inputs[i] for i in at_hand}
    price = lambda chosen: sum(_num_bytes(node) for node in chosen if node not in free)  # noqa: E731
    found = min_cut_residuals(grads, {inputs[2]}, free)
    assert suffices(found, grads, inputs[2])
    behind = depending_on([inputs[2]])
    candidates = [n for n in nodes if n.op != "output" and n not in behind and n not in free and _num_bytes(n) < 1e9]
    sizes = range(len(found - free) + 3)
    every = (set(chosen) | free for size in sizes for chosen in itertools.combinations(candidates, size))
    assert price(found) == min(price(chosen) for chosen in every if suffices(chosen, grads, inputs[2]))
