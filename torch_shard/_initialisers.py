"""Initialisers of torch.nn.init in plain operators, where PyTorch's own way looks at values."""

import math
from typing import Any

import torch

from torch_shard._common.overrides import instead_of, instead_of_attribute

_FAR = 4.0  # standard deviations: from there on, float32 has too few probabilities below one to invert
_NEXT_TO_ONE = 1 - 2.0**-24  # in float32; at one, the inverse is infinite, and the end of the interval what is drawn


@instead_of_attribute(torch.nn.init, "_no_grad_trunc_normal_")
def trunc_normal_(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A normal distribution cut to [a, b], by the inverse of its distribution function; PyTorch's draws until it fits.

    Raises:
        NotImplementedError: The interval lies so far out that float32 cannot tell its probabilities apart.
    """
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


@instead_of_attribute(torch.nn.init, "sparse_")
def sparse_(
    tensor: torch.Tensor, sparsity: float, std: float = 0.01, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Normal numbers with the same share of zeros in each column; PyTorch's goes through the columns one by one."""
    if tensor.ndim != 2:
        raise ValueError("Only tensors with 2 dimensions are supported")
    num_zeros = math.ceil(sparsity * tensor.shape[0])
    with torch.no_grad():
        ranks = torch.rand(tensor.shape).argsort(0).argsort(0)
        tensor.normal_(0, std, generator=generator)
        return tensor.masked_fill_(ranks < num_zeros, 0)


@instead_of(torch.Tensor.random_)
def random_(
    tensor: torch.Tensor, low: int | None = None, to: int | None = None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`Tensor.random_`, which as an operator has a name that no graph can write down."""
    if low is None:
        raise NotImplementedError("random_() without a range cannot be captured. Say it: random_(0, 100).")
    low, to = (0, low) if to is None else (low, to)
    with torch.no_grad():
        more: Any = {} if generator is None else {"generator": generator}
        return tensor.copy_(torch.randint(low, to, tensor.shape, **more))


@instead_of(torch.Tensor.__deepcopy__)
def deep_copy(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
    """`copy.deepcopy` of a tensor, by an operator: PyTorch's own copies the fake, and not what it stands for."""
    if not tensor.is_leaf:
        raise RuntimeError("Only leaves of autograd support copy.deepcopy; use tensor.detach().clone().")
    copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
