"""Importing torch_shard, and training with it, leaves ordinary CPU torch as it is."""

import subprocess
import sys
import textwrap

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

    def state():
        return (
            dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
            list(logging.root.handlers), dict(jax.config.values), torch.backends.mha.get_fastpath_enabled(),
            threading.active_count(), sys.gettrace(), sys.getprofile(), list(sys.path), torch.initial_seed(),
        )
"""

AFTERWARDS = """
    import logging, os, signal, sys, threading, warnings
    import torch._dynamo, torch._inductor.config, torch.fx.experimental.proxy_tensor, torch.testing, torch.distributed
    results, names_before = ordinary(), names()
    import jax, optax, orbax.checkpoint, tensorboardX, torchax  # whose own effects are not ours
    state_before = state()
    import torch_shard as ts
    assert state() == state_before
    names_after = names()
    assert [name for name in names_before if names_before[name] != names_after.get(name)] == []
    added = {name for place, name in names_after.keys() - names_before.keys() if place == "Tensor"}
    assert sorted(added) == ["apply_jax", "apply_jax_", "is_jax", "jax", "shard_"]
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.get_default_device().type == "cpu"
    assert not torch.accelerator.is_available()
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
    assert jax.device_count() == 3
    assert same(results, ordinary())

    from jax.sharding import PartitionSpec as P
    plan, mesh = ts.ShardingPlan({}, default=P()), ts.make_mesh(batch=1)
    step = ts.make_train_step(nn.Linear(4, 1), lambda m, x: m(x).mean(), optax.sgd(0.1), mesh=mesh, plan=plan)
    state, _ = step(step.init(), torch.ones(2, 4))
    torch.ones(2, device="jax") + 1
    # torch_shard's own random keys follow torch.manual_seed, which every call of ordinary() makes.
    assert same(results, ordinary())
    for batch in torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2, num_workers=2):
        state, _ = step(state, batch)
    assert int(state.step) == 4
"""


def test_neither_the_import_nor_a_step_changes_ordinary_torch(tmp_path) -> None:
    """What no import replaces costs no speed either; `docs/guides/remembers.md` says what it adds."""
    source = textwrap.dedent(ORDINARY_TORCH) + textwrap.dedent(AFTERWARDS)
    command = [sys.executable, "-W", "ignore", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


ACCELERATOR = """
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard

    def ordinary():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        fully_shard(model)
        model(torch.ones(3, 4)).square().sum().backward()
        accelerator = torch.accelerator.current_accelerator()
        return [p.grad.full_tensor() for p in model.parameters()], accelerator, torch.get_device_module()

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    gradients, *before = ordinary()
    import torch_shard as ts
    again, *after = ordinary()
    assert all(map(torch.equal, gradients, again))
    assert before == after, (before, after)
    assert nn.Linear(4, 2).to("jax").weight.device.type == "jax"
    ts.register()  # a second time
    assert torch.accelerator.current_accelerator() == before[0]
    distributed.destroy_process_group()
"""


def test_the_accelerator_of_torch_is_what_it_was(tmp_path) -> None:
    """`fully_shard` asks for it, and shards on the CPU where there is none."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ACCELERATOR)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
