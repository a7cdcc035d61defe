"""Importing torch_shard, and training with it, leaves ordinary CPU torch as it is."""

import subprocess
import sys
import textwrap

import pytest

ORDINARY_TORCH = """
    import torch
    from torch import nn

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.full((2,), float(i))

    def ordinary():
        '''Results of ordinary torch code, to be the same before and after.'''
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))
        x = torch.randn(3, 4)
        out = model(x)
        out.square().sum().backward()
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        with torch.inference_mode():
            attended = attention(*[torch.ones(1, 3, 8)] * 3)[0]
        loader = torch.utils.data.DataLoader(Rows(), batch_size=3, num_workers=1, multiprocessing_context="fork")
        compiled = torch.compile(lambda x: (x.sin() * 2).sum(), backend="aot_eager")
        y = torch.ones(3, requires_grad=True)
        compiled(y).backward()
        return [out, *(p.grad for p in model.parameters()), attended, *loader, y.grad, torch.rand(3)]

    def same(before, after):
        return all(type(a) is type(b) and torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def names():
        places = {"torch": torch, "Tensor": torch.Tensor, "Module": nn.Module, "F": nn.functional, "Linear": nn.Linear}
        return {(place, name): id(value) for place, owner in places.items() for name, value in vars(owner).items()}
"""

TRAIN = """
    import jax, optax, torch_shard as ts
    from jax.sharding import PartitionSpec as P
    mesh = ts.make_mesh(batch=1)
    step = ts.make_train_step(nn.Linear(4, 1), lambda m, x: m(x).mean(), optax.sgd(0.1), mesh=mesh,
                              plan=ts.ShardingPlan({}, default=P()))
    state, _ = step(step.init(), torch.ones(2, 4))
    torch.ones(2, device="jax") + 1
"""


def run(program: str) -> str:
    source = textwrap.dedent(ORDINARY_TORCH) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("import torch_shard", id="after the import", marks=pytest.mark.slow),  # the other imports too
        pytest.param(TRAIN, id="after a training step"),
    ],
)
def test_ordinary_code_gives_the_same_results_and_types(then: str) -> None:
    # torch_shard's own random keys follow torch.manual_seed, which every call of ordinary() makes.
    program = f"before = ordinary()\n{textwrap.dedent(then)}\nassert same(before, ordinary())"
    run(program)


def test_the_import_replaces_nothing_of_torch() -> None:
    """What no import replaces costs no speed either."""
    program = """
    import torch._dynamo, torch._inductor.config, torch.fx.experimental.proxy_tensor, torch.testing, torch.distributed
    before = names()
    import torch_shard
    after = names()
    changed = [name for name in before if before[name] != after.get(name)]
    added = {name for place, name in after.keys() - before.keys() if place == "Tensor"}
    print(changed, sorted(added))
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.get_default_device().type == "cpu"
    assert not torch.accelerator.is_available()
    """
    changed, _, added = run(program).strip().partition("] ")
    assert changed == "["
    assert added == "['apply_jax', 'apply_jax_', 'is_jax', 'jax', 'shard_']"


def test_the_import_starts_no_backend() -> None:
    run("""
    import torch_shard, jax
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
    assert jax.device_count() == 3
    """)


def test_dataloader_workers_feed_a_step() -> None:
    run(
        TRAIN
        + """
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2, num_workers=2)
    for batch in loader:
        state, _ = step(state, batch)
    assert int(state.step) == 4
    """
    )
