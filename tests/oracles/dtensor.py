"""Two processes of torch.distributed that split a model by `parallelize_module`: their shards, and what it returns."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

RANKS = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=None):
        hidden = self.norm(x)
        return x + self.down(torch.relu(self.up(hidden if scale is None else hidden * scale)))


class Net(nn.Module):
    """Tokens (batch, time) to logits (batch, time, 32)."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens() -> torch.Tensor:
    return torch.arange(16).reshape(4, 4) % 32


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def parallelize(styles: object, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Split the model so: for each process its part of each parameter, and under "output" the whole output."""
    torch.save(styles, folder / "styles.pt")
    command = [sys.executable, "-m", "tests.oracles.dtensor", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _serve(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    styles = torch.load(folder / "styles.pt", weights_only=False)
    model = parallelize_module(make_model(), init_device_mesh("cpu", (RANKS,)), styles)
    found = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    output = model(tokens())
    found["output"] = output.full_tensor() if isinstance(output, DTensor) else output
    torch.save({name: value.detach().clone() for name, value in found.items()}, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _main(folder: Path) -> None:
    """Import once, and fork before any thread starts."""
    children = list[int]()
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            _serve(rank, folder)
            os._exit(0)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
