"""What the tests of maps and collectives share."""

from typing import Any

import torch

import torch_shard as ts

CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32, sums in another order
MESH = {"i": 4, "j": 2}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, of: str = "") -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE, msg=lambda text: f"{of}: {text}")


def shard_map(fn: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    return ts.jax_shard_map(fn, mesh=ts.make_mesh(**MESH), in_specs=in_specs, out_specs=out_specs, **options)
