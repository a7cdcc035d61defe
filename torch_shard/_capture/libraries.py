"""Functions of libraries that ask for values of tensors, in plain operators.

A function is replaced only while its source is, to the letter, one that was read here. Another one stays as it is, and
is refused where it asks.
"""

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._common.overrides import instead_of_attribute


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
