"""Recurrent nets as loops: equal to eager torch at both orders, and a graph that does not grow with the sequence."""

from typing import Any

import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch, second
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.errors import assert_refused
from tests.oracles.graphs import nodes_of
from tests.oracles.steps import anew, step_of
from tests.tables.cases import BATCH, Case, make_mesh

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 through some steps, sums in another order
LSTM, GRU, RNN = nn.LSTM, nn.GRU, nn.RNN

# Others are in the table of `validation/operators/siblings.py`.
NETS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "GRU without biases": (GRU, {"num_layers": 2, "bias": False, "batch_first": True}),
    "projected": (LSTM, {"proj_size": 3, "num_layers": 2}),
    "all dropped between layers": (LSTM, {"num_layers": 2, "dropout": 1.0}),
}


def made(kind: type[nn.Module], options: dict[str, Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    """The net in train mode, and an input with a first state."""
    torch.manual_seed(0)
    net = kind(4, 5, **options)
    num_runs = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    widths = [options.get("proj_size", 5), 5] if kind is LSTM else [5]
    return net, [torch.randn(3, 3, 4), *(torch.randn(num_runs, 3, width) for width in widths)]


def call(net: nn.Module, params: dict[str, torch.Tensor], x: Any, state: list[torch.Tensor]) -> list[Any]:
    """Output and last state."""
    out, last = torch.func.functional_call(net, params, (x, tuple(state) if len(state) == 2 else state[0]))
    return [out, *(last if isinstance(last, tuple) else [last])]


def assert_equals_eager_torch(outputs: Any, net: nn.Module, tensors: list[torch.Tensor], *more: torch.Tensor) -> None:
    """All of `outputs(params, tensors, *more)`, and gradients by parameters and tensors."""
    named = dict(net.named_parameters())
    given = [*(p.detach() for p in named.values()), *tensors]

    def fn(*values: torch.Tensor) -> Any:
        params = dict(zip(named, values, strict=False))
        return outputs(params, values[len(named) : len(given)], *values[len(given) :])

    assert_equals_torch(fn, [*given, *more], num=len(given), **CLOSE)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # eager torch's own
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("name", NETS)
def test_value_and_gradients_equal_eager_torch(name: str) -> None:
    net, inputs = made(*NETS[name])

    assert_equals_eager_torch(lambda params, tensors: call(net, params, tensors[0], tensors[1:]), net, inputs)


@pytest.mark.parametrize("kind", [LSTM, RNN])
def test_a_gradient_of_a_gradient_equals_eager_torch(kind: type[nn.Module]) -> None:
    net, (x, *state) = made(kind, {})

    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # oneDNN's LSTM has no second derivative
    try:
        found, wanted = second(lambda x: net(x, tuple(state) if len(state) == 2 else state[0])[0], x)
    finally:
        torch._C._set_mkldnn_enabled(onednn)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_transforms_of_torch_func_keep_their_meaning() -> None:
    """Which take each step in plain operators, as a gradient of a gradient does."""
    net, (x, *_) = made(LSTM, {})

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x)[0].square().sum()

    torch.testing.assert_close(ts.jax_jit(torch.func.grad(loss))(x).cpu(), torch.func.grad(loss)(x), **CLOSE)
    by_element = ts.jax_vmap(loss)(torch.stack([x, 2 * x])).cpu()
    torch.testing.assert_close(by_element, torch.stack([loss(x), loss(2 * x)]).detach(), **CLOSE)


@pytest.mark.parametrize(("kind", "autocast"), [(LSTM, True), (GRU, False), (RNN, False)])
def test_the_graph_does_not_grow_with_the_sequence(kind: type[nn.Module], autocast: bool) -> None:
    net = kind(4, 5, bidirectional=True)

    def gradient(x: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(net(x)[0].square().sum(), list(net.parameters()))

    short, long = (nodes_of(gradient, [torch.empty(length, 2, 4)]) for length in (8, 64))
    assert len(short) == len(long)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of flags that are set as they were
@pytest.mark.parametrize(("kind", "mode"), [(LSTM, "autocast"), (GRU, "params")])
def test_long_sequences_in_bfloat16_are_as_near_to_float32_as_torch_is(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    net, x = kind(8, 16), torch.randn(200, 8, 8) + 0.5

    def loss_fn(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = net(x)[0].float()
        return out.square().mean(), {f"{i}": out[-1, 0, i] for i in range(8)}

    def gradients(dtype: torch.dtype | None) -> torch.Tensor:
        plain = torch.backends.mkldnn.flags(enabled=False)  # oneDNN has an LSTM in bfloat16 on few processors
        with plain, torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = loss_fn(net, x)[0]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mixed_precision": mode, "batch_spec": P(None, "batch")}
    exact, rounded = gradients(None), gradients(torch.bfloat16)
    before = [p.detach().clone() for p in net.parameters()]
    step = step_of(net, loss_fn, optax.sgd(1.0), mesh=make_mesh((1, 2)), **options)
    state, _ = step(step.init(), x)
    after = step.export(state).parameters()
    found = torch.cat([(p - q).detach().flatten() for p, q in zip(before, after, strict=True)])
    assert (found - exact).norm() <= 1.5 * (rounded - exact).norm() + 2**-9 * exact.norm()


def test_dropout_between_layers_draws_anew() -> None:
    net = LSTM(4, 5, num_layers=2, dropout=0.5)
    x = torch.randn(3, 2, 4)
    step = ts.jax_jit(lambda x: net(x)[0])
    first, second = step(x).cpu(), step(x).cpu()
    assert not torch.equal(first, second)
    net.eval()
    torch.testing.assert_close(step(x).cpu(), net(x)[0].detach(), **CLOSE)


# Arguments, whether lengths are sorted, and the total length.
PACKED: dict[str, tuple[type[nn.Module], dict[str, Any], bool, int | None]] = {
    "projected": (LSTM, {"proj_size": 3, "bidirectional": True}, False, None),
    "GRU": (GRU, {"num_layers": 2, "batch_first": True, "bias": False}, True, 4),
    "RNN": (RNN, {"bidirectional": True}, False, 6),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # eager torch's own
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_equal_eager_torch(name: str) -> None:
    """Lengths are an input; what stands in the padding, and is not a number, is not seen."""
    kind, options, is_sorted, total = PACKED[name]
    net, (_, *state) = made(kind, options)
    lengths = torch.tensor([4, 3, 1] if is_sorted else [1, 4, 2])
    batch_first = options.get("batch_first", False)
    x = torch.randn(3, 4, 4).masked_fill(torch.arange(4)[None, :, None] >= lengths[:, None, None], torch.nan)
    x = x if batch_first else x.transpose(0, 1).contiguous()

    def outputs(params: Any, tensors: Any, lengths: torch.Tensor) -> list[torch.Tensor]:
        x, *state = tensors
        packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=is_sorted)
        out, *last = call(net, params, packed.to(x.device), state)
        out, found = pad_packed_sequence(out, batch_first, padding_value=0.5, total_length=total)
        return [out, *last, found.float()]

    assert_equals_eager_torch(outputs, net, [x, *state], lengths)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.net, self.out = nn.Embedding(9, 8), GRU(8, 8, bidirectional=True), nn.Linear(16, 2)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, lengths = batch
        packed = pack_padded_sequence(self.tokens(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, lengths = pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return self.out(out.sum(1) / lengths[:, None])


def test_packed_sequences_train_as_in_eager_torch(caplog: pytest.LogCaptureFixture) -> None:
    def batch() -> Any:
        lengths = torch.randint(1, 4, (BATCH,)).index_fill(0, torch.tensor([3]), 4)
        return (torch.randint(0, 9, (BATCH, 4)), lengths), torch.randn(BATCH, 2)

    case = Case("reader", Reader, batch, {"tokens.weight": P(None, "model"), "out.weight": P(None, "model")})
    step = assert_follows(case, model := case.model(), eager_trajectory(case, num_steps=2), (4, 2))
    assert "where no sequence of a batch fills the padded length of 4" in caplog.text
    ((tokens, lengths), target) = batch()
    _, metrics = step(step.init(), ((tokens, lengths.clamp(max=3)), target))
    assert np.isnan(metrics["loss"])
    half = ts.make_eval_step(model, case.loss_fn, mesh=step.mesh, plan=case.plan, compute_dtype=torch.bfloat16)
    eager = case.model()
    found = half(anew(step, eager).init(), ((tokens, lengths), target))["loss"]
    wanted = case.loss_fn(eager, ((tokens, lengths), target)).item()
    torch.testing.assert_close(float(found), wanted, rtol=0.03, atol=0)  # some roundings of 2**-8 each


USES = {
    "packed.data.mean()": "the data of a packed sequence is read",
    "tuple(packed)": "the data of a packed sequence is read",
    "packed.batch_sizes.sum()": "batch_sizes of a packed sequence is read",
    "len(packed.batch_sizes)": "batch_sizes of a packed sequence is read",
}


def test_what_is_within_a_packed_sequence_is_refused() -> None:
    def use(text: str) -> Any:
        total = lambda x, lengths: eval(text, {"packed": pack_padded_sequence(x, lengths)})  # noqa: E731
        return ts.jax_jit(total)(torch.ones(4, 2, 3), torch.tensor([4, 1]))

    words = {
        text: f"NotImplementedError: .*test_recurrent.*{said}.*after pad_packed_sequence" for text, said in USES.items()
    }
    assert_refused(words, use)
