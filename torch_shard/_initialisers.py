"""Initialisers of torch.nn.init in plain operators, where PyTorch's own way looks at values."""

import math

import torch

_FAR = 4.0  # standard deviations: from there on, float32 has too few probabilities below one to invert


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
        tensor.uniform_(math.erf(low / math.sqrt(2)), math.erf(high / math.sqrt(2)), generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(min=a, max=b)
