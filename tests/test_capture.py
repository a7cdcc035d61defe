"""What a capture keeps, refuses and leaves alone."""

import re
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard as ts
from tests.odd import odd
from torch_shard._capture.simplify import simplify
from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.interpreter import missing_lowerings
from torch_shard._lowering.ops import keeps_whole

aten = torch.ops.aten
X = torch.tensor([0.5, -1.0, 2.0])


def graph_of(fn: Any, *shapes: tuple[int, ...]) -> Any:
    return capture(lambda *args: ([fn(*args)], None), [Spec(s, torch.float32) for s in shapes], keep=keeps_whole)


def targets(graph: Any) -> list[Any]:
    return [n.target for n in graph.module.graph.nodes if n.op == "call_function"]


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (Chooses(), r"in forward: if x\.sum\(\) > 0:"),
        (lambda x: x * x.sum().item(), r"item\(\)"),
        (lambda x: x.tolist()[0] + x, r"tolist\(\)"),
        (lambda x: x + float(x[0]), r"float\("),
        (lambda x: x[x > 0], r"x\[x > 0\]"),
        (lambda x: torch.nonzero(x), r"nonzero"),
        (lambda x: x.numpy().sum() + x, r"numpy"),
    ],
)
def test_values_that_python_needs_are_refused_with_file_and_line(fn: Any, what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf'File "{re.escape(__file__)}", line \d+, .*{what}') as caught:
        ts.jax_jit(fn)(X)
    assert "torch.where" in str(caught.value)
    assert "torch.cond" in str(caught.value)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.odd_backward(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return odd(self.blocks[1](x))


def test_missing_lowerings_are_named_together_before_compiling() -> None:
    with pytest.raises(NotImplementedError, match="Outer uses 2 operators without a lowering") as caught:
        ts.jax_jit(Outer())(X)
    first, second = str(caught.value).split("\n\n")[1].splitlines()
    assert re.match(r"  tests\.odd_backward\.default: Outer\.blocks\.1: File .*test_capture.*odd_backward\(x\)", first)
    assert re.match(r"  tests\.odd\.default: Outer: File .*odd\.py.*tests\.odd\(x\)", second)


def test_batch_dims_of_products_stay_apart() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ k

    found = targets(graph_of(attention, (2, 3, 4, 5), (2, 3, 4, 5)))
    assert found.count(aten.matmul.default) == 2
    assert not {aten.bmm.default, aten.view.default, aten.reshape.default} & set(found)


def test_copies_and_aliases_disappear() -> None:
    graph = graph_of(lambda x: (x.clone().detach().contiguous().view(3, 1).view(3) + 1).clone(), (3,))
    assert targets(graph) == [aten.add.Tensor]


def test_decompositions_are_pytorchs_where_we_have_no_lowering() -> None:
    graph = graph_of(lambda x: F.huber_loss(x, x * 2), (3,))
    assert missing_lowerings(graph.module) == []


def test_a_capture_leaves_torch_as_it_was() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    state, fastpath = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 3, 8)
    torch.set_rng_state(state)
    ts.jax_jit(lambda x: model(x, x, x)[0])(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert torch.backends.mkldnn.enabled
    assert not model.in_proj_weight.grad_fn
    assert torch.is_grad_enabled()


def test_a_failed_capture_leaves_torch_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Chooses())
    with pytest.raises(NotImplementedError):
        ts.jax_jit(model)(X)
    assert torch.backends.mkldnn.enabled
    assert type(model[0].weight) is nn.Parameter
    torch.testing.assert_close(ts.jax_jit(model[0])(X).cpu(), model[0](X))


def test_constants_and_devices_inside_forward() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0], device="jax")
        return x * table + torch.arange(3, device=x.device) + torch.ones(3).to("jax")

    wanted = X * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + 1
    torch.testing.assert_close(ts.jax_jit(fn)(X).cpu(), wanted)


def test_custom_functions_hooks_and_func_transforms_mean_what_they_do_in_torch() -> None:
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (ctx.saved_tensors[0].abs() < 1.5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 10)
        inner = torch.func.grad(lambda y: (y**3).sum())(x)
        slopes = torch.func.vmap(lambda y: y.sin())(x)
        saved = torch.utils.checkpoint.checkpoint(lambda y: y.exp(), x, use_reentrant=False)
        return (Clip.apply(h) * h + inner * slopes + saved).sum()

    x = X.clone().requires_grad_()
    fn(x).backward()
    torch.testing.assert_close(ts.jax_grad(fn)(X).cpu(), x.grad)


def test_where_chooses_by_value() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum() > 0, x.sin(), x.cos())

    for x in (X, -X):
        torch.testing.assert_close(ts.jax_jit(fn)(x).cpu(), fn(x))


def test_two_threads_capture_side_by_side() -> None:
    import concurrent.futures

    models = [nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: ts.jax_jit(m)(X).cpu(), models))
    for out, model in zip(found, models, strict=True):
        torch.testing.assert_close(out, model(X))


def test_sixty_four_bits_when_jax_has_them() -> None:
    with jax.enable_x64(True):
        x = X.double()
        out = ts.jax_grad(lambda x: (x**3).sum())(x)
        assert out.dtype is torch.float64
        torch.testing.assert_close(out.cpu(), 3 * x**2)


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
