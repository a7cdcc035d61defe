"""Rows of modules that are another row of the tests with one dim more or less, and lowered as that is."""

import torch
from torch import nn

from tests.tables.nn_table import IMAGE, SIGNAL, VOLUME, floats, labels, log_softmax, norm, normal, pool_indices, row

SIBLINGS = [
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
]
