"""Functions of torch in plain operators, where PyTorch's own way is no way for a trace."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import _reduction

from torch_shard._common.overrides import instead_of, instead_of_attribute


@instead_of(F.multilabel_margin_loss)
def multilabel_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.multilabel_margin_loss`, whose rule for traces counts what stands behind the first -1."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    x, labels = (t if t.ndim == 2 else t.reshape(1, -1) for t in (input, target))
    is_label = (labels < 0).cumsum(-1) == 0
    labels = torch.where(is_label, labels, 0)
    is_target = ((labels[:, :, None] == torch.arange(x.shape[1])) & is_label[:, :, None]).any(1)
    margins = (1 - x.gather(1, labels)[:, :, None] + x[:, None, :]).clamp(min=0)
    counted = is_label[:, :, None] & ~is_target[:, None, :]
    losses = torch.where(counted, margins, 0).sum((1, 2)) / x.shape[1]
    losses = losses if input.ndim == 2 else losses.squeeze(0)
    return {"mean": torch.mean, "sum": torch.sum, "none": torch.clone}[reduction](losses)


@instead_of_attribute(nn.AdaptiveLogSoftmaxWithLoss, "forward")
def adaptive_log_softmax(module: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """The forward of `nn.AdaptiveLogSoftmaxWithLoss` for all rows through all clusters; its own selects rows by value.

    A target that is no class gives NaN, where PyTorch raises.
    """
    if (input_.ndim, target_.ndim) not in ((2, 1), (1, 0)) or input_.shape[:-1] != target_.shape:
        raise RuntimeError(
            "AdaptiveLogSoftmaxWithLoss takes an input of shape (N, in_features) with a target of shape (N), or one "
            f"without N; got {tuple(input_.shape)} and {tuple(target_.shape)}."
        )
    x, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
    head = F.log_softmax(module.head(x), dim=1)
    bounds = [0, *module.cutoffs]
    output = head.gather(1, target.clamp(0, bounds[1] - 1)[:, None])[:, 0]
    for i, (low, high) in enumerate(itertools.pairwise(bounds[1:])):
        within = F.log_softmax(module.tail[i](x), dim=1).gather(1, (target - low).clamp(0, high - low - 1)[:, None])
        of_cluster = head[:, module.shortlist_size + i] + within[:, 0]
        output = torch.where((target >= low) & (target < high), of_cluster, output)
    output = torch.where((target >= 0) & (target < bounds[-1]), output, torch.nan)
    loss = (-output).mean()
    result = nn.modules.adaptive._ASMoutput
    return result(output.reshape(target_.shape), loss)


@instead_of(torch._C._nn.multilabel_margin_loss)  # pyright: ignore[reportAttributeAccessIssue]
def _numbered(input: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    return multilabel_margin_loss(input, target, reduction=("none", "mean", "sum")[reduction])


def _with_dense_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An embedding whose gradient has the same values, but is not a sparse tensor, which JAX does not have."""
    signature = inspect.signature(function)

    def embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        given.arguments["sparse"] = False
        return function(*given.args, **given.kwargs)

    return embedding


for _function in (F.embedding, F.embedding_bag):
    instead_of(_function)(_with_dense_gradient(_function))
