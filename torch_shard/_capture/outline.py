"""What a torch function would give in the capture under way: shapes and dtypes, without a graph."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.fakes import rehearse
from torch_shard._capture.function_mode import add_modules, current_mode


@dataclasses.dataclass(frozen=True)
class Outline:
    """The outline of a call.

    Attributes:
        result: What it returned, with fakes for tensors.
        fault: Why only PyTorch itself can run it: what it does besides returning new tensors; empty if nothing.
    """

    result: Any
    fault: str


def outline(fn: Callable[[], Any]) -> Outline:
    """Run a function within a capture on fakes of its own; the capture depends on the modules that ran."""
    needs_grad = torch.is_grad_enabled()

    def run() -> Outline:
        with torch.set_grad_enabled(needs_grad):
            result = fn()
        capture_mode = current_mode()
        assert capture_mode is not None
        given = [fake for fake, _ in capture_mode.standins()]
        results = [leaf for leaf in torch_pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(fake._version for fake in given):
            return Outline(result, "writes in place to a tensor that it is given or reaches")
        memory = {fake.untyped_storage()._cdata for fake in given}
        if not all(map(capture_mode.is_of_capture, results)) or any(
            r.untyped_storage()._cdata in memory for r in results
        ):
            return Outline(result, "returns a tensor that it is given, or a view of one")
        return Outline(result, "")

    found, flags = rehearse(run)
    add_modules(flags)
    return found
