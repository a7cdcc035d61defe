"""Losses of packages behind a small net: metric learning, lightly, entmax, similarity of images, torchmetrics, timm."""

import dataclasses
from typing import Any

import torch
from torch import nn

from validation.zoo.rows import BATCH, Row, With, labelled, rows, small_conv, through


def _metric(kind: str, miner: str | None = None, **options: Any) -> Row:
    def build() -> nn.Module:
        from pytorch_metric_learning import losses, miners

        loss = getattr(losses, kind)(**options)
        return _Mined(loss, getattr(miners, miner)()) if miner else With(loss)

    return Row(kind if miner is None else f"{kind} with {miner}", build, labelled(6), loss_fn=through)


class _Mined(With):
    def __init__(self, loss: Any, miner: Any) -> None:
        super().__init__(loss)
        self.miner = miner

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        return self.loss(out, *others, self.miner(out, *others))


_CLASSES: dict[str, Any] = {"num_classes": 4, "embedding_size": 8}

METRIC = rows(
    "pytorch_metric_learning",
    _metric("ArcFaceLoss", **_CLASSES),
    _metric("CosFaceLoss", **_CLASSES),
    _metric("NormalizedSoftmaxLoss", **_CLASSES),
    _metric("ProxyAnchorLoss", **_CLASSES),
    _metric("ProxyNCALoss", **_CLASSES),
    _metric("SubCenterArcFaceLoss", **_CLASSES),
    _metric("TripletMarginLoss"),
    _metric("ContrastiveLoss"),
    _metric("NTXentLoss"),
    _metric("SupConLoss"),
    _metric("CircleLoss"),
    _metric("MultiSimilarityLoss"),
    _metric("MultiSimilarityLoss", "MultiSimilarityMiner"),
    _metric("TripletMarginLoss", "BatchHardMiner"),
)


class _Views(nn.Module):
    """Two views of each row, projected."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), self.net(y))


def _lightly(kind: str, **options: Any) -> Row:
    def build() -> nn.Module:
        import lightly.loss

        loss = getattr(lightly.loss, kind)(**options)
        for buffer in loss.buffers():
            buffer.zero_()  # its memory bank is whatever was there
        return _Views(loss)

    return Row(kind, build, lambda: (torch.randn(BATCH, 6), torch.randn(BATCH, 6)), loss_fn=through)


LIGHTLY = rows(
    "lightly",
    _lightly("NTXentLoss"),
    _lightly("BarlowTwinsLoss"),
    _lightly("VICRegLoss"),
    _lightly("NegativeCosineSimilarity"),
    _lightly("DCLLoss"),
)


def _entmax(kind: str, **options: Any) -> Row:
    def build() -> nn.Module:
        import entmax

        return With(getattr(entmax, kind)(**options))

    return Row(kind, build, labelled(6), loss_fn=through)


ENTMAX = rows(
    "entmax",
    _entmax("SparsemaxLoss"),
    _entmax("Entmax15Loss"),
    _entmax("EntmaxBisectLoss", alpha=1.3),
)


def _similarity(kind: str, size: int = 8, **options: Any) -> Row:
    def build() -> nn.Module:
        import pytorch_msssim

        loss = getattr(pytorch_msssim, kind)(data_range=1.0, channel=1, **options)
        return With(lambda x, y: 1 - loss(x, y), nn.Sequential(small_conv(), nn.Sigmoid()))

    return Row(
        kind, build, lambda: (torch.randn(BATCH, 3, size, size), torch.rand(BATCH, 1, size, size)), loss_fn=through
    )


def _functional(name: str, net: Any, batch: Any, **options: Any) -> Row:
    def build() -> nn.Module:
        import torchmetrics.functional as metrics

        measure: Any = metrics
        for part in name.split("."):
            measure = getattr(measure, part)
        return With(lambda x, y: -measure(x, y, **options).mean(), net())

    return Row(name, build, batch, loss_fn=through)


def _pictures() -> Any:
    return torch.randn(BATCH, 3, 16, 16), torch.rand(BATCH, 1, 16, 16)


def _positive() -> nn.Module:
    return nn.Sequential(small_conv(), nn.Sigmoid())


def _sounds() -> Any:
    return torch.randn(BATCH, 6), torch.randn(BATCH, 8)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))


SIMILARITY = [
    *rows(
        "pytorch_msssim", _similarity("SSIM", win_size=5), _similarity("MS_SSIM", 40, win_size=3, weights=[0.5, 0.5])
    ),
    *rows(
        "torchmetrics",
        dataclasses.replace(  # the gradient of a bias is a sum that cancels, but for what float32 rounds
            _functional("image.structural_similarity_index_measure", _positive, _pictures, data_range=1.0), wide=True
        ),
        _functional("image.peak_signal_noise_ratio", _positive, _pictures, data_range=1.0),
        _functional("audio.scale_invariant_signal_distortion_ratio", _net, _sounds),
        _functional("regression.pearson_corrcoef", _net, _sounds),
        _functional("pairwise.pairwise_cosine_similarity", _net, _sounds),
    ),
]


def _info_nce() -> nn.Module:
    from info_nce import InfoNCE

    return _Views(InfoNCE())


def _timm_loss(kind: str, target: Any, **options: Any) -> Row:
    def build() -> nn.Module:
        import timm.loss

        return With(getattr(timm.loss, kind)(**options))

    return Row(f"loss.{kind}", build, lambda: (torch.randn(BATCH, 6), target()), loss_fn=through)


def _classes() -> torch.Tensor:
    return torch.arange(BATCH) % 8


OF_CLASSES = [
    *rows(
        "info_nce", Row("InfoNCE", _info_nce, lambda: (torch.randn(BATCH, 6), torch.randn(BATCH, 6)), loss_fn=through)
    ),
    *rows(
        "timm",
        _timm_loss("LabelSmoothingCrossEntropy", _classes, smoothing=0.1),
        _timm_loss("BinaryCrossEntropy", _classes),
        _timm_loss("AsymmetricLossMultiLabel", lambda: (torch.rand(BATCH, 8) < 0.3).float()),
    ),
]

LOSSES = [*METRIC, *LIGHTLY, *ENTMAX, *SIMILARITY, *OF_CLASSES]
