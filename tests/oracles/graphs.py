"""The functional graph that a capture makes of a function, before it is lowered."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.ops import keeps_whole


def nodes_of(fn: Any, inputs: Sequence[torch.Tensor]) -> list[torch.fx.Node]:
    """All nodes; of the inputs only shapes and dtypes are read."""

    def outputs(*given: torch.Tensor) -> tuple[list[torch.Tensor], None]:
        found = fn(*given)
        return [found] if isinstance(found, torch.Tensor) else list(found), None

    specs = [Spec(tuple(x.shape), x.dtype) for x in inputs]
    return list(capture(outputs, specs, keep=keeps_whole).module.graph.nodes)


def targets_of(fn: Any, inputs: Sequence[torch.Tensor]) -> set[Any]:
    """The operators of them."""
    return {node.target for node in nodes_of(fn, inputs)}
