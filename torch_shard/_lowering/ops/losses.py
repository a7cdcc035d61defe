"""Negative log-likelihood and cross entropy over class indices.

Classes are picked by a gather, which stays on the shards of a split class dim; what is wanted for the targets alone is
computed for them alone. PyTorch refuses a target that is no class; a program can only be loud, by NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch.fx import Node

from torch_shard._common.dtypes import jax_dtype, widened
from torch_shard._common.fx import RESHAPES, args_of, dtype_of, new_before, shape_of, target_of
from torch_shard._common.overrides import captured_op, instead_of, rewrites
from torch_shard._lowering.ops.registry import lowers

aten = torch.ops.aten


@captured_op(
    "torch_shard::cross_entropy",
    "(Tensor logits, Tensor target, Tensor? weight, SymInt reduction, SymInt ignore_index, SymInt[] rows, "
    "ScalarType dtype) -> (Tensor, Tensor)",
)
def _loss_shapes(logits, target, weight, reduction, ignore_index, rows, dtype):
    shape = () if reduction else target.shape
    return logits.new_empty(shape, dtype=dtype), logits.new_empty((), dtype=dtype)


@captured_op(
    "torch_shard::cross_entropy_backward",
    "(Tensor grad, Tensor logits, Tensor target, Tensor? weight, SymInt reduction, SymInt ignore_index, "
    "SymInt[] rows, Tensor total_weight) -> Tensor",
)
def _logits_shape(grad, logits, *_):
    return torch.empty_like(logits)


_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@rewrites(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _merge_cross_entropy(node: Node) -> Node | None:
    """The loss straight from the logits: the log-softmax of all classes is nowhere needed."""
    logp, *rest = args_of(node)
    if not _is_over_classes(logp):
        return None
    logits = args_of(logp)[0]
    steps = steps_of(logits, reduced=bool(rest[2]))
    args = (source_of(steps, logits), *rest, rows_of(steps), dtype_of(logits))
    return new_before(node, torch.ops.torch_shard.cross_entropy.default, args, node.meta["val"])


@rewrites(aten._log_softmax_backward_data.default)
def _merge_cross_entropy_backward(node: Node) -> Node | None:
    """The gradient of logits straight from them, with no tensor of the gradient of their log-softmax."""
    grad, logp = args_of(node)[:2]
    if grad.target not in _NLL_BACKWARD or args_of(grad)[1] is not logp or not _is_over_classes(logp):
        return None
    (given, _, *rest, total), logits = args_of(grad), args_of(logp)[0]
    steps = steps_of(logits, reduced=bool(rest[2]))
    source = source_of(steps, logits)
    args = (given, source, *rest, rows_of(steps), total)
    target = torch.ops.torch_shard.cross_entropy_backward.default
    return along(steps, new_before(node, target, args, source.meta["val"]), node)


def _is_over_classes(node: Node) -> bool:
    """Tell whether `node` is the log-softmax over the dim of the classes, in the dtype of its logits."""
    rank = len(shape_of(node))
    if node.target is not aten._log_softmax.default or not rank:
        return False
    logits, dim, _ = args_of(node)
    return dim % rank == min(1, rank - 1) and dtype_of(node) == dtype_of(logits)


def _class_axis(x):
    return min(1, x.ndim - 1)


def _weights(x, target, weight, ignore_index, *, axis, dtype):
    """The weight of each target: 0 where it is ignored, NaN where it is no class."""
    num_classes = x.shape[axis]
    own = jnp.ones((), dtype) if weight is None else weight[jnp.clip(target, 0, num_classes - 1)]
    is_class = (target >= 0) & (target < num_classes)
    return jnp.where(target == ignore_index, 0, jnp.where(is_class, own, jnp.nan))


def _at_targets(x, target, axis):
    index = jnp.expand_dims(jnp.clip(target, 0, x.shape[axis] - 1), axis)
    return jnp.take_along_axis(x, index.reshape((1,) if x.ndim == 1 else index.shape), axis, mode="clip")


def _reduced(own, target, weights, reduction):
    """Loss and total weight from the log-probabilities of the targets; reduction 0 stands for none, 1 mean, 2 sum."""
    loss = jnp.where(weights == 0, 0, -own.reshape(target.shape) * weights)
    total = jnp.sum(weights)
    if reduction == 0:
        return loss, jnp.zeros((), own.dtype)
    return jnp.sum(loss) / (total if reduction == 1 else 1), total.astype(own.dtype)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(logp, target, weight, reduction, ignore_index):
    """Returns `(loss, total weight)`. The class dim is 1, or 0 without a batch."""
    axis = _class_axis(logp)
    weights = _weights(logp, target, weight, ignore_index, axis=axis, dtype=logp.dtype)
    return _reduced(_at_targets(logp, target, axis), target, weights, reduction)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(grad, logp, target, weight, reduction, ignore_index, total_weight):
    axis = _class_axis(logp)
    weights = _weights(logp, target, weight, ignore_index, axis=axis, dtype=logp.dtype)
    scale = _scale(grad, weights, reduction, total_weight, axis)
    return jnp.where(_is_target(logp, target, axis), -scale, 0).astype(logp.dtype)


@lowers(torch.ops.torch_shard.cross_entropy.default)
def cross_entropy(logits, target, weight, reduction, ignore_index, rows, dtype):
    """`nll_loss_forward` of the log-softmax, in this dtype.

    With `rows` logits have the classes last, and targets are for these rows of them, flat: others are ignored.
    """
    axis, target, dtype = *_rows(logits, target, ignore_index, rows), jax_dtype(dtype)
    highest, total = _normaliser(logits, axis)
    own = (_at_targets(logits, target, axis) - highest - total).astype(dtype)
    weights = _weights(logits, target, weight, ignore_index, axis=axis, dtype=dtype)
    return _reduced(own, target, weights, reduction)


@lowers(torch.ops.torch_shard.cross_entropy_backward.default)
def cross_entropy_backward(grad, logits, target, weight, reduction, ignore_index, rows, total_weight):
    """The gradient of `cross_entropy` by the logits."""
    axis, target = _rows(logits, target, ignore_index, rows)
    weights = _weights(logits, target, weight, ignore_index, axis=axis, dtype=total_weight.dtype)
    scale = _scale(grad, weights, reduction, total_weight, axis)
    highest, total = _normaliser(logits, axis)
    logits = jax.lax.optimization_barrier(logits)  # else what the sum is of is kept, which is wide
    return (jnp.exp(logits - highest - total) * scale - jnp.where(_is_target(logits, target, axis), scale, 0)).astype(
        logits.dtype
    )


def _rows(logits, target, ignore_index, rows):
    """The dim of the classes, and the target of each row of the logits."""
    if not rows:
        return _class_axis(logits), target
    missing = [(0, size - kept) for size, kept in zip(logits.shape, rows, strict=False)]
    return logits.ndim - 1, jnp.pad(target.reshape(rows), missing, constant_values=ignore_index)


def _normaliser(logits, axis):
    """The highest logit and the logarithm of the sum of exponentials less it: the same in both passes, so made once."""
    wide = widened(logits)
    highest = jnp.max(wide, axis, keepdims=True)
    return highest, jnp.log(jnp.sum(jnp.exp(wide - highest), axis, keepdims=True))


def _scale(grad, weights, reduction, total_weight, axis):
    """Factor of each target's gradient, with a class dim of size 1."""
    grad = grad / total_weight if reduction == 1 else grad
    return jnp.expand_dims(jnp.where(weights == 0, 0, grad * weights), axis)


def _is_target(x, target, axis):
    return jax.lax.broadcasted_iota(target.dtype, x.shape, axis) == jnp.expand_dims(target, axis)


def linear_cross_entropy(*args: Any, options: object = None, **kwargs: Any) -> torch.Tensor:
    """The loss by PyTorch's own reference, whatever the options of its chunks."""
    return F.linear_cross_entropy(*args, **kwargs)


if hasattr(F, "linear_cross_entropy"):
    instead_of(F.linear_cross_entropy)(linear_cross_entropy)


# Logits of a loss as the model made them: before they were widened, cut and flattened for it.
#
# A language model's are its largest tensor. As `cross_entropy(logits[:, :-1].flatten(0, 1).float(), ...)` has them
# they are copied, in float32; rows that are cut off may as well count for nothing, and the loss computes in float32
# anyway.


aten, ours = torch.ops.aten, torch.ops.torch_shard


def steps_of(logits: Node, *, reduced: bool) -> list[Node]:
    """The nodes that only widen, cut and flatten logits, last first; of a loss for each row, only those that widen."""
    steps, node = list[Node](), logits
    while _widens(node) or (reduced and len(shape_of(logits)) == 2 and (_flattens(node) or _cuts(node))):
        steps.append(node)
        node = args_of(node)[0]
    while steps and len(shape_of(logits)) == 2 and not _is_whole(steps, logits):
        steps.pop()
    return steps


def _is_whole(steps: list[Node], logits: Node) -> bool:
    """Tell whether rows are cut before they are flattened, once, so that their places are known."""
    flattened = [at for at, step in enumerate(steps) if _flattens(step)]
    cut = [at for at, step in enumerate(steps) if _cuts(step)]
    return len(flattened) <= 1 and (not cut or (bool(flattened) and min(cut) > flattened[0]))


def source_of(steps: list[Node], logits: Node) -> Node:
    """The logits before these steps."""
    return args_of(steps[-1])[0] if steps else logits


def rows_of(steps: list[Node]) -> list[int]:
    """The shape of the rows that are left after they are cut and before they are flattened; empty without that."""
    return next((list(shape_of(args_of(step)[0])[:-1]) for step in steps if _flattens(step)), [])


def along(steps: list[Node], found: Node, at: Node) -> Node:
    """A gradient of the logits, taken the way of the logits: what leads it back will meet what it came from."""
    for step in reversed(steps):
        found = new_before(at, target_of(step), (found, *args_of(step)[1:]), step.meta["val"])
        found.kwargs = step.kwargs
    return found


def _widens(node: Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    return dtype_of(node) is torch.float32 and dtype_of(args_of(node)[0]) in (torch.bfloat16, torch.float16)


def _flattens(node: Node) -> bool:
    return node.target in RESHAPES and len(shape_of(node)) == 2 and shape_of(node)[-1] == shape_of(args_of(node)[0])[-1]


def _cuts(node: Node) -> bool:
    """Tell whether a node leaves the last rows out, along a dim that is not that of the classes."""
    if node.target is not aten.slice.Tensor:
        return False
    given, rank, left_out = args_of(node), len(shape_of(node)), tuple[Any, ...]((0, None, None, 1))
    _, dim, start, _, step = (*given, *left_out[len(given) - 1 :])
    return dim % rank < rank - 1 and not start and step == 1


@rewrites(aten._to_copy.default)
def _narrow_again(node: Node) -> Node | None:
    """What was widened and is narrowed again is what it was."""
    source = args_of(node)[0]
    is_back = isinstance(source, Node) and _widens(source) and dtype_of(args_of(source)[0]) == dtype_of(node)
    return args_of(source)[0] if is_back else None


@rewrites(aten.slice_scatter.default)
def _whole_again(node: Node) -> Node | None:
    """Rows that are put back where they were cut off: the gradient has zeros there."""
    base, rows, *where = args_of(node)
    if not isinstance(rows, Node) or rows.target is not aten.slice.Tensor or base.target is not aten.full.default:
        return None
    whole = args_of(rows)[0]
    is_ours = whole.target is ours.cross_entropy_backward.default and args_of(base)[1] == 0
    return whole if is_ours and list(args_of(rows)[1:]) == where and shape_of(whole) == shape_of(node) else None
