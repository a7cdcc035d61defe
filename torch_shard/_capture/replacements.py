"""Functions and modules of torch in plain operators, where a trace cannot follow PyTorch's own way."""

import dataclasses
import functools
import inspect
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import _reduction
from torch.utils import _pytree as torch_pytree

from torch_shard._capture.checks import lengths_compared
from torch_shard._capture.data_dependence import current_values
from torch_shard._capture.effects import effects_of_capture
from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.provenance import asking_frame, current_user_line
from torch_shard._common.overrides import instead_of, instead_of_attribute

logger = logging.getLogger(__name__)


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
def adaptive_log_softmax(
    module: nn.AdaptiveLogSoftmaxWithLoss, input_: torch.Tensor, target_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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

_FAR = 4.0  # standard deviations: from there on, float32 has too few probabilities below one to invert

_NEXT_TO_ONE = 1 - 2.0**-24  # in float32; at one, the inverse is infinite, and the end of the interval what is drawn


@instead_of_attribute(torch.nn.init, "_no_grad_trunc_normal_")
def trunc_normal_(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A normal distribution cut to [a, b], by the inverse of its distribution function, where PyTorch draws again."""
    low, high = (a - mean) / std, (b - mean) / std
    if low > _FAR or high < -_FAR:
        raise NotImplementedError(
            f"trunc_normal_: [{a}, {b}] lies more than {_FAR:.0f} standard deviations ({std}) from the mean {mean}, "
            "where a compiled program cannot draw exactly. Move the mean into the interval."
        )
    with torch.no_grad():
        drawn = torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        drawn.uniform_(math.erf(low / math.sqrt(2)), math.erf(high / math.sqrt(2)), generator=generator)
        drawn.clamp_(-_NEXT_TO_ONE, _NEXT_TO_ONE).erfinv_()
        return tensor.copy_(drawn.mul_(std * math.sqrt(2)).add_(mean).clamp_(min=a, max=b))


@instead_of(torch.Tensor.random_)
def random_(
    tensor: torch.Tensor, low: int | None = None, to: int | None = None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`Tensor.random_`, which as an operator has a name that no graph can write down."""
    if low is None:
        raise NotImplementedError("random_() without a range cannot be captured. Say it: random_(0, 100).")
    low, to = (0, low) if to is None else (low, to)
    with torch.no_grad():
        more: dict[str, Any] = {} if generator is None else {"generator": generator}
        return tensor.copy_(torch.randint(low, to, tensor.shape, **more))


@instead_of(torch.tensor)
def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """`torch.tensor`, which reads the numbers of tensors in a list: these are put together by an operator."""
    leaves = torch_pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else []
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.ndim for tensor in tensors):
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory)
    dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else torch.tensor(leaf).dtype for leaf in leaves]
    found = functools.reduce(torch.promote_types, dtypes)
    with torch.no_grad():
        made = _stacked(data, dtype or found)
    return made.requires_grad_(requires_grad)


def _stacked(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(item, dtype) for item in data])
    return data.detach().to(dtype, copy=True) if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)


def _by_position(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """A tensor and an index with 0 for each whole number that is a tensor, which PyTorch would ask for its value."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, items)) or any(item is True or item is False for item in items):
        return tensor, index
    taken = [item.ndim if _is_mask(item) else int(item is not None and item is not ...) for item in items]
    dim, new = 0, list(items)
    for number, item in enumerate(items):
        if _is_number(item):
            place = torch.where(item < 0, item + tensor.shape[dim], item)
            tensor, new[number] = tensor.index_select(dim, place.reshape(1)), 0
        dim += tensor.ndim - sum(taken) if item is ... else taken[number]
    return tensor, tuple(new)


def _is_number(item: object) -> bool:
    is_whole = isinstance(item, torch.Tensor) and not item.is_floating_point() and not _is_mask(item)
    return is_whole and item.ndim == 0  # pyright: ignore[reportAttributeAccessIssue]


def _is_mask(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


@instead_of(torch.Tensor.__getitem__)
def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`; an index that is a tensor of one whole number is one of the program, and not of Python."""
    return torch.Tensor.__getitem__(*_by_position(tensor, index))


@instead_of(torch.Tensor.__len__)
def length(tensor: torch.Tensor) -> int:
    """`len(tensor)`; in a comparison of lengths that are one unknown number, any number does."""
    if (number := _unknown_length(tensor)) is not None:
        frame = asking_frame()
        while frame is not None and frame.f_code is torch.Tensor.__len__.__code__:
            frame = frame.f_back
        found = [] if frame is None else list(map(_unknown_length, lengths_compared(frame)))
        if found and all(other == number for other in found):
            return 1
    return torch.Tensor.__len__(tensor)


def _unknown_length(value: Any) -> Any:
    """The length of a tensor as a formula, if it depends on values."""
    size = value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else None
    return size.node.expr if isinstance(size, torch.SymInt) else None


@instead_of(torch.Tensor.__deepcopy__)
def deep_copy(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    """`copy.deepcopy` of a tensor, by an operator: PyTorch's own copies the fake, and not what it stands for."""
    if not tensor.is_leaf:
        raise RuntimeError("Only leaves of autograd support copy.deepcopy; use tensor.detach().clone().")
    copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


@instead_of_attribute(nn.Module, "_apply")
def move(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)`, `.cpu()`, `.float()` and their kin within a capture, where all tensors are on one device."""
    capture_mode = current_mode()
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    is_new = capture_mode is not None and not capture_mode.side_effects.knows(module)
    if capture_mode is not None and is_new and all(map(capture_mode.is_of_capture, tensors)):  # it is made within
        return _convert(module, fn)
    for tensor in tensors:
        with torch.no_grad():
            moved = fn(tensor)
        if (moved.dtype, moved.shape, moved.device) != (tensor.dtype, tensor.shape, tensor.device):
            raise NotImplementedError(
                f"{current_user_line()}\nHere a {type(module).__name__} is converted from {tensor.dtype} on "
                f"{tensor.device} to {moved.dtype} on {moved.device} within the captured function, which would change "
                "the model itself. Convert the model before the step is made, or use torch.autocast."
            )
    return module


def _convert(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """What PyTorch does, by new tensors: it swaps fakes in place, which nobody else may know of then."""
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    holders: list[Any] = [entries for m in module.modules() for entries in (m._parameters, m._buffers)]
    for entries, name, tensor in [(held, name, t) for held in holders for name, t in held.items() if t is not None]:
        if id(tensor) not in new:
            with torch.no_grad():
                moved = fn(tensor)
            is_parameter = isinstance(tensor, nn.Parameter) and moved is not tensor
            new[id(tensor)] = tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        entries[name] = new[id(tensor)][1]
    return module


@instead_of_attribute(nn.DataParallel, "forward")
@instead_of_attribute(nn.parallel.DistributedDataParallel, "forward")
def run_module(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """The module of a wrapper that would split the batch: a compiled step has the whole of it, and a mesh splits it."""
    logger.info("%s runs its module: the mesh splits the batch and adds up gradients", type(wrapper).__name__)
    return wrapper.module(*args, **kwargs)


@instead_of_attribute(torch.autograd.profiler.record_function, "__enter__")
def begin(record: torch.autograd.profiler.record_function) -> torch.autograd.profiler.record_function:
    """The beginning of a profiler's range, which a compiled program does not have."""
    return record


@instead_of_attribute(torch.autograd.profiler.record_function, "__exit__")
@instead_of_attribute(torch.nn.attention, "_sdpa_kernel")
def do_nothing(*args: object, **kwargs: object) -> None:
    """The end of a profiler's range; which kernels attention may use, where ours has none of PyTorch's."""


@instead_of(torch.Tensor.__repr__)
def describe(tensor: torch.Tensor, *, tensor_contents: object = None) -> str:
    """The text of a tensor: what is known of it, and a word in the log where that is not its value."""
    if (values := current_values().known_values([tensor])) is not None:
        return repr(values[0])
    logger.warning(
        "%s\nHere a tensor is made into text, but it has no value while the program is made, which is when this line "
        "runs, once. To see the value at each step, return it in the metrics.",
        current_user_line(),
    )
    return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype})"


@instead_of(torch.Tensor.__format__)
def format_tensor(tensor: torch.Tensor, spec: str) -> str:
    """The text of a tensor in an f-string: of a number that has a format, it needs the value."""
    effects = effects_of_capture()
    if tensor.ndim == 0 and effects is not None:
        return format(effects.number(tensor), spec)
    if tensor.ndim == 0 and (spec or current_values().known_values([tensor]) is not None):
        return format(tensor.item(), spec)
    return format(describe(tensor), spec)


@dataclasses.dataclass(frozen=True)
class RandomState:
    """Result of `torch.get_rng_state` in a capture: a position in the stream of random numbers."""

    position: int


@instead_of_attribute(torch, "get_rng_state")
def get_rng_state() -> RandomState:
    """The position of the capture under way."""
    return RandomState(current_values().position)


@instead_of_attribute(torch, "set_rng_state")
def set_rng_state(state: object) -> None:
    """Go back to a position, so that what is computed again draws the same numbers."""
    if not isinstance(state, RandomState):
        raise NotImplementedError(
            f"{current_user_line()}\nHere torch.set_rng_state is given a state from outside of the captured function, "
            "whose stream JAX cannot follow. Take it with torch.get_rng_state within the function."
        )
    current_values().position = state.position


@instead_of_attribute(torch, "manual_seed")
@instead_of_attribute(torch, "seed")
def refuse_seed(*args: object, **kwargs: object) -> object:
    """`torch.manual_seed` and `torch.seed` in a capture."""
    raise NotImplementedError(
        f"{current_user_line()}\nHere torch is seeded within a captured function. The random numbers of a compiled "
        "program come from its own key (step.init(seed=...), or torch.manual_seed before an adapter is called); to "
        "draw the same numbers twice, use torch.get_rng_state and torch.set_rng_state within the function."
    )
