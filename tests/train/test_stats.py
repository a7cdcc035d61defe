"""`step.stats` beside hooks on eager torch."""

import copy

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def test_numbers_are_those_of_hooks(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)])
    plan = ts.ShardingPlan({"*.0.weight": P("model")}, default=P())
    step = step_of(model, mesh=(2, 2), plan=plan, accumulate_steps=2)
    alone = copy.deepcopy(model)
    stats = step.stats(step.init(seed=0), X)

    wanted = []
    for part in X.reshape(2, 2, -1, 6).swapaxes(0, 1).flatten(1, 2):  # each microbatch takes a part of each shard
        outputs = []

        def kept(module, given, output, outputs=outputs):
            output.retain_grad()
            outputs.append(output)

        hooks = [module.register_forward_hook(kept) for module in alone.modules()]
        (mean_square(alone, part) / 2).backward()
        for hook in hooks:
            hook.remove()
        wanted += outputs
    names = ["0.0", "0.1", "0", "1.0", "1.1", "1", "2.0", "2.1", "2", "Sequential"]
    assert [row.name for row in stats.rows][: len(wanted) // 2] == names
    for row, output in zip(stats.rows, wanted, strict=True):
        for numbers, tensor in ((row.output, output), (row.gradient, output.grad)):
            assert numbers.largest == pytest.approx(tensor.abs().max().item(), rel=1e-5)  # float32
            assert numbers.mean == pytest.approx(tensor.mean().item(), rel=1e-4, abs=1e-8)
            assert numbers.zeros == pytest.approx((tensor == 0).float().mean().item())
    assert len(str(stats).splitlines()) == len(stats.rows) + 1
    stats.save(tmp_path / "stats.svg")
    picture = (tmp_path / "stats.svg").read_text()
    assert picture.count('class="one"') == picture.count('class="two"') == len(stats.rows)  # dots
    with pytest.raises(
        ValueError, match=r"StepStats\.save: pictures are SVG, so the suffix must be \.svg, got '\.png'"
    ):
        stats.save("stats.png")
    assert not any(m._forward_hooks for m in model.modules())
