"""Recurrent nets as loops: equal to eager torch at both orders, and a graph that does not grow with the sequence."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.tables.cases import chosen
from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.ops import keeps_whole

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 through some steps, sums in another order
LSTM, GRU, RNN = nn.LSTM, nn.GRU, nn.RNN

NETS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    f"{kind.__name__} {options}": (kind, options)
    for kind, bidirectional, bias, batch_first in itertools.product((LSTM, GRU, RNN), *[(False, True)] * 3)
    for options in [{"num_layers": 2, "bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}]
    if batch_first != bias  # each with and without, not every pair
} | {
    "relu": (RNN, {"nonlinearity": "relu", "num_layers": 2}),
    "projected": (LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    "projected without biases": (LSTM, {"proj_size": 3, "bias": False}),
    "all dropped between layers": (LSTM, {"num_layers": 2, "dropout": 1.0}),
}


# Each of the three arguments both ways, for each kind.
OFTEN = [name for name, (_, o) in NETS.items() if o.get("bias") in (None, o.get("bidirectional", False))]


def made(kind: type[nn.Module], options: dict[str, Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    """The net in train mode, and an input with a first state."""
    torch.manual_seed(0)
    net = kind(4, 5, **options)
    num_runs = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    widths = [options.get("proj_size", 5), 5] if kind is LSTM else [5]
    return net, [torch.randn(3, 3, 4), *(torch.randn(num_runs, 3, width) for width in widths)]


def call(net: nn.Module, params: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
    x, *state = tensors
    out, last = torch.func.functional_call(net, params, (x, tuple(state) if len(state) == 2 else state[0]))
    pieces = [out, *(last if isinstance(last, tuple) else [last])]
    return sum((p * torch.linspace(0.5, 1.5, p.numel()).view(p.shape)).sum() for p in pieces)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # eager torch's own
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("name", chosen(NETS, OFTEN))
def test_value_and_gradients_equal_eager_torch(name: str) -> None:
    net, inputs = made(*NETS[name])
    params = {n: p.detach() for n, p in net.named_parameters()}
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    given = [x.clone().requires_grad_() for x in inputs]
    value = call(net, leaves, given)
    wanted = torch.autograd.grad(value, [*leaves.values(), *given], materialize_grads=True)
    fn = ts.jax_value_and_grad(lambda params, tensors: call(net, params, tensors), argnums=(0, 1))
    found, (of_params, of_inputs) = ts.jax_jit(fn)(params, inputs)
    torch.testing.assert_close(found.cpu(), value.detach(), **CLOSE)
    grads = [*(of_params[name] for name in leaves), *of_inputs]
    for name, grad, other in zip([*leaves, "x", "h", "c"], grads, wanted, strict=False):
        torch.testing.assert_close(grad.cpu(), other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "tanh", "relu"])
def test_a_gradient_of_a_gradient_equals_eager_torch(kind: str) -> None:
    build = {"LSTM": LSTM, "GRU": GRU}.get(kind, RNN)
    net, (x, *state) = made(build, {"nonlinearity": kind} if build is RNN else {})

    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        out, _ = net(x, tuple(state) if len(state) == 2 else state[0])
        slope = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        return slope.square().sum()

    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # oneDNN's LSTM has no second derivative
    try:
        leaf = x.clone().requires_grad_()
        wanted = torch.autograd.grad(penalty(leaf), leaf)[0]
    finally:
        torch._C._set_mkldnn_enabled(onednn)
    torch.testing.assert_close(ts.jax_jit(ts.jax_grad(penalty))(x).cpu(), wanted, **CLOSE)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it when first called
@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_transforms_of_torch_func_keep_their_meaning(kind: type[nn.Module]) -> None:
    net, (x, *_) = made(kind, {})
    params = {n: p.detach() for n, p in net.named_parameters()}

    def loss(x: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, params, (x,))[0].square().sum()

    def forward_mode(x: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.jvp(lambda x: loss(x, params), (x,), (torch.ones_like(x),))[1]

    leaf = x.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(leaf, params), leaf)[0]
    torch.testing.assert_close(ts.jax_jit(torch.func.grad(loss))(x, params).cpu(), wanted, **CLOSE)
    torch.testing.assert_close(ts.jax_jit(forward_mode)(x, params).cpu(), wanted.sum(), **CLOSE)
    by_element = ts.jax_vmap(loss, (0, None))(torch.stack([x, 2 * x]), params).cpu()
    torch.testing.assert_close(by_element, torch.stack([loss(x, params), loss(2 * x, params)]), **CLOSE)


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_the_graph_does_not_grow_with_the_sequence(kind: type[nn.Module]) -> None:
    net = kind(4, 5, num_layers=2, bidirectional=True)

    def gradient(x: torch.Tensor) -> Any:
        return torch.autograd.grad(net(x)[0].square().sum(), list(net.parameters())), None

    short, long = (capture(gradient, [Spec((length, 2, 4), torch.float32)], keep=keeps_whole) for length in (8, 64))
    assert short.num_nodes == long.num_nodes


def test_dropout_between_layers_draws_anew() -> None:
    net = LSTM(4, 5, num_layers=2, dropout=0.5)
    x = torch.randn(3, 2, 4)
    step = ts.jax_jit(lambda x: net(x)[0])
    first, second = step(x).cpu(), step(x).cpu()
    assert not torch.equal(first, second)
    net.eval()
    torch.testing.assert_close(step(x).cpu(), net(x)[0].detach(), **CLOSE)


def test_half_precision_keeps_its_dtype() -> None:
    torch.manual_seed(0)
    net, x = GRU(4, 5).bfloat16(), torch.randn(3, 2, 4).bfloat16()
    out = ts.jax_jit(lambda x: net(x)[0])(x).cpu()
    assert out.dtype is torch.bfloat16
    wanted = net.float()(x.float())[0].detach()
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=0.02)  # three steps of some roundings of 2**-9
