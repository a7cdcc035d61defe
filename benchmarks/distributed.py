"""Ours on two devices against torch's own ways to split a model over two processes (gloo, one thread each).

The processes wait on a pipe while it is our turn. All have the same values, the same global batch, the same AdamW.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import torch_shard as ts
from benchmarks import cases, sides
from benchmarks.models import GPT
from benchmarks.rows import Row, timed
from benchmarks.timing import race

RANKS = 2
STRATEGIES = {"DDP": {"batch": RANKS}, "FSDP2": {"batch": RANKS}, "DTensor tensor parallel": {"model": RANKS}}


def rows(quick: bool) -> Iterator[Row]:
    """The GPT, split by batch and by model."""
    for strategy, axes in list(STRATEGIES.items())[: 1 if quick else None]:
        torch.manual_seed(0)
        case = cases.gpt(quick)
        mesh = ts.make_mesh(batch=axes.get("batch", 1), model=axes.get("model", 1))
        specs = zero3_specs(case.model) if strategy == "FSDP2" else case.specs
        ours = sides.Ours(case.model, case.loss_fn, mesh, specs)
        with Ranks(strategy, quick) as rival:
            times = race({"ours": ours, strategy: rival}, case.batch, 3 if quick else 21)
        yield timed(f"GPT, 2 devices ÷ torch {strategy}", times["ours"], times[strategy])


def zero3_specs(model: torch.nn.Module) -> dict[str, Any]:
    """Every parameter split over `batch` along its first dim, as FSDP does."""
    from jax.sharding import PartitionSpec as P

    return {name: P("batch") for name, _ in model.named_parameters()}


class Ranks:
    """Two processes that train together; a call is one step, and gives the loss of the global batch."""

    def __init__(self, strategy: str, quick: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            args = (rank, strategy, quick, f"file://{self._folder.name}/store", there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()  # so that a dead process is an end of file, not a wait for ever
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
        self._folder.cleanup()

    def __call__(self, batch: Any) -> float:
        for pipe in self._pipes:
            pipe.send([t.numpy() for t in batch])
        return float(np.mean([pipe.recv() for pipe in self._pipes]))


def _serve(rank: int, strategy: str, quick: bool, store: str, pipe: Any) -> None:
    """One process: a step for each batch that arrives."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    case = cases.gpt(quick)
    model = _SPLIT[strategy](case.model)
    optimizer = sides.torch_adamw(model)
    while True:
        try:
            batch = tuple(torch.from_numpy(a) for a in pipe.recv())
        except EOFError:
            break
        if "batch" in STRATEGIES[strategy]:
            batch = tuple(t.chunk(RANKS)[rank] for t in batch)
        optimizer.zero_grad()
        loss = case.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        pipe.send(loss.item())
    torch.distributed.destroy_process_group()


def _ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp(model: GPT) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: GPT) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    split = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    split |= {name: RowwiseParallel() for name in ("o", "down")}
    for block in model.h:
        parallelize_module(block, mesh, split)
        block.heads //= RANKS  # of this process
    return model


_SPLIT: dict[str, Any] = {"DDP": _ddp, "FSDP2": _fsdp, "DTensor tensor parallel": _tensor_parallel}
