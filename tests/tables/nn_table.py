"""Every public module of torch.nn: how it is built, and inputs that it takes.

A row is one module with one choice of arguments; a class may have several. Floating-point inputs are differentiated.
"""

import dataclasses
import warnings
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
        name: For the test's id.
        draws: Draws random numbers in train mode, so that only eval mode can be compared number by number.
        rtol: Of the largest value of each tensor.
    """

    kind: type
    build: Make
    inputs: tuple[Make, ...]
    name: str
    draws: bool = False
    rtol: float = 2e-5  # float32 sums of some hundred terms in another order


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


def first_called(module: nn.Module, *shape: int) -> nn.Module:
    """A lazy module after its first call, which makes its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Lazy modules are a new feature under heavy development"
        module(torch.randn(shape))
    return module


def lazy(kind: type[nn.Module], *args: Any, shape: tuple[int, ...]) -> Make:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return first_called(kind(*args), *shape)

    return build


class ByName(nn.Module):
    """Uses a ModuleDict and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.scales = nn.ParameterDict({"w": torch.full((4,), 0.5), "v": torch.linspace(-1, 1, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            x = layer(x) * self.scales["w" if name == "a" else "v"]
        return x


class ByPlace(nn.Module):
    """Uses a ModuleList and a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)])
        self.shifts = nn.ParameterList([torch.ones(4), torch.linspace(-1, 1, 4), torch.full((2,), 0.1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            x = layer(x) + shift
        return x


def cosine_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 1 - nn.functional.cosine_similarity(x, y)


def row(build: Make, *inputs: Make, name: str = "", **more: Any) -> tuple[Make, tuple[Make, ...], str, dict[str, Any]]:
    return build, inputs, name, more


IMAGE, SIGNAL, VOLUME = floats(2, 4, 7, 6), floats(2, 4, 9), floats(2, 4, 4, 5, 4)
ACTIVATIONS: dict[type, list[Make]] = {
    nn.CELU: [lambda: nn.CELU(0.7)],
    nn.ELU: [lambda: nn.ELU(1.3)],
    nn.GELU: [nn.GELU, lambda: nn.GELU("tanh")],
    nn.GLU: [lambda: nn.GLU(1)],
    nn.Hardshrink: [nn.Hardshrink],
    nn.Hardsigmoid: [nn.Hardsigmoid],
    nn.Hardswish: [nn.Hardswish],
    nn.Hardtanh: [lambda: nn.Hardtanh(-0.4, 1.1)],
    nn.LeakyReLU: [lambda: nn.LeakyReLU(0.2), lambda: nn.LeakyReLU(0.2, inplace=True)],
    nn.LogSigmoid: [nn.LogSigmoid],
    nn.LogSoftmax: [lambda: nn.LogSoftmax(1)],
    nn.Mish: [nn.Mish],
    nn.PReLU: [nn.PReLU, lambda: nn.PReLU(4)],
    nn.ReLU: [nn.ReLU, lambda: nn.ReLU(inplace=True)],
    nn.ReLU6: [nn.ReLU6],
    nn.RReLU: [lambda: nn.RReLU(0.1, 0.4)],
    nn.SELU: [nn.SELU],
    nn.Sigmoid: [nn.Sigmoid],
    nn.SiLU: [nn.SiLU],
    nn.Softmax: [lambda: nn.Softmax(-1)],
    nn.Softmin: [lambda: nn.Softmin(1)],
    nn.Softplus: [nn.Softplus, lambda: nn.Softplus(2.0, 1.0)],
    nn.Softshrink: [lambda: nn.Softshrink(0.4)],
    nn.Softsign: [nn.Softsign],
    nn.Tanh: [nn.Tanh],
    nn.Tanhshrink: [nn.Tanhshrink],
    nn.Threshold: [lambda: nn.Threshold(0.1, 3.0)],
    nn.Identity: [nn.Identity],
    nn.Dropout: [lambda: nn.Dropout(0.3)],
    nn.AlphaDropout: [lambda: nn.AlphaDropout(0.3)],
    nn.FeatureAlphaDropout: [lambda: nn.FeatureAlphaDropout(0.3)],
}
DRAWING = {nn.RReLU, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
CONVOLUTIONS = {
    nn.Conv1d: [
        row(lambda: nn.Conv1d(4, 6, 3, 2, 1), SIGNAL),
        row(lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="reflect"), SIGNAL, name="reflect"),
        row(lambda: nn.Conv1d(4, 6, 3), floats(4, 9), name="unbatched"),
    ],
    nn.Conv2d: [
        row(lambda: nn.Conv2d(4, 6, 3, (2, 1), (0, 1)), IMAGE),
        row(lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), IMAGE, name="depthwise"),
        row(lambda: nn.Conv2d(4, 6, 2, dilation=2, padding=1, padding_mode="circular"), IMAGE, name="circular"),
        row(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), IMAGE, name="replicate"),
    ],
    nn.Conv3d: [row(lambda: nn.Conv3d(4, 2, 2, padding=1), VOLUME)],
    nn.ConvTranspose1d: [row(lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2), SIGNAL)],
    nn.ConvTranspose2d: [row(lambda: nn.ConvTranspose2d(4, 6, 3, 2, dilation=2), IMAGE)],
    nn.ConvTranspose3d: [row(lambda: nn.ConvTranspose3d(4, 2, 2, 2), floats(2, 4, 2, 3, 2))],
    nn.LazyConv1d: [row(lazy(nn.LazyConv1d, 6, 3, shape=(2, 4, 9)), SIGNAL)],
    nn.LazyConv2d: [row(lazy(nn.LazyConv2d, 6, 3, shape=(2, 4, 7, 6)), IMAGE)],
    nn.LazyConv3d: [row(lazy(nn.LazyConv3d, 2, 2, shape=(2, 4, 4, 5, 4)), VOLUME)],
    nn.LazyConvTranspose1d: [row(lazy(nn.LazyConvTranspose1d, 6, 3, shape=(2, 4, 9)), SIGNAL)],
    nn.LazyConvTranspose2d: [row(lazy(nn.LazyConvTranspose2d, 6, 3, shape=(2, 4, 7, 6)), IMAGE)],
    nn.LazyConvTranspose3d: [row(lazy(nn.LazyConvTranspose3d, 2, 2, shape=(2, 4, 4, 5, 4)), VOLUME)],
    nn.Fold: [row(lambda: nn.Fold((4, 5), (2, 2), stride=1), floats(2, 12, 12))],
    nn.Unfold: [row(lambda: nn.Unfold((2, 3), dilation=2, padding=1), IMAGE)],
}
POOLS = {
    nn.MaxPool1d: [row(lambda: nn.MaxPool1d(3, 2, 1), SIGNAL)],
    nn.MaxPool2d: [
        row(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE),
        row(lambda: nn.MaxPool2d(2, dilation=2, return_indices=True), IMAGE, name="indices"),
    ],
    nn.MaxPool3d: [row(lambda: nn.MaxPool3d(2, 1), VOLUME)],
    nn.AvgPool1d: [row(lambda: nn.AvgPool1d(3, 2, 1), SIGNAL)],
    nn.AvgPool2d: [row(lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE)],
    nn.AvgPool3d: [row(lambda: nn.AvgPool3d(2, divisor_override=5), VOLUME)],
    nn.LPPool1d: [row(lambda: nn.LPPool1d(2, 3), floats(2, 4, 9, low=0.1))],
    nn.LPPool2d: [row(lambda: nn.LPPool2d(3, 2), floats(2, 4, 7, 6, low=0.1))],
    nn.LPPool3d: [row(lambda: nn.LPPool3d(2, 2), floats(2, 4, 4, 5, 4, low=0.1))],
    nn.AdaptiveAvgPool1d: [row(lambda: nn.AdaptiveAvgPool1d(4), SIGNAL)],
    nn.AdaptiveAvgPool2d: [row(lambda: nn.AdaptiveAvgPool2d((3, None)), IMAGE)],
    nn.AdaptiveAvgPool3d: [row(lambda: nn.AdaptiveAvgPool3d((2, 3, 1)), VOLUME)],
    nn.AdaptiveMaxPool1d: [row(lambda: nn.AdaptiveMaxPool1d(4), SIGNAL)],
    nn.AdaptiveMaxPool2d: [
        row(lambda: nn.AdaptiveMaxPool2d((3, None)), IMAGE),
        row(lambda: nn.AdaptiveMaxPool2d(2, return_indices=True), IMAGE, name="indices"),
    ],
    nn.AdaptiveMaxPool3d: [row(lambda: nn.AdaptiveMaxPool3d((2, 3, 1)), VOLUME)],
    nn.FractionalMaxPool2d: [
        row(lambda: nn.FractionalMaxPool2d(2, (4, 3), _random_samples=torch.full((2, 4, 2), 0.4)), IMAGE),
    ],
    nn.FractionalMaxPool3d: [
        row(lambda: nn.FractionalMaxPool3d(2, (2, 3, 2), _random_samples=torch.full((2, 4, 3), 0.4)), VOLUME),
    ],
    nn.MaxUnpool1d: [row(lambda: nn.MaxUnpool1d(2), floats(2, 3, 4), pool_indices(1, 8))],
    nn.MaxUnpool2d: [row(lambda: nn.MaxUnpool2d(2), floats(2, 3, 4, 4), pool_indices(2, 8))],
    nn.MaxUnpool3d: [row(lambda: nn.MaxUnpool3d(2), floats(2, 3, 2, 2, 2), pool_indices(3, 4))],
}
PADS_AND_SHAPES = {
    nn.CircularPad1d: [row(lambda: nn.CircularPad1d((2, 1)), SIGNAL)],
    nn.CircularPad2d: [row(lambda: nn.CircularPad2d((2, 1, 0, 3)), IMAGE)],
    nn.CircularPad3d: [row(lambda: nn.CircularPad3d(1), VOLUME)],
    nn.ConstantPad1d: [row(lambda: nn.ConstantPad1d((2, -1), 3.5), SIGNAL)],
    nn.ConstantPad2d: [row(lambda: nn.ConstantPad2d((2, 1, 0, 3), -1.0), IMAGE)],
    nn.ConstantPad3d: [row(lambda: nn.ConstantPad3d(1, 0.5), VOLUME)],
    nn.ReflectionPad1d: [row(lambda: nn.ReflectionPad1d((2, 1)), SIGNAL)],
    nn.ReflectionPad2d: [row(lambda: nn.ReflectionPad2d((2, 1, 0, 3)), IMAGE)],
    nn.ReflectionPad3d: [row(lambda: nn.ReflectionPad3d(1), VOLUME)],
    nn.ReplicationPad1d: [row(lambda: nn.ReplicationPad1d((2, 1)), SIGNAL)],
    nn.ReplicationPad2d: [row(lambda: nn.ReplicationPad2d((2, 1, 0, 3)), IMAGE)],
    nn.ReplicationPad3d: [row(lambda: nn.ReplicationPad3d(1), VOLUME)],
    nn.ZeroPad1d: [row(lambda: nn.ZeroPad1d((2, 1)), SIGNAL)],
    nn.ZeroPad2d: [row(lambda: nn.ZeroPad2d((2, 1, 0, 3)), IMAGE)],
    nn.ZeroPad3d: [row(lambda: nn.ZeroPad3d(1), VOLUME)],
    nn.ChannelShuffle: [row(lambda: nn.ChannelShuffle(2), IMAGE)],
    nn.PixelShuffle: [row(lambda: nn.PixelShuffle(2), IMAGE)],
    nn.PixelUnshuffle: [row(lambda: nn.PixelUnshuffle(2), floats(2, 3, 4, 6))],
    nn.Flatten: [row(lambda: nn.Flatten(1, 2), IMAGE)],
    nn.Unflatten: [row(lambda: nn.Unflatten(1, (2, 2)), IMAGE)],
    nn.Upsample: [
        row(lambda: nn.Upsample(scale_factor=2.0), IMAGE),
        row(lambda: nn.Upsample((5, 9), mode="bilinear"), IMAGE, name="bilinear"),
        row(lambda: nn.Upsample((5, 9), mode="bicubic", align_corners=True), IMAGE, name="bicubic"),
        row(lambda: nn.Upsample(11, mode="linear"), SIGNAL, name="linear"),
        row(lambda: nn.Upsample((3, 7, 5), mode="trilinear"), VOLUME, name="trilinear"),
    ],
    nn.UpsamplingBilinear2d: [row(lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE)],
    nn.UpsamplingNearest2d: [row(lambda: nn.UpsamplingNearest2d((9, 5)), IMAGE)],
    nn.Softmax2d: [row(nn.Softmax2d, IMAGE)],
    nn.Dropout1d: [row(lambda: nn.Dropout1d(0.3), SIGNAL)],
    nn.Dropout2d: [row(lambda: nn.Dropout2d(0.3), IMAGE)],
    nn.Dropout3d: [row(lambda: nn.Dropout3d(0.3), VOLUME)],
}
NORM_RTOL = {"rtol": 2e-4}  # they divide by a deviation
NORMS = {
    nn.BatchNorm1d: [
        row(lambda: nn.BatchNorm1d(5), normal(6, 5), **NORM_RTOL),
        row(lambda: nn.BatchNorm1d(4, affine=False), normal(2, 4, 9), name="signal", **NORM_RTOL),
        row(lambda: nn.BatchNorm1d(5, momentum=None), normal(6, 5), name="cumulative", **NORM_RTOL),
        row(lambda: nn.BatchNorm1d(5, track_running_stats=False), normal(6, 5), name="untracked", **NORM_RTOL),
    ],
    nn.BatchNorm2d: [row(lambda: nn.BatchNorm2d(4, momentum=0.3), normal(2, 4, 7, 6), **NORM_RTOL)],
    nn.BatchNorm3d: [row(lambda: nn.BatchNorm3d(4, eps=1e-3), normal(2, 4, 4, 5, 4), **NORM_RTOL)],
    nn.SyncBatchNorm: [row(lambda: nn.SyncBatchNorm(4), normal(2, 4, 7, 6), **NORM_RTOL)],
    nn.LazyBatchNorm1d: [row(lazy(nn.LazyBatchNorm1d, shape=(6, 5)), normal(6, 5), **NORM_RTOL)],
    nn.LazyBatchNorm2d: [row(lazy(nn.LazyBatchNorm2d, shape=(2, 4, 7, 6)), normal(2, 4, 7, 6), **NORM_RTOL)],
    nn.LazyBatchNorm3d: [row(lazy(nn.LazyBatchNorm3d, shape=(2, 4, 4, 5, 4)), normal(2, 4, 4, 5, 4), **NORM_RTOL)],
    nn.InstanceNorm1d: [row(lambda: nn.InstanceNorm1d(4, affine=True), normal(2, 4, 9), **NORM_RTOL)],
    nn.InstanceNorm2d: [
        row(lambda: nn.InstanceNorm2d(4), normal(2, 4, 7, 6), **NORM_RTOL),
        row(
            lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            normal(2, 4, 7, 6),
            name="tracked",
            **NORM_RTOL,
        ),
    ],
    nn.InstanceNorm3d: [row(lambda: nn.InstanceNorm3d(4), normal(2, 4, 4, 5, 4), **NORM_RTOL)],
    nn.LazyInstanceNorm1d: [row(lazy(nn.LazyInstanceNorm1d, shape=(2, 4, 9)), normal(2, 4, 9), **NORM_RTOL)],
    nn.LazyInstanceNorm2d: [row(lazy(nn.LazyInstanceNorm2d, shape=(2, 4, 7, 6)), normal(2, 4, 7, 6), **NORM_RTOL)],
    nn.LazyInstanceNorm3d: [
        row(lazy(nn.LazyInstanceNorm3d, shape=(2, 4, 4, 5, 4)), normal(2, 4, 4, 5, 4), **NORM_RTOL)
    ],
    nn.LayerNorm: [
        row(lambda: nn.LayerNorm((4, 5)), normal(3, 4, 5), **NORM_RTOL),
        row(lambda: nn.LayerNorm(5, bias=False), normal(3, 4, 5), name="no bias", **NORM_RTOL),
        row(lambda: nn.LayerNorm(5, elementwise_affine=False), normal(3, 5), name="plain", **NORM_RTOL),
    ],
    nn.RMSNorm: [
        row(lambda: nn.RMSNorm(5), normal(3, 4, 5), **NORM_RTOL),
        row(lambda: nn.RMSNorm((4, 5), eps=1e-3, elementwise_affine=False), normal(3, 4, 5), name="2d", **NORM_RTOL),
    ],
    nn.GroupNorm: [
        row(lambda: nn.GroupNorm(2, 4), normal(2, 4, 7, 6), **NORM_RTOL),
        row(lambda: nn.GroupNorm(4, 4, affine=False), normal(2, 4, 9), name="plain", **NORM_RTOL),
    ],
    nn.LocalResponseNorm: [row(lambda: nn.LocalResponseNorm(3, alpha=0.1), IMAGE)],
    nn.CrossMapLRN2d: [row(lambda: nn.CrossMapLRN2d(3, alpha=0.1), IMAGE)],
}
RECURRENT = {
    nn.RNN: [
        row(lambda: nn.RNN(4, 5), normal(3, 2, 4)),
        row(
            lambda: nn.RNN(4, 5, 2, nonlinearity="relu", batch_first=True, bidirectional=True),
            normal(2, 3, 4),
            normal(4, 2, 5),
            name="relu, two layers, both ways",
        ),
    ],
    nn.LSTM: [
        row(lambda: nn.LSTM(4, 5), normal(3, 2, 4)),
        row(lambda: nn.LSTM(4, 5, 2, bias=False, bidirectional=True), normal(3, 2, 4), name="two layers, both ways"),
        row(lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True), normal(2, 3, 4), name="projected"),
        row(lambda: nn.LSTM(4, 5), normal(3, 4), name="unbatched"),
    ],
    nn.GRU: [
        row(lambda: nn.GRU(4, 5), normal(3, 2, 4), normal(1, 2, 5)),
        row(lambda: nn.GRU(4, 5, 2, bidirectional=True), normal(3, 2, 4), name="two layers, both ways"),
    ],
    nn.RNNCell: [row(lambda: nn.RNNCell(4, 5, nonlinearity="relu"), normal(3, 4), normal(3, 5))],
    nn.LSTMCell: [row(lambda: nn.LSTMCell(4, 5), normal(3, 4))],
    nn.GRUCell: [row(lambda: nn.GRUCell(4, 5), normal(3, 4), normal(3, 5))],
}
ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
TRANSFORMERS = {
    nn.MultiheadAttention: [
        row(lambda: nn.MultiheadAttention(8, 2), normal(5, 2, 8), normal(4, 2, 8), normal(4, 2, 8)),
        row(
            lambda: nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True, kdim=4, vdim=6, batch_first=True),
            normal(2, 5, 8),
            normal(2, 3, 4),
            normal(2, 3, 6),
            name="other widths",
        ),
    ],
    nn.TransformerEncoderLayer: [
        row(lambda: nn.TransformerEncoderLayer(**ENCODER), normal(2, 4, 8), **NORM_RTOL),
        row(
            lambda: nn.TransformerEncoderLayer(**ENCODER, norm_first=True, activation="gelu"),
            normal(2, 4, 8),
            name="norm first",
            **NORM_RTOL,
        ),
    ],
    nn.TransformerDecoderLayer: [
        row(lambda: nn.TransformerDecoderLayer(**ENCODER), normal(2, 4, 8), normal(2, 5, 8), **NORM_RTOL)
    ],
    nn.TransformerEncoder: [
        row(
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2, norm=nn.LayerNorm(8)),
            normal(2, 4, 8),
            **NORM_RTOL,
        )
    ],
    nn.TransformerDecoder: [
        row(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER), 1, norm=nn.LayerNorm(8)),
            normal(2, 4, 8),
            normal(2, 5, 8),
            **NORM_RTOL,
        )
    ],
    nn.Transformer: [
        row(
            lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **ENCODER),
            normal(2, 4, 8),
            normal(2, 5, 8),
            **NORM_RTOL,
        )
    ],
}
LINEAR_AND_SPARSE = {
    nn.Linear: [
        row(lambda: nn.Linear(4, 6), normal(2, 3, 4)),
        row(lambda: nn.Linear(4, 6, bias=False), normal(4), name="vector"),
    ],
    nn.LazyLinear: [row(lazy(nn.LazyLinear, 6, shape=(2, 4)), normal(2, 4))],
    nn.Bilinear: [row(lambda: nn.Bilinear(4, 3, 5), normal(2, 4), normal(2, 3))],
    nn.Embedding: [
        row(lambda: nn.Embedding(6, 4, padding_idx=2), labels(6, 3, 5)),
        row(lambda: nn.Embedding(6, 4, scale_grad_by_freq=True), labels(6, 3, 5), name="scaled by frequency"),
        row(lambda: nn.Embedding(6, 4, max_norm=1.0), labels(6, 3, 5), name="max norm"),
    ],
    nn.EmbeddingBag: [
        row(lambda: nn.EmbeddingBag(6, 4), labels(6, 7), given(0, 3, 3)),
        row(lambda: nn.EmbeddingBag(6, 4, mode="sum"), labels(6, 3, 5), name="sum of rows"),
        row(lambda: nn.EmbeddingBag(6, 4, mode="max"), labels(6, 3, 5), name="max of rows"),
    ],
    nn.AdaptiveLogSoftmaxWithLoss: [
        row(lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=2.0), normal(5, 8), labels(12, 5))
    ],
    nn.Sequential: [row(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), normal(3, 4))],
    nn.ModuleList: [row(ByPlace, normal(3, 4))],
    nn.ParameterList: [row(ByPlace, normal(4))],
    nn.ModuleDict: [row(ByName, normal(3, 4))],
    nn.ParameterDict: [row(ByName, normal(4))],
}
PAIR = (normal(5, 4), normal(5, 4))
LOSSES = {
    nn.L1Loss: [row(lambda: nn.L1Loss(reduction="sum"), *PAIR)],
    nn.MSELoss: [row(nn.MSELoss, *PAIR)],
    nn.HuberLoss: [row(lambda: nn.HuberLoss(delta=0.7), *PAIR)],
    nn.SmoothL1Loss: [row(lambda: nn.SmoothL1Loss(reduction="none", beta=0.6), *PAIR)],
    nn.BCELoss: [row(nn.BCELoss, floats(5, 4, low=0.05, high=0.9), floats(5, 4, low=0.1, high=0.95))],
    nn.BCEWithLogitsLoss: [
        row(
            lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 0.5, 3.0])),
            normal(5, 4),
            labels_float := (lambda: torch.randint(0, 2, (5, 4)).float()),
        ),
    ],
    nn.CrossEntropyLoss: [
        row(nn.CrossEntropyLoss, normal(5, 4), labels(4, 5)),
        row(
            lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]), ignore_index=1, label_smoothing=0.1),
            normal(2, 4, 3),
            labels(4, 2, 3),
            name="weighted, smoothed",
        ),
        row(nn.CrossEntropyLoss, normal(5, 4), lambda: torch.randn(5, 4).softmax(-1), name="probabilities"),
    ],
    nn.LinearCrossEntropyLoss: [
        row(lambda: nn.LinearCrossEntropyLoss(4, 6), normal(5, 4), labels(6, 5)),
        row(
            lambda: nn.LinearCrossEntropyLoss(4, 6, bias=True, options=nn.LinearCrossEntropyOptions()),
            normal(5, 4),
            labels(6, 5),
            name="chunked",
        ),
    ],
    nn.NLLLoss: [row(nn.NLLLoss, log_softmax(5, 4), labels(4, 5))],
    nn.NLLLoss2d: [row(nn.NLLLoss, log_softmax(2, 4, 3, 3, dim=1), labels(4, 2, 3, 3))],
    nn.KLDivLoss: [row(lambda: nn.KLDivLoss(reduction="batchmean"), log_softmax(5, 4), floats(5, 4, low=0.1, high=1))],
    nn.PoissonNLLLoss: [row(lambda: nn.PoissonNLLLoss(full=True), normal(5, 4), floats(5, 4, low=0.5, high=4))],
    nn.GaussianNLLLoss: [row(nn.GaussianNLLLoss, *PAIR, floats(5, 4, low=0.5, high=2))],
    nn.CTCLoss: [
        row(
            nn.CTCLoss,
            log_softmax(7, 2, 5),
            given([1, 2, 2], [3, 1, 4]),
            given(7, 6),
            given(3, 2),
        ),
        row(
            lambda: nn.CTCLoss(blank=4, reduction="sum", zero_infinity=True),
            log_softmax(5, 2, 5),
            given([1, 1, 1], [3, 1, 0]),
            given(4, 5),
            given(3, 2),
            name="infinite",
        ),
    ],
    nn.CosineEmbeddingLoss: [row(lambda: nn.CosineEmbeddingLoss(0.1), *PAIR, signs(5))],
    nn.CosineSimilarity: [row(nn.CosineSimilarity, *PAIR)],
    nn.PairwiseDistance: [row(lambda: nn.PairwiseDistance(3.0), *PAIR)],
    nn.HingeEmbeddingLoss: [row(nn.HingeEmbeddingLoss, normal(5, 4), signs(5, 4))],
    nn.MarginRankingLoss: [row(lambda: nn.MarginRankingLoss(0.2), normal(5), normal(5), signs(5))],
    nn.MultiLabelMarginLoss: [
        row(nn.MultiLabelMarginLoss, normal(2, 4), given([3, 0, -1, 1], [1, -1, 0, 2])),
    ],
    nn.MultiLabelSoftMarginLoss: [row(nn.MultiLabelSoftMarginLoss, normal(5, 4), labels_float)],
    nn.MultiMarginLoss: [
        row(nn.MultiMarginLoss, normal(5, 4), labels(4, 5)),
        row(lambda: nn.MultiMarginLoss(2, 0.5), normal(5, 4), labels(4, 5), name="squared"),
    ],
    nn.SoftMarginLoss: [row(nn.SoftMarginLoss, normal(5, 4), signs(5, 4))],
    nn.TripletMarginLoss: [row(lambda: nn.TripletMarginLoss(2.0, swap=True), *PAIR, normal(5, 4))],
    nn.TripletMarginWithDistanceLoss: [
        row(lambda: nn.TripletMarginWithDistanceLoss(distance_function=cosine_distance), *PAIR, normal(5, 4))
    ],
}
NOT_MODULES_TO_CALL = {
    nn.Module: "the base class: it has no forward",
    nn.Container: "the base class of old containers: it has no forward",
    nn.RNNBase: "the base class of the recurrent nets",
    nn.RNNCellBase: "the base class of the recurrent cells",
    nn.DataParallel: "copies a module over CUDA devices: a mesh does that here",
}


def _rows() -> list[Row]:
    families = (
        {kind: [row(build, floats(3, 4, 6), name=str(i or "")) for i, build in enumerate(builds)]
         for kind, builds in ACTIVATIONS.items()},
        CONVOLUTIONS, POOLS, PADS_AND_SHAPES, NORMS, RECURRENT, TRANSFORMERS, LINEAR_AND_SPARSE, LOSSES,
    )  # fmt: skip
    return [
        Row(kind, build, inputs, f"{kind.__name__}{f' {name}' if name else ''}", kind in DRAWING, **more)
        for family in families
        for kind, cases in family.items()
        for build, inputs, name, more in cases
    ]


ROWS = _rows()
