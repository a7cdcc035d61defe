"""Tensors made into text while a callable is captured: they have no values then, and that line runs only once."""

import logging

import torch

from torch_shard._capture.data_dependence import known_value
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.overrides import instead_of

logger = logging.getLogger(__name__)


@instead_of(torch.Tensor.__repr__)
def describe(tensor: torch.Tensor, *, tensor_contents: object = None) -> str:
    """The text of a tensor: what is known of it, and a word in the log where that is not its value."""
    if (value := known_value(tensor)) is not None:
        return repr(value)
    logger.warning(
        "%s\nHere a tensor is made into text, but it has no value while the program is made, which is when this line "
        "runs, once. To see the value at each step, return it in the metrics.",
        current_user_line(),
    )
    return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype})"


@instead_of(torch.Tensor.__format__)
def format_tensor(tensor: torch.Tensor, spec: str) -> str:
    """The text of a tensor in an f-string: of a number that has a format, it needs the value."""
    value = known_value(tensor)
    if tensor.ndim == 0 and (spec or value is not None):
        return format(tensor.item() if value is None else value.item(), spec)
    return format(describe(tensor), spec)
