"""Every public module of torch.nn: how it is built, and inputs that it takes.

A row is one module with one choice of arguments; a class may have several. Floating-point inputs are differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One module, and its positional inputs.

    Attributes:
        kind: The public class that the row is about.
        build: Makes the module.
        inputs: Each makes one input.
        name: What is called.
        rtol: Of the largest value of each tensor.
    """

    kind: type
    build: Make
    inputs: tuple[Make, ...]
    name: str
    rtol: float  # 2e-5 for float32 sums of some hundred terms in another order


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> Make:
    """Distinct values in random order, so that no two are tied for a maximum."""

    def make() -> torch.Tensor:
        count = max(1, int(torch.Size(shape).numel()))
        return torch.linspace(low, high, count)[torch.randperm(count)].reshape(shape).contiguous()

    return make


def normal(*shape: int) -> Make:
    return lambda: torch.randn(shape)


def labels(high: int, *shape: int) -> Make:
    return lambda: torch.randint(0, high, shape)


def given(*values: Any, dtype: torch.dtype | None = None) -> Make:
    return lambda: torch.tensor(values, dtype=dtype)


def signs(*shape: int) -> Make:
    return lambda: torch.randint(0, 2, shape) * 2 - 1


def log_softmax(*shape: int, dim: int = -1) -> Make:
    return lambda: torch.randn(shape).log_softmax(dim)


def pool_indices(dims: int, size: int) -> Make:
    """Where a max pool with kernel 2 found the largest values of an input of shape `(2, 3, *(size,) * dims)`."""
    pool = (nn.functional.max_pool1d, nn.functional.max_pool2d, nn.functional.max_pool3d)[dims - 1]
    return lambda: pool(torch.randn(2, 3, *(size,) * dims), 2, return_indices=True)[1]


def coins() -> torch.Tensor:
    return torch.randint(0, 2, (5, 4)).float()


def row(
    kind: type[nn.Module], *inputs: Make, build: Callable[..., nn.Module] | None = None, rtol: float = 2e-5
) -> Callable[..., Row]:
    """Take the arguments of the module, which its class makes, or `build`."""

    def of(*args: Any, **options: Any) -> Row:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())]
        make = functools.partial(build or kind, *args, **options)
        return Row(kind, make, inputs, f"{kind.__name__}({', '.join(given)})", rtol)

    return of


norm = functools.partial(row, rtol=2e-4)  # they divide by a deviation
X, IMAGE, SIGNAL, VOLUME = floats(3, 4, 6), floats(2, 4, 7, 6), floats(2, 4, 9), floats(2, 4, 4, 5, 4)
DRAWING = {nn.RReLU, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
PAIR = (normal(5, 4), normal(5, 4))

SINCE_2_13 = [
    row(nn.LinearCrossEntropyLoss, normal(5, 4), labels(6, 5))(4, 6, bias=True, options=nn.LinearCrossEntropyOptions())
    for _ in range(hasattr(nn, "LinearCrossEntropyLoss"))
]
"""Of torch 2.13 and newer."""

LAYERS = [
    row(nn.CELU, X)(0.7),
    row(nn.ELU, X)(1.3),
    row(nn.GELU, X)(),
    row(nn.GELU, X)("tanh"),
    row(nn.Hardshrink, X)(),
    row(nn.Hardsigmoid, X)(),
    row(nn.Hardswish, X)(),
    row(nn.Hardtanh, X)(-0.4, 1.1),
    row(nn.LeakyReLU, X)(0.2, inplace=True),
    row(nn.LogSigmoid, X)(),
    row(nn.LogSoftmax, X)(1),
    row(nn.Mish, X)(),
    row(nn.PReLU, X)(4),
    row(nn.ReLU, X)(inplace=True),
    row(nn.ReLU6, X)(),
    row(nn.SELU, X)(),
    row(nn.Sigmoid, X)(),
    row(nn.SiLU, X)(),
    row(nn.Softmax, X)(-1),
    row(nn.Softmin, X)(1),
    row(nn.Softplus, X)(2.0, 1.0),
    row(nn.Softshrink, X)(0.4),
    row(nn.Softsign, X)(),
    row(nn.Tanh, X)(),
    row(nn.Tanhshrink, X)(),
    row(nn.Threshold, X)(0.1, 3.0),
    row(nn.Identity, X)(),
    row(nn.Dropout, X)(0.3),
    row(nn.AlphaDropout, X)(0.3),
    row(nn.FeatureAlphaDropout, X)(0.3),
    row(nn.MaxPool1d, SIGNAL)(3, 2, 1),
    row(nn.AvgPool2d, IMAGE)(3, 2, 1, count_include_pad=False),
    row(nn.AdaptiveAvgPool2d, IMAGE)((3, None)),
    row(nn.FractionalMaxPool2d, IMAGE)(2, (4, 3), _random_samples=torch.full((2, 4, 2), 0.4)),
    row(nn.MaxUnpool1d, floats(2, 3, 4), pool_indices(1, 8))(2),
    row(nn.ConstantPad2d, IMAGE)((2, 1, 0, 3), -1.0),
    row(nn.ZeroPad2d, IMAGE)((2, 1, 0, 3)),
    row(nn.ChannelShuffle, IMAGE)(2),
    row(nn.PixelShuffle, IMAGE)(2),
    row(nn.PixelUnshuffle, floats(2, 3, 4, 6))(2),
    row(nn.Flatten, IMAGE)(1, 2),
    row(nn.Upsample, IMAGE)(scale_factor=2.0),
    row(nn.Upsample, SIGNAL)(11, mode="linear"),
    row(nn.UpsamplingNearest2d, IMAGE)((9, 5)),
    row(nn.Softmax2d, IMAGE)(),
    row(nn.Dropout1d, SIGNAL)(0.3),
    row(nn.Dropout2d, IMAGE)(0.3),
    row(nn.Dropout3d, VOLUME)(0.3),
    norm(nn.InstanceNorm2d, normal(2, 4, 7, 6))(4),
    norm(nn.LayerNorm, normal(3, 4, 5))(5, bias=False),
    norm(nn.RMSNorm, normal(3, 4, 5))((4, 5), eps=1e-3, elementwise_affine=False),
    row(nn.LocalResponseNorm, IMAGE)(3, alpha=0.1),
    row(nn.RNNCell, normal(3, 4), normal(3, 5))(4, 5, nonlinearity="relu"),
    row(nn.LSTMCell, normal(3, 4))(4, 5),
    row(nn.GRUCell, normal(3, 4), normal(3, 5))(4, 5),
    row(nn.Linear, normal(4))(4, 6, bias=False),
    row(nn.Bilinear, normal(2, 4), normal(2, 3))(4, 3, 5),
    row(nn.Embedding, labels(6, 3, 5))(6, 4, scale_grad_by_freq=True),
    row(nn.Sequential, normal(3, 4), build=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))(),
    row(nn.L1Loss, *PAIR)(reduction="sum"),
    row(nn.MSELoss, *PAIR)(),
    row(nn.HuberLoss, *PAIR)(delta=0.7),
    row(nn.SmoothL1Loss, *PAIR)(reduction="none", beta=0.6),
    row(nn.BCELoss, floats(5, 4, low=0.05, high=0.9), floats(5, 4, low=0.1, high=0.95))(),
    row(nn.BCEWithLogitsLoss, normal(5, 4), coins)(pos_weight=torch.tensor([1.0, 2.0, 0.5, 3.0])),
    row(nn.CrossEntropyLoss, normal(5, 4), lambda: torch.randn(5, 4).softmax(-1))(),
    row(nn.NLLLoss, log_softmax(5, 4), labels(4, 5))(),
    row(nn.KLDivLoss, log_softmax(5, 4), floats(5, 4, low=0.1, high=1))(reduction="batchmean"),
    row(nn.PoissonNLLLoss, normal(5, 4), floats(5, 4, low=0.5, high=4))(full=True),
    row(nn.CosineSimilarity, *PAIR)(),
    row(nn.PairwiseDistance, *PAIR)(3.0),
    row(nn.HingeEmbeddingLoss, normal(5, 4), signs(5, 4))(),
    row(nn.MarginRankingLoss, normal(5), normal(5), signs(5))(0.2),
    row(nn.MultiLabelSoftMarginLoss, normal(5, 4), coins)(),
    row(nn.MultiMarginLoss, normal(5, 4), labels(4, 5))(2, 0.5),
    row(nn.SoftMarginLoss, normal(5, 4), signs(5, 4))(),
    row(nn.Conv2d, IMAGE)(4, 6, 3, (2, 1), (0, 2), (1, 2), groups=2),
    row(nn.ConvTranspose2d, IMAGE)(4, 6, 3, 2, dilation=2),
    row(nn.MaxPool2d, IMAGE)(3, 2, 1, ceil_mode=True),
    norm(nn.BatchNorm2d, normal(2, 4, 7, 6))(4, momentum=0.3),
    norm(nn.GroupNorm, normal(2, 4, 7, 6))(2, 4),
    *SINCE_2_13,
]
# Much like one of these.
MORE = [
    row(nn.GLU, X)(1),
    row(nn.RReLU, X)(0.1, 0.4),
    row(nn.Conv1d, SIGNAL)(4, 6, 3, padding="same", padding_mode="reflect"),
    row(nn.Conv1d, floats(4, 9))(4, 6, 3),
    row(nn.Conv2d, IMAGE)(4, 6, 2, dilation=2, padding=1, padding_mode="circular"),
    row(nn.Fold, floats(2, 12, 12))((4, 5), (2, 2), stride=1),
    row(nn.Unfold, IMAGE)((2, 3), dilation=2, padding=1),
    row(nn.MaxPool2d, IMAGE)(2, dilation=2, return_indices=True),
    row(nn.LPPool2d, floats(2, 4, 7, 6, low=0.1))(3, 2),
    row(nn.AdaptiveMaxPool2d, IMAGE)(2, return_indices=True),
    row(nn.CircularPad2d, IMAGE)((2, 1, 0, 3)),
    row(nn.ReflectionPad2d, IMAGE)((2, 1, 0, 3)),
    row(nn.ReplicationPad2d, IMAGE)((2, 1, 0, 3)),
    row(nn.Unflatten, IMAGE)(1, (2, 2)),
    row(nn.Upsample, IMAGE)((5, 9), mode="bilinear"),
    row(nn.Upsample, IMAGE)((5, 9), mode="bicubic", align_corners=True),
    row(nn.Upsample, VOLUME)((3, 7, 5), mode="trilinear"),
    norm(nn.BatchNorm1d, normal(2, 4, 9))(4, affine=False),
    norm(nn.BatchNorm1d, normal(6, 5))(5, momentum=None),
    norm(nn.BatchNorm1d, normal(6, 5))(5, track_running_stats=False),
    norm(nn.InstanceNorm2d, normal(2, 4, 7, 6))(4, affine=True, track_running_stats=True),
    row(nn.Embedding, labels(6, 3, 5))(6, 4, padding_idx=2),
    row(nn.Embedding, labels(6, 3, 5))(6, 4, max_norm=1.0),
    row(nn.GaussianNLLLoss, *PAIR, floats(5, 4, low=0.5, high=2))(),
    row(nn.CosineEmbeddingLoss, *PAIR, signs(5))(0.1),
    row(nn.MultiLabelMarginLoss, normal(2, 4), given([3, 0, -1, 1], [1, -1, 0, 2]))(),
    row(nn.TripletMarginLoss, *PAIR, normal(5, 4))(2.0, swap=True),
    norm(nn.GroupNorm, normal(2, 4, 9))(4, 4, affine=False),
    row(nn.CrossMapLRN2d, IMAGE)(3, alpha=0.1),
]

NOT_MODULES_TO_CALL = {
    **{kind: "has the class of a row after its first call" for name, kind in vars(nn).items() if "Lazy" in name},
    nn.Module: "the base class: it has no forward",
    nn.ModuleList: "holds modules: it has no forward",
    nn.ModuleDict: "holds modules: it has no forward",
    nn.ParameterList: "holds parameters: tests/tables/semantics.py uses it",
    nn.ParameterDict: "holds parameters: tests/tables/semantics.py uses it",
    nn.Container: "the base class of old containers: it has no forward",
    nn.RNNBase: "the base class of the recurrent nets",
    nn.RNNCellBase: "the base class of the recurrent cells",
    nn.DataParallel: "copies a module over CUDA devices: a mesh does that here",
}
