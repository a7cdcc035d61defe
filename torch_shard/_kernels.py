"""Operators that a capture puts in the place of ATen's own where ATen's shape rules refuse what its kernels take."""

import torch
from torch.fx import Node

from torch_shard._common.fx import args_of, call_before, dtype_of, shape_of
from torch_shard._common.overrides import instead_of_operator, rewrites

aten = torch.ops.aten


@torch.library.custom_op("torch_shard::grouped_mm", mutates_args=())
def _grouped_mm(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_grouped_mm.register_fake
def _grouped_shape(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    groups = () if offs is None or (x.ndim, y.ndim) != (2, 2) else (len(offs),)
    batch = (len(x),) if x.ndim == y.ndim == 3 else ()
    return torch.empty((*groups, *batch, x.shape[-2], y.shape[-1]), dtype=dtype, device="cpu")


@instead_of_operator(aten._grouped_mm.default)
def grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`aten._grouped_mm`, whose own shape rule takes nothing but bfloat16."""
    if bias is not None:
        raise NotImplementedError("grouped_mm with a bias, which PyTorch's own kernels refuse too: add it after.")
    if (offs is None) != (x.ndim == y.ndim == 3):
        raise ValueError(
            f"grouped_mm takes offs exactly where an operand has two dims; got shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)} {'without' if offs is None else 'with'} offs."
        )
    return torch.ops.torch_shard.grouped_mm(x, y, offs, out_dtype or x.dtype)


@torch.library.custom_op("torch_shard::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_cross_entropy_backward.register_fake
def _logits_shape(grad: torch.Tensor, logits: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("torch_shard::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_cross_entropy.register_fake
def _loss_shapes(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(() if reduction else target.shape), logits.new_empty(())


_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@rewrites(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _merge_cross_entropy(node: Node) -> Node | None:
    """The loss straight from the logits: the log-softmax of all classes is nowhere needed."""
    logp = args_of(node)[0]
    if not _is_over_classes(logp):
        return None
    with node.graph.inserting_before(node):
        args = (args_of(logp)[0], *args_of(node)[1:])
        merged = node.graph.call_function(torch.ops.torch_shard.cross_entropy.default, args)
    merged.meta = dict(node.meta)
    return merged


@rewrites(aten._log_softmax_backward_data.default)
def _merge_cross_entropy_backward(node: Node) -> Node | None:
    """The gradient of logits straight from them, with no tensor of the gradient of their log-softmax."""
    grad, logp = args_of(node)[:2]
    if grad.target not in _NLL_BACKWARD or args_of(grad)[1] is not logp or not _is_over_classes(logp):
        return None
    args = (args_of(grad)[0], args_of(logp)[0], *args_of(grad)[2:])
    return call_before(node, torch.ops.torch_shard.cross_entropy_backward.default, args, shape_of(node))


def _is_over_classes(node: Node) -> bool:
    """Whether `node` is the log-softmax over the dim of the classes, in the dtype of its logits."""
    rank = len(shape_of(node))
    if node.target is not aten._log_softmax.default or not rank:
        return False
    logits, dim, _ = args_of(node)
    return dim % rank == min(1, rank - 1) and dtype_of(node) == dtype_of(logits)
