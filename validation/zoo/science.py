"""Graphs, equations, flows, tables: torch_geometric, egnn, e3nn, torchdiffeq, neuraloperator, zuko, siren, gpytorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from validation.zoo.rows import BATCH, Row, pairs, regression, rows

NODES, FEATURES = 5, 6


class _Graphs(nn.Module):
    """A graph in each row, all of them one large graph for the layers, and a mean over the nodes of each."""

    def __init__(self, kind: str, out: int = 8, **options: Any) -> None:
        super().__init__()
        import torch_geometric.nn as gnn

        self.first = getattr(gnn, kind)(*self._ends(kind, FEATURES, out), **options)
        self.head = nn.Linear(out * options.get("heads", 1), 4)

    def _ends(self, kind: str, before: int, after: int) -> tuple[Any, ...]:
        if kind == "GINConv":
            return (nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after)),)
        if kind == "EdgeConv":
            return (nn.Linear(2 * before, after),)
        return before, after

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        import torch_geometric.nn as gnn

        rows = len(x)
        start = NODES * torch.arange(rows)
        index = (edges + start[:, None, None]).permute(1, 0, 2).reshape(2, -1)
        nodes = F.elu(self.first(x.flatten(0, 1), index))
        return self.head(gnn.global_mean_pool(nodes, torch.arange(rows).repeat_interleave(NODES), rows))


def _graph_batch() -> Any:
    return torch.randn(BATCH, NODES, FEATURES), torch.randint(0, NODES, (BATCH, 2, 7)), torch.randn(BATCH, 4)


def _graph_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2])


def _pyg(kind: str, **options: Any) -> Row:
    return Row(kind, lambda: _Graphs(kind, **options), _graph_batch, loss_fn=_graph_loss)


class _Pooled(nn.Module):
    """`global_mean_pool` that finds out for itself how many graphs there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)
        self.register_buffer("graph", torch.arange(BATCH).repeat_interleave(NODES))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        import torch_geometric.nn as gnn

        return gnn.global_add_pool(self.layer(x.flatten(0, 1)), self.graph)


class _AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import torch_geometric.nn as gnn

        self.net = gnn.GAE(gnn.GCNConv(FEATURES, 4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        index = edges.permute(1, 0, 2).reshape(2, -1) % NODES
        z = self.net.encode(x.sum(0), index)
        return self.net.recon_loss(z, index, (index + 1) % NODES)


def _own(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch[:2])


class _Molecules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import torch_geometric.nn as gnn

        self.net = gnn.SchNet(
            hidden_channels=8, num_filters=8, num_interactions=1, num_gaussians=4, interaction_graph=_all_pairs
        )

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        atoms = torch.ones(BATCH * NODES, dtype=torch.long)
        out = self.net(atoms, x[..., :3].flatten(0, 1), torch.arange(BATCH).repeat_interleave(NODES))
        return out.square().mean()


def _all_pairs(places: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every node with the next of its graph."""
    place = torch.arange(BATCH * NODES)
    index = torch.stack([place, place // NODES * NODES + (place + 1) % NODES])
    return index, (places[index[0]] - places[index[1]]).norm(dim=-1)


PYG = rows(
    "torch_geometric",
    _pyg("GCNConv"),
    _pyg("GATConv", heads=2),
    _pyg("GATv2Conv", heads=2),
    _pyg("SAGEConv"),
    _pyg("GINConv"),
    _pyg("EdgeConv"),
    _pyg("TransformerConv", heads=2),
    _pyg("ChebConv", K=2),
    Row("global_add_pool of a buffer", _Pooled, _graph_batch, loss_fn=_graph_loss),
    Row("GAE.recon_loss", _AutoEncoder, _graph_batch, loss_fn=_own),
    Row("SchNet", _Molecules, _graph_batch, loss_fn=_own),
)


class _Egnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from egnn_pytorch import EGNN

        self.layer = EGNN(dim=8, m_dim=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features, places = self.layer(x, x[..., :3])
        return torch.cat([features, places], -1)


class _Equivariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from e3nn import o3

        self.sh = o3.Irreps("0e + 1o")
        self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", self.sh, "4x0e + 1x1o")
        self.linear = o3.Linear("4x0e + 1x1o", "4x0e")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from e3nn import o3

        sh = o3.spherical_harmonics(self.sh, x[..., :3], normalize=True, normalization="component")
        return self.linear(self.product(x, sh))


class _Ode(nn.Module):
    def __init__(self, method: str, adjoint: bool = False, buffer: bool = False, **options: Any) -> None:
        super().__init__()
        self.field, self.method, self.adjoint = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
            method,
            adjoint,
        )
        self.options = options
        self.register_buffer("times", torch.linspace(0, 1, 5) if buffer else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torchdiffeq

        times = torch.linspace(0.0, 1.0, 5) if self.times is None else self.times
        if self.adjoint:
            params = tuple(self.field.parameters())
            return torchdiffeq.odeint_adjoint(
                self._velocity, x, times, method=self.method, adjoint_params=params, **self.options
            )[-1]
        return torchdiffeq.odeint(self._velocity, x, times, method=self.method, **self.options)[-1]

    def _velocity(self, time: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.field(x) * (1 + time)


def _ode(name: str, *args: Any, **options: Any) -> Row:
    return Row(name, lambda: _Ode(*args, **options), regression(4, out=4))


TORCHDIFFEQ = rows(
    "torchdiffeq",
    _ode("odeint, euler", "euler"),
    _ode("odeint, rk4", "rk4"),
    _ode("odeint, midpoint, times in a buffer", "midpoint", buffer=True),
    _ode("odeint, rk4 by steps of 0.1", "rk4", options={"step_size": 0.1}),
    _ode("odeint, explicit_adams", "explicit_adams"),
    _ode("odeint_adjoint, rk4", "rk4", adjoint=True),
    _ode("odeint, dopri5", "dopri5"),
)


def _of(package: str, kind: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        return getattr(importlib.import_module(package), kind)(*args, **options)

    return build


def _likelihood(model: nn.Module, batch: Any) -> torch.Tensor:
    return -model(batch[1]).log_prob(batch[0]).mean()


ZUKO = rows(
    "zuko",
    Row(
        "NSF",
        _of("zuko.flows", "NSF", 3, 2, transforms=2, hidden_features=(8, 8)),
        lambda: (torch.randn(BATCH, 3), torch.randn(BATCH, 2)),
        loss_fn=_likelihood,
    ),
    Row(
        "MAF",
        _of("zuko.flows", "MAF", 3, 2, transforms=2, hidden_features=(8, 8)),
        lambda: (torch.randn(BATCH, 3), torch.randn(BATCH, 2)),
        loss_fn=_likelihood,
    ),
    Row(
        "GMM",
        _of("zuko.flows", "GMM", 3, 2, components=2),
        lambda: (torch.randn(BATCH, 3), torch.randn(BATCH, 2)),
        loss_fn=_likelihood,
    ),
    Row(
        "NICE",
        _of("zuko.flows", "NICE", 4, 2, transforms=2, hidden_features=(8, 8)),
        lambda: (torch.randn(BATCH, 4), torch.randn(BATCH, 2)),
        loss_fn=_likelihood,
    ),
)


def _table() -> Any:
    return torch.randint(0, 3, (BATCH, 2)), torch.randn(BATCH, 3), torch.randn(BATCH, 1)


def _of_table(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2])


def _of_numbers_first(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[1], batch[0]), batch[2])


TABLES = [
    *rows(
        "tab_transformer_pytorch",
        Row(
            "TabTransformer",
            _of(
                "tab_transformer_pytorch",
                "TabTransformer",
                mlp_act=nn.ReLU(),
                categories=(3, 3),
                num_continuous=3,
                dim=16,
                dim_out=1,
                depth=1,
                heads=2,
                dim_head=8,
                attn_dropout=0.0,
                ff_dropout=0.0,
                num_residual_streams=1,
            ),
            _table,
            loss_fn=_of_table,
        ),
        Row(
            "FTTransformer",
            _of(
                "tab_transformer_pytorch",
                "FTTransformer",
                categories=(3, 3),
                num_continuous=3,
                dim=16,
                dim_out=1,
                depth=1,
                heads=2,
                dim_head=8,
                attn_dropout=0.0,
                ff_dropout=0.0,
                num_residual_streams=1,
            ),
            _table,
            loss_fn=_of_table,
        ),
    ),
    *rows(
        "rtdl_revisiting_models",
        Row(
            "FTTransformer",
            _of(
                "rtdl_revisiting_models",
                "FTTransformer",
                n_cont_features=3,
                cat_cardinalities=[3, 3],
                d_out=1,
                n_blocks=1,
                d_block=16,
                attention_n_heads=2,
                attention_dropout=0.0,
                ffn_d_hidden_multiplier=2,
                ffn_dropout=0.0,
                residual_dropout=0.0,
            ),
            _table,
            loss_fn=_of_numbers_first,
        ),
    ),
]

OTHERS = [
    *rows("egnn_pytorch", Row("EGNN", _Egnn, pairs(4, 8, out=(4, 11)))),
    *rows("e3nn", Row("FullyConnectedTensorProduct", _Equivariant, pairs(10, out=(4,)))),
    *rows(
        "neuralop",
        Row(
            "FNO",
            _of("neuralop.models", "FNO", n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2),
            pairs(1, 8, 8),
        ),
    ),
    *rows(
        "siren_pytorch",
        Row(
            "SirenNet",
            _of("siren_pytorch", "SirenNet", dim_in=2, dim_hidden=16, dim_out=1, num_layers=2),
            regression(2, out=1),
        ),
    ),
]


class _Process(nn.Module):
    """An exact Gaussian process on the rows of a batch, by the marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        import gpytorch

        self.mean, self.kernel = (
            gpytorch.means.ConstantMean(),
            gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
        )
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        import gpytorch

        prior = gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))
        return -self.likelihood(prior).log_prob(y[:, 0]) / len(x)


GPYTORCH = rows("gpytorch", Row("exact GP, marginal likelihood", _Process, regression(2, out=1), loss_fn=_own))

SCIENCE = [*PYG, *TORCHDIFFEQ, *ZUKO, *TABLES, *OTHERS, *GPYTORCH]
