"""`as_strided` against eager torch: of tensors that do not lie in memory in the order of their indices."""

from collections.abc import Callable

import pytest
import torch

import torch_shard as ts

READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: (2 * x).as_strided((3, 3), (4, 1)),
    "transposed": lambda x: (2 * x).t().as_strided((2, 2), (1, 2)),
    "transposed_input": lambda x: x.t().as_strided((2, 3), (1, 2)),
    "own_offset": lambda x: (2 * x).t()[1:].as_strided((2, 2), (1, 2)),
    "offset": lambda x: (2 * x).t()[1:].as_strided((2, 2), (1, 2), 1),
    "row": lambda x: (2 * x)[1].as_strided((4,), (1,)),
    "overlapping": lambda x: (2 * x)[:, 1:].as_strided((2, 3, 2), (4, 1, 1)),
    "channels_last": lambda x: (
        x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last).as_strided((3, 2), (2, 1))
    ),
    "expanded": lambda x: x[:1].expand(3, 4).as_strided((2, 2), (0, 1)),
    "permuted": lambda x: (2 * x).view(3, 2, 2).permute(2, 0, 1).as_strided((5,), (2,), 1),
    "diagonal": lambda x: torch.diagonal(2 * x.t()).as_strided((2,), (5,)),
}


@pytest.mark.parametrize("name", READS)
def test_reads_what_torch_reads(name: str) -> None:
    torch.manual_seed(0)
    read, x = READS[name], torch.randn(3, 4)

    def scalar(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = read(x)
        return (out * torch.linspace(0.5, 2, out.numel()).view(out.shape)).square().sum(), out

    leaf = x.clone().requires_grad_()
    value, out = scalar(leaf)
    (_, found), grad = ts.jax_value_and_grad(scalar, has_aux=True)(x)
    torch.testing.assert_close(found.cpu(), out.detach())
    torch.testing.assert_close(grad.cpu(), torch.autograd.grad(value, leaf)[0])


def test_memory_that_no_tensor_fills_is_refused() -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided((3, 4), (8, 2)).copy_(x).as_strided((2, 2), (2, 1))

    with pytest.raises(NotImplementedError, match=r"strides \(8, 2\), whose memory .* cannot reconstruct"):
        ts.jax_jit(read)(torch.randn(3, 4))
