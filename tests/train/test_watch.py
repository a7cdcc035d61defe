"""Norms by module (`watch=`) beside eager torch."""

import copy

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def make(model, watch, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = ts.ShardingPlan({"**.0.weight": P("model")}, default=P())
    return step_of(model, optimizer=sgd, mesh=(2, 2), plan=plan, watch=watch, **options)


def test_norms_are_torchs(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 1))
    eager = copy.deepcopy(model)
    step = make(model, ["*", "2.0"], clip_grad_norm=0.01)
    _, metrics = step(step.init(seed=0), X)
    mean_square(eager, X).backward()
    grads = {name: p.grad.clone() for name, p in eager.named_parameters()}
    scale = 0.01 / (torch.stack([g.norm() for g in grads.values()]).norm() + 1e-6)
    names = {name for name in metrics if name.startswith("grad_norm/")}
    assert names == {f"grad_norm/{module}" for module in ("0", "1", "2", "3", "4", "2.0")}
    for name in names:
        module = name.partition("/")[2]
        wanted = torch.stack([g.norm() for n, g in grads.items() if n.startswith(f"{module}.")]).norm()
        assert float(metrics[name]) == pytest.approx(wanted.item(), rel=1e-5)
        assert float(metrics[f"update_norm/{module}"]) == pytest.approx((0.1 * scale * wanted).item(), rel=1e-3)
    step.prove(step.init(seed=0), X).raise_if_different()


@pytest.mark.parametrize(("watch", "error", "says"), [
    ("layers.*", ValueError, r"watch has 'layers\.\*', which is not a module with parameters that are trained"),
    (3, TypeError, "watch must be a name or a glob"),
])  # fmt: skip
def test_bad_names_are_refused(watch, error, says):
    with pytest.raises(error, match=says):
        make(nn.Sequential(nn.Sequential(nn.Linear(6, 6))), watch)
