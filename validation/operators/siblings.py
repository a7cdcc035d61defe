"""Rows of modules that are another row of the tests with one dim more or less, or made of others, or tested apart."""

import torch
from torch import nn

from tests.tables.nn_table import (
    IMAGE,
    PAIR,
    SIGNAL,
    VOLUME,
    floats,
    given,
    labels,
    log_softmax,
    norm,
    normal,
    pool_indices,
    row,
)

ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}


def cosine_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """1 - their similarity."""
    return 1 - nn.functional.cosine_similarity(x, y)


SIBLINGS = [
    # made of others, or with tests of their own
    row(nn.RNN, normal(2, 3, 4), normal(4, 2, 5))(4, 5, 2, nonlinearity="relu", batch_first=True, bidirectional=True),
    row(nn.LSTM, normal(3, 4))(4, 5),
    row(nn.MultiheadAttention, normal(5, 2, 8), normal(4, 2, 8), normal(4, 2, 8))(8, 2),
    row(nn.MultiheadAttention, normal(2, 5, 8), normal(2, 3, 4), normal(2, 3, 6))(
        8, 2, bias=False, add_bias_kv=True, kdim=4, vdim=6, batch_first=True
    ),
    norm(nn.TransformerEncoderLayer, normal(2, 4, 8))(**ENCODER, norm_first=True, activation="gelu"),
    norm(nn.TransformerDecoderLayer, normal(2, 4, 8), normal(2, 5, 8))(**ENCODER),
    row(nn.EmbeddingBag, labels(6, 7), given(0, 3, 3))(6, 4),
    row(nn.EmbeddingBag, labels(6, 3, 5))(6, 4, mode="max"),
    row(nn.TripletMarginWithDistanceLoss, *PAIR, normal(5, 4))(distance_function=cosine_distance),
    # with one dim more or less
    row(nn.Conv3d, VOLUME)(4, 2, 2, padding=1),
    row(nn.ConvTranspose1d, SIGNAL)(4, 6, 3, 2, 1, 1, groups=2),
    row(nn.ConvTranspose3d, floats(2, 4, 2, 3, 2))(4, 2, 2, 2),
    row(nn.MaxPool3d, VOLUME)(2, 1),
    row(nn.AvgPool1d, SIGNAL)(3, 2, 1),
    row(nn.AvgPool3d, VOLUME)(2, divisor_override=5),
    row(nn.LPPool1d, floats(2, 4, 9, low=0.1))(2, 3),
    row(nn.LPPool3d, floats(2, 4, 4, 5, 4, low=0.1))(2, 2),
    row(nn.AdaptiveAvgPool1d, SIGNAL)(4),
    row(nn.AdaptiveAvgPool3d, VOLUME)((2, 3, 1)),
    row(nn.AdaptiveMaxPool1d, SIGNAL)(4),
    row(nn.AdaptiveMaxPool3d, VOLUME)((2, 3, 1)),
    row(nn.FractionalMaxPool3d, VOLUME)(2, (2, 3, 2), _random_samples=torch.full((2, 4, 3), 0.4)),
    row(nn.MaxUnpool2d, floats(2, 3, 4, 4), pool_indices(2, 8))(2),
    row(nn.MaxUnpool3d, floats(2, 3, 2, 2, 2), pool_indices(3, 4))(2),
    row(nn.CircularPad1d, SIGNAL)((2, 1)),
    row(nn.CircularPad3d, VOLUME)(1),
    row(nn.ReflectionPad1d, SIGNAL)((2, 1)),
    row(nn.ReflectionPad3d, VOLUME)(1),
    row(nn.ReplicationPad1d, SIGNAL)((2, 1)),
    row(nn.ReplicationPad3d, VOLUME)(1),
    row(nn.ConstantPad1d, SIGNAL)((2, -1), 3.5),
    row(nn.ConstantPad3d, VOLUME)(1, 0.5),
    row(nn.ZeroPad1d, SIGNAL)((2, 1)),
    row(nn.ZeroPad3d, VOLUME)(1),
    norm(nn.BatchNorm3d, normal(2, 4, 4, 5, 4))(4, eps=1e-3),
    norm(nn.SyncBatchNorm, normal(2, 4, 7, 6))(4),
    norm(nn.InstanceNorm1d, normal(2, 4, 9))(4, affine=True),
    norm(nn.InstanceNorm3d, normal(2, 4, 4, 5, 4))(4),
    row(nn.NLLLoss2d, log_softmax(2, 4, 3, 3, dim=1), labels(4, 2, 3, 3), build=nn.NLLLoss)(),
    row(nn.UpsamplingBilinear2d, IMAGE)(scale_factor=2),
    # tests/lowering/test_recurrent.py and tests/capture/test_replacements.py have these, or parts of them
    row(nn.LSTM, normal(3, 2, 4))(4, 5, 2, bias=False, bidirectional=True),
    row(nn.LSTM, normal(2, 3, 4))(4, 5, proj_size=3, batch_first=True),
    row(nn.GRU, normal(3, 2, 4), normal(1, 2, 5))(4, 5),
    norm(
        nn.TransformerEncoder,
        normal(2, 4, 8),
        build=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2, norm=nn.LayerNorm(8)),
    )(),
    norm(
        nn.TransformerDecoder,
        normal(2, 4, 8),
        normal(2, 5, 8),
        build=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER), 1, norm=nn.LayerNorm(8)),
    )(),
    norm(nn.Transformer, normal(2, 4, 8), normal(2, 5, 8))(num_encoder_layers=1, num_decoder_layers=1, **ENCODER),
    row(nn.AdaptiveLogSoftmaxWithLoss, normal(5, 8), labels(12, 5))(8, 12, [3, 7], div_value=2.0),
    row(nn.CTCLoss, log_softmax(5, 2, 5), given([1, 1, 1], [3, 1, 0]), given(4, 5), given(3, 2))(
        blank=4, reduction="sum", zero_infinity=True
    ),
]
