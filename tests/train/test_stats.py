"""`step.stats` beside hooks on eager torch."""

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.tables.cases import chosen

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("options", chosen([{}, {"accumulate_steps": 2}], [{"accumulate_steps": 2}]))
def test_numbers_are_those_of_hooks(options, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)])
    mesh, plan = ts.make_mesh(batch=2, model=2), ts.ShardingPlan({"*.0.weight": P("model")}, default=P())
    step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), mesh=mesh, plan=plan, **options)
    stats = step.stats(step.init(seed=0), X)

    wanted = []
    num = options.get("accumulate_steps", 1)
    shards = X.reshape(2, num, -1, 6).swapaxes(0, 1).reshape(num, -1, 6)  # each microbatch takes a part of each shard
    for part in shards:
        outputs = []

        def kept(module, given, output, outputs=outputs):
            output.retain_grad()
            outputs.append(output)

        hooks = [module.register_forward_hook(kept) for module in model.modules()]
        (loss_fn(model, part) / num).backward()
        for hook in hooks:
            hook.remove()
        wanted += outputs
    assert [row.name for row in stats.rows][: len(wanted) // num] == [
        *["0.0", "0.1", "0", "1.0", "1.1", "1", "2.0", "2.1", "2", "Sequential"]
    ]
    for row, output in zip(stats.rows, wanted, strict=True):
        for numbers, tensor in ((row.output, output), (row.gradient, output.grad)):
            assert numbers.largest == pytest.approx(tensor.abs().max().item(), rel=1e-5)  # float32
            assert numbers.mean == pytest.approx(tensor.mean().item(), rel=1e-4, abs=1e-8)
            assert numbers.zeros == pytest.approx((tensor == 0).float().mean().item())
    assert len(str(stats).splitlines()) == len(stats.rows) + 1
    stats.save(tmp_path / "stats.svg")
    assert "<svg" in (tmp_path / "stats.svg").read_text()
    assert not any(m._forward_hooks for m in model.modules())
