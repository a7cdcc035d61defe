"""Packed sequences: `pack_padded_sequence` and its inverse around recurrent nets, with lengths that the batch brings.

PyTorch's packing puts the steps of all sequences in one row, whose length depends on values. Here sequences stay
padded, and a mask says which steps there are: a state passes the others as it is (`recurrent`), which gives the same
states, outputs and gradients. So there is no row to look at: `packed.data` and `packed.batch_sizes` are refused.

Shapes: T steps, B batch.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torch_shard._capture import current_user_line
from torch_shard._common.overrides import instead_of, instead_of_attribute

logger = logging.getLogger(__name__)

_READERS = {fn.__code__ for fn in (pad_packed_sequence, nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)}


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{current_user_line()}\nHere {what} of a packed sequence is read, whose size depends on the lengths, and a "
        "compiled program has one size for all. Work on the padded tensor, before pack_padded_sequence or after "
        "pad_packed_sequence, with a mask: torch.arange(T) < lengths[:, None]."
    )


class Lengths:
    """Stands for the `batch_sizes` of sequences that are padded.

    Attributes:
        lengths_B: How many steps each sequence has.
        mask_TB: Which steps there are.
    """

    device = torch.device("cpu")  # as PyTorch asks of batch sizes

    def __init__(self, lengths_B: torch.Tensor, num_steps: int) -> None:
        self.lengths_B, self.mask_TB = lengths_B, torch.arange(num_steps)[:, None] < lengths_B[None, :]

    def __getitem__(self, index: int) -> int:
        if index != 0:
            _refuse("batch_sizes")
        return len(self.lengths_B)

    def __len__(self) -> NoReturn:
        _refuse("batch_sizes")

    def size(self, dim: int) -> int:
        """Nothing yet: what PyTorch asks for is the length of the longest sequence; `pad` knows better."""
        if sys._getframe(1).f_code not in _READERS:
            _refuse("batch_sizes")
        return 0

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("batch_sizes")

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        _refuse("batch_sizes")


class _Padded(PackedSequence):
    """A packed sequence whose data are all steps of all sequences, (T * B, ...), for PyTorch's own code alone."""

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_code not in _READERS:
            _refuse("the data")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        _refuse("the data")

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if sys._getframe(1).f_code not in _READERS:
            _refuse("the data")
        return self._rows()

    def _rows(self) -> Any:
        return super().__getitem__(0)

    def to(self, *args: Any, **kwargs: Any) -> "_Padded":
        """The same on another device, which in a capture there is none of, or in another dtype."""
        return type(self)(self._rows().to(*args, **kwargs), *list(super().__iter__())[1:])


_make: Any = PackedSequence.__new__


@instead_of_attribute(PackedSequence, "__new__")
def make(
    cls: type[PackedSequence],
    data: Any,
    batch_sizes: Any = None,
    sorted_indices: Any = None,
    unsorted_indices: Any = None,
) -> PackedSequence:
    """`PackedSequence(...)`, of padded data if they are such."""
    kind = _Padded if isinstance(batch_sizes, Lengths) else cls
    return _make(kind, data, batch_sizes, sorted_indices, unsorted_indices)


@instead_of(torch._VF._pack_padded_sequence)  # pyright: ignore[reportAttributeAccessIssue]
def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Lengths]:
    """The padded data, with zeros in the padding, as rows; and the lengths.

    That lengths are sorted, and none of them zero or beyond the padded length, is not checked.
    """
    x = x.transpose(0, 1) if batch_first else x
    if lengths.shape != x.shape[1:2]:
        raise ValueError(
            f"pack_padded_sequence takes one length for each of {x.shape[1]} sequences, got lengths of shape "
            f"{tuple(lengths.shape)}."
        )
    packed = Lengths(lengths, len(x))
    x = x.masked_fill(_like(~packed.mask_TB, x), 0)
    return x.flatten(0, 1), packed


@instead_of(torch._VF._pad_packed_sequence)  # pyright: ignore[reportAttributeAccessIssue]
def pad(
    data: torch.Tensor, packed: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The padded data, `total_length` steps of them or (if that is 0) as many as there were before packing.

    PyTorch takes as many as the longest sequence has. Where that is another size, or PyTorch raises, here is NaN.
    """
    if not isinstance(packed, Lengths):
        return torch._VF._pad_packed_sequence(data, packed, batch_first, padding_value, total_length)  # pyright: ignore
    mask_TB, lengths_B = packed.mask_TB, packed.lengths_B
    num_steps = len(mask_TB)
    x = data.unflatten(0, mask_TB.shape)
    x = x.masked_fill(_like(~mask_TB, x), padding_value)
    if not total_length:
        x = _or_nan((lengths_B >= num_steps).any(), x)
        logger.warning(
            "%s\npad_packed_sequence without total_length: where no sequence of a batch fills the padded length of %d, "
            "torch gives a shorter result and a compiled program NaN. Pass total_length=%d.",
            *(current_user_line(), num_steps, num_steps),
        )
    elif total_length < num_steps:
        x = _or_nan((lengths_B <= total_length).all(), x[:total_length])
    elif total_length > num_steps:
        x = torch.cat([x, x.new_full((total_length - num_steps, *x.shape[1:]), padding_value)])
    return x.transpose(0, 1) if batch_first else x, lengths_B


def _like(mask_TB: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mask_TB.reshape(*mask_TB.shape, *[1] * (x.ndim - 2))


def _or_nan(holds: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise NotImplementedError(
            f"{current_user_line()}\nHere pad_packed_sequence gives {x.dtype} of a size that depends on the lengths, "
            "and a compiled program has one size for all. Pass total_length, the padded length before packing."
        )
    return torch.where(holds, x, torch.nan)
