"""Layouts in which XLA's partitioner errs, found by `validation/fuzz` and made small: a step is right in all."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of

EXACT = 1e-9  # of the largest entry: float64 sums of some hundred terms in another order


class Found(NamedTuple):
    """A layout that was silently wrong, or ended in an error that was not ours."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    mesh: dict[str, int]
    rules: dict[str, P]
    options: Mapping[str, Any] = MappingProxyType({})
    plan: Mapping[str, Any] = MappingProxyType({})


class Grouped(nn.Module):
    """A matrix that is read in groups, as heads of attention are, and layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bgi,goi->bgo", x, self.mix.view(4, 2, 4)).flatten(1)
        for layer in self.layers:
            x = x + torch.einsum("bgi,goi->bgo", x.view(-1, 4, 2), layer.weight.view(4, 2, 4, 2)[:, :, 0]).flatten(1)
        return x


class Twice(nn.Module):
    """A stack of layers with fused projections that is called twice in one loss, as of a shared encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}) for _ in range(4))

    def once(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer["qkv"](x).chunk(3, -1)
            x = x + layer["out"](torch.tanh(q * k) + v)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(x) * self.once(x.roll(1, -1))


class Experts(nn.Module):
    """Every expert for every token, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8) / 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("btc,ech->bteh", x, self.up).relu()
        return x + torch.einsum("bteh,ehc,bte->btc", hidden, self.down, self.gate(x).softmax(-1))


class Gate(nn.Module):
    """Two projections in one matrix, the product of their results, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fused(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Recurrent(nn.Module):
    """The outputs of an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.RNN(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


class Counted(nn.Module):
    """Messages along edges, and one of each node to itself, as graph networks have them."""

    def __init__(self, *, product: bool = False) -> None:
        super().__init__()
        self.layer, self.product = nn.Linear(7, 7), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = torch.cat([x.abs().mul(4).long().flatten() % 5, torch.arange(5)])
        values = torch.cat([self.layer(x).flatten(), x.new_ones(5)])
        degree = x.new_zeros(5).scatter_add(0, edges, x.new_ones(len(edges)))
        if self.product:
            return x.new_ones(5).scatter_reduce(0, edges, 1 + values / 9, "prod") / degree
        return x.new_zeros(5).index_add(0, edges, values) / degree.sqrt()


class Lookup(nn.Module):
    """Rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(8).long() % 16)


def two(size: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))


def fused() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


EBM, BM = {"extra": 2, "batch": 2, "model": 2}, {"batch": 2, "model": 4}
PIECES = ts.Pieces(2, dim=0)

FOUND = [
    Found(
        "a tuple in a gradient", two, (8, 16), EBM, {"0.weight": P("model"), "2.weight": P(("extra", "model"), "batch")}
    ),
    Found(
        "a batch axis that moved",
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)),
        (4, 8, 6, 8),
        BM,
        {"0.bias": P("batch")},
        plan={"activations": {"0": P(None, "model", "batch")}},
    ),
    Found(
        "a kernel that is split over two axes",
        lambda: nn.Conv1d(4, 16, 4, stride=2),
        (8, 4, 14),
        {"batch": 2, "model": 2, "extra": 2},
        {"weight": P("batch", None, ("extra", "model"))},
    ),
    Found(
        "circular padding along two split dims",
        lambda: nn.Sequential(nn.Identity(), nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")),
        (3, 8, 8, 4),
        {"model": 4, "batch": 2},
        {},
        options={"batch_spec": P()},
        plan={"activations": {"0": P(None, None, "batch", "model"), "1": P(None, None, "batch", "model")}},
    ),
    Found(
        "a transposed kernel that ended the process",
        lambda: nn.ConvTranspose3d(4, 8, (3, 4, 2)),
        (8, 4, 2, 3, 4),
        {"batch": 2, "extra": 2, "model": 2},
        {"weight": P("extra", "batch", None, "model")},
    ),
    Found(
        "groups whose channels are split",
        lambda: nn.Conv2d(16, 16, 3, groups=8),
        (8, 16, 5, 5),
        BM,
        {"weight": P(("model", "batch"))},
    ),
    Found(
        "space that is split",
        lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1),
        (8, 8, 8, 4),
        EBM,
        {"weight": P("model", "batch")},
        options={"batch_spec": P("batch", None, "extra")},
    ),
    Found(
        "what is computed of an entry over two axes",
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 16), dim=1),
        (8, 4, 8),
        {"model": 2, "batch": 2, "extra": 2},
        {"parametrizations.weight.original1": P("batch", ("extra", "model"))},
    ),
    Found(
        "experts over one of the two axes of the batch",
        lambda: nn.Sequential(Experts(), Experts()),
        (16, 8, 8),
        {"model": 2, "batch": 2, "extra": 2},
        {"0.up": P("batch"), "0.down": P("extra"), "1.up": P(None, "extra"), "1.down": P("batch")},
        options={"batch_spec": P(("model", "batch")), "accumulate_steps": 2},
    ),
    Found(
        "a recurrent net over one of the two axes of the batch",
        Recurrent,
        (8, 4, 8),
        EBM,
        {"net.weight_hh_l0": P("model", "batch")},
        options={"batch_spec": P(("extra", "batch"))},
    ),
    Found("counts of what does not divide", Counted, (8, 7), {"batch": 4, "model": 2}, {}),
    Found("products of what does not divide", lambda: Counted(product=True), (8, 7), {"batch": 2, "model": 4}, {}),
    Found(
        "an activation that moves to two axes at once",
        lambda: nn.Sequential(Lookup(), nn.Linear(8, 8)),
        (16, 8),
        {"batch": 2, "extra": 2, "model": 2},
        {},
        options={"accumulate_steps": 2},
        plan={"activations": {"0": P(("extra", "model"), None, "batch")}},
    ),
    Found(
        "an activation that leaves the rows, of as many tokens as rows",
        lambda: nn.Sequential(Lookup(), nn.Linear(8, 4, bias=False), nn.Linear(4, 8)),
        (16, 8),
        {"model": 2, "extra": 2, "batch": 2},
        {"1.weight": P("batch", "model")},
        options={"accumulate_steps": 2},
        plan={"activations": {"1": P("extra")}},
    ),
    Found("read in groups", Grouped, (16, 4, 4), {"batch": 4, "model": 2}, {"**": P(("model", "batch"))}),
    Found("pieces of both", fused, (8, 8), {"batch": 2}, {}, plan={"stored": {"0.*": PIECES}}),
    Found(
        "pieces of layers called twice",
        Twice,
        (8, 8),
        {"batch": 2},
        {},
        {},
        {"stored": {"**.qkv.*": ts.Pieces(3, dim=0)}},
    ),
    Found(
        "pieces of a bias, whose matrix is not in pieces",
        Gate,
        (16, 4, 16),
        {"batch": 2, "model": 4},
        {"fused.weight": P("model"), "down.weight": P("model", "batch")},
        plan={"stored": {"fused.bias": PIECES}},
    ),
    Found(
        "pieces that a norm puts together, on three axes",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (16, 4, 8),
        {"batch": 2, "extra": 2, "model": 2},
        {"linear1.weight": P(("batch", "model"), "extra"), "linear2.weight": P("model", "batch")},
        plan={"stored": {"linear2.weight": PIECES}},
    ),
]


# One of each class; the others differ from one of these in the mesh, the kernel or the options.
OFTEN = {
    "a tuple in a gradient",
    "a batch axis that moved",
    "circular padding along two split dims",
    "a transposed kernel that ended the process",
    "groups whose channels are split",
    "what is computed of an entry over two axes",
    "experts over one of the two axes of the batch",
    "counts of what does not divide",
    "read in groups",
    "an activation that moves to two axes at once",
    "pieces of both",
    "pieces of layers called twice",
}


@pytest.mark.parametrize(
    "found", [pytest.param(row, id=row.name, marks=[] if row.name in OFTEN else pytest.mark.slow) for row in FOUND]
)
def test_a_step_has_torchs_gradients(found: Found) -> None:
    torch.manual_seed(0)
    model, x = found.model().double(), torch.randn(found.shape, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with jax.enable_x64(True):
        plan = ts.ShardingPlan(found.rules, default=P(), **found.plan)
        step = step_of(model, loss_fn, optax.sgd(1.0), mesh=ts.make_mesh(**found.mesh), plan=plan, **found.options)
        alone = copy.deepcopy(model)
        state, metrics = step(step.init(), x)
        loss = loss_fn(alone, x)
        loss.backward()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=EXACT)
        for name, parameter in alone.named_parameters():
            wanted = (parameter.detach() - (0 if parameter.grad is None else parameter.grad)).numpy()
            np.testing.assert_allclose(state.params[name], wanted, rtol=EXACT, atol=EXACT, err_msg=name)


@pytest.mark.parametrize(("groups", "axis_names"), [(1, "batch"), (4, ())])
def test_gradients_of_convolutions_by_shard_map(groups: int, axis_names: Any) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv1d(8, 8, 3, groups=groups), torch.randn(8, 8, 9)

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(conv, {"weight": weight}, (x,)).tanh().square().sum()

    def local(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ts.collectives.psum(torch.func.grad(loss)(weight, x), "batch")

    mapped = ts.jax_shard_map(
        local,
        mesh=ts.make_mesh(batch=4, model=2),
        in_specs=(P(), P("batch")),
        out_specs=P(),
        axis_names=axis_names,
    )
    weight = conv.weight.detach()
    wanted = torch.func.grad(loss)(weight, x).detach()
    np.testing.assert_allclose(np.asarray(mapped(weight, x).detach()), wanted, rtol=1e-4, atol=1e-5)  # float32
