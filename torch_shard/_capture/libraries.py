"""What libraries ask of the values of tensors: metric objects of torchmetrics, and functions in plain operators.

A function is replaced only while its source is, to the letter, one that was read here. Another one stays as it is, and
is refused where it asks. The state of a metric object is Python's, and its checks read values. So a capture notes its
`update`, and the tensors in it come out of the program; whoever runs it then makes the same call on the object itself.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.guards import metric_kinds
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.overrides import instead_of_attribute
from torch_shard._common.patching import patched


@instead_of_attribute(
    "pytorch_metric_learning.reducers.threshold_reducer.ThresholdReducer", "element_reduction_helper", "691b923c"
)
def _mean_within(original: Callable[..., Any], reducer: Any, losses: torch.Tensor, embeddings: torch.Tensor) -> Any:
    """The mean of the losses between two bounds, if there are any; its own counts them in Python."""
    if reducer.collect_stats:
        return original(reducer, losses, embeddings)
    counts = torch.ones_like(losses, dtype=torch.bool)
    counts = counts if reducer.low is None else counts & (losses > reducer.low)
    counts = counts if reducer.high is None else counts & (losses < reducer.high)
    number, wide = counts.sum(), torch.promote_types(losses.dtype, torch.float32)
    mean = torch.where(counts, losses, 0).sum(dtype=wide) / number.clamp(min=1)
    return torch.where(number > 0, mean.to(losses.dtype), reducer.zero_loss(embeddings))


@instead_of_attribute("torchmetrics.functional.regression.pearson", "_pearson_corrcoef_compute", "31b296f2")
@instead_of_attribute("torchmetrics.functional.regression.concordance", "_pearson_corrcoef_compute", "31b296f2")
@instead_of_attribute("torchmetrics.regression.pearson", "_pearson_corrcoef_compute", "31b296f2")
def _pearson(original: Callable[..., Any], *sums: torch.Tensor) -> torch.Tensor:
    """The correlation of each output, NaN where one side hardly varies; its own asks whether there is any other."""
    max_x, max_y, var_x, var_y, cov, number = sums
    var_x, var_y, cov = (of / (number - 1) for of in (var_x, var_y, cov))
    if var_x.dtype == torch.float16:
        var_x, var_y = var_x.bfloat16(), var_y.bfloat16()
    var_x, var_y, cov = var_x * torch.pow(max_x, -2), var_y * torch.pow(max_y, -2), cov / (max_x * max_y)
    bound = math.sqrt(torch.finfo(var_x.dtype).eps)
    valid = (var_x >= bound) & (var_y >= bound) & torch.isfinite(var_x) & torch.isfinite(var_y) & torch.isfinite(cov)
    found = torch.where(valid, cov, 0) / torch.where(valid, var_x * var_y, 1).sqrt()
    return torch.where(valid, found.to(cov.dtype), torch.nan).clamp(-1.0, 1.0).squeeze()


@instead_of_attribute("linear_operator.utils.cholesky", "_psd_safe_cholesky", "f5912ae8")
def _safe_cholesky(
    original: Callable[..., Any],
    A: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    jitter: float | None = None,
    max_tries: int | None = None,
) -> torch.Tensor:
    """A Cholesky factor, of a matrix with a larger diagonal if need be; where that does not do, NaN, and no error."""
    settings: Any = sys.modules["linear_operator.settings"]
    if out is not None or settings.trace_mode.on():
        return original(A, out=out, jitter=jitter, max_tries=max_tries)
    first = settings.cholesky_jitter.value(A.dtype) if jitter is None else jitter
    tries = settings.cholesky_max_tries.value() if max_tries is None else max_tries
    identity = torch.eye(A.shape[-1], dtype=A.dtype)

    def added(matrix: torch.Tensor, info: torch.Tensor) -> torch.Tensor:
        amount = torch.zeros(info.shape, dtype=matrix.dtype)
        for i in range(tries):
            info = torch.linalg.cholesky_ex(matrix + amount[..., None, None] * identity).info if i else info
            amount = torch.where(info > 0, first * 10**i, amount)
        return amount

    def nothing(matrix: torch.Tensor, info: torch.Tensor) -> torch.Tensor:
        return torch.zeros(info.shape, dtype=matrix.dtype)

    with torch.no_grad():
        info = torch.linalg.cholesky_ex(A).info
        amount = torch.cond(info.any(), added, nothing, (A.detach(), info))
    return torch.linalg.cholesky_ex(A + amount[..., None, None] * identity).L


@instead_of_attribute("transformers.models.*.*DropPath", "forward", "b450dbf4")
def _drop_path(original: Callable[..., Any], module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Its own, but with a rate that layers may have each of their own and still be one program."""
    if module.drop_prob == 0.0 or not module.training:
        return hidden_states
    keep = _kept(module, torch.promote_types(hidden_states.dtype, torch.float32))
    shape = (hidden_states.shape[0],) + (1,) * (hidden_states.ndim - 1)
    drawn = torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
    return hidden_states.div(keep) * torch.floor(drawn + keep)


_KEPT = weakref.WeakKeyDictionary[Any, tuple[float, torch.Tensor]]()


def _kept(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The share that drop path keeps, as a tensor from outside, of which a layer's program knows no value.

    Captures of one module have the same tensor while its rate is the same, so that they are alike.
    """
    share, found = _KEPT.get(module, (None, None))
    if found is None or share != 1 - module.drop_prob or found.dtype != dtype:
        with _disable_current_modes():
            found = torch.tensor(share := 1 - module.drop_prob, dtype=dtype)
        _KEPT[module] = share, found
    return found


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
