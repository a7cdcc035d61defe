"""Metric objects of torchmetrics that a captured callable updates: kept out of the program.

Their state is Python's, and their checks read values. So a capture notes the call, and the tensors in it come out of
the program; whoever runs it then makes the same call on the object itself.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.guards import metric_kinds
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.patching import patched

_LATER = ("compute", "reset", "merge_state", "state_dict", "load_state_dict")


@dataclasses.dataclass(frozen=True)
class MetricCall:
    """One call of `update`: of which object, and with what besides tensors.

    Attributes:
        metric: The object.
        dtypes: Of the tensors.
    """

    metric: Any
    dtypes: tuple[torch.dtype, ...]
    _leaves: tuple[object, ...]
    _tree: torch_pytree.TreeSpec

    @property
    def key(self) -> Hashable:
        """The same for calls that are alike; what is no plain value is told apart by object."""
        leaves = tuple(leaf if isinstance(leaf, (int, float, str, type)) else id(leaf) for leaf in self._leaves)
        return id(self.metric), self.dtypes, leaves, str(self._tree)

    def update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the call with these tensors, on the host."""
        given = (t.to(dtype) for t, dtype in zip(tensors, self.dtypes, strict=True))
        leaves = [next(given) if leaf is torch.Tensor else leaf for leaf in self._leaves]
        args, kwargs = torch_pytree.tree_unflatten(leaves, self._tree)
        self.metric.update(*args, **kwargs)


class MetricCalls:
    """The calls of metric objects in a capture, in order."""

    def __init__(self) -> None:
        self.calls: list[MetricCall] = []
        self.tensors: list[list[torch.Tensor]] = []
        """Of each call; they are of the capture."""
        self._mode, self._own = current_mode(), False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note them, instead of letting them happen."""
        with contextlib.ExitStack() as stack:
            for kind in metric_kinds():
                stack.enter_context(patched(kind, "__getattribute__", self._instead))
            yield

    def _instead(self, original: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
        found = {"update": self._update, "forward": self._forward} | dict.fromkeys(_LATER, self._refuse)

        def getattribute(metric: Any, name: str) -> Any:
            if name in found and not self._own:
                return functools.partial(found[name], metric)
            return original(metric, name)

        return getattribute

    def _update(self, metric: nn.Module, *args: Any, **kwargs: Any) -> None:
        if current_mode() is not self._mode:
            self._refuse(metric)
        leaves, tree = torch_pytree.tree_flatten((args, kwargs))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple(torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.calls.append(MetricCall(metric, tuple(t.dtype for t in tensors), others, tree))
        self.tensors.append(tensors)

    def _forward(self, metric: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the update; the result is that of the batch alone, which a program can compute."""
        self._update(metric, *args, **kwargs)
        self._own = True
        try:
            fresh = copy.deepcopy(metric)
            fresh.sync_on_compute = False  # a compiled step has the whole batch
            fresh.reset()
            fresh.update(*args, **kwargs)
            return fresh.compute()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotImplementedError(
                f"{current_user_line()}\nHere {type(metric).__name__} gives its value for this batch, which depends on "
                "the values of tensors in a way that cannot be compiled. Call its update(...) in loss_fn, which is "
                "made after each step, and compute() outside."
            ) from error
        finally:
            self._own = False

    def _refuse(self, metric: object, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"{current_user_line()}\nHere the captured function uses what a {type(metric).__name__} has gathered in "
            "earlier steps, or updates it within a repeated layer. Only update(...) in loss_fn itself can be kept: it "
            "is made after each step. Call the rest after the step, where it has its values."
        )
