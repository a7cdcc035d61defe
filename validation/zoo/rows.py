"""A row of the zoo: a model or loss of a package that is not ours, tiny, with its batches and its loss."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.tables.cases import BATCH, Case, cross_entropy, regression, squared_error

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]

PACKAGES = {
    "conformer": "conformer",
    "diffusers": "diffusers",
    "e3nn": "e3nn",
    "egnn_pytorch": "egnn-pytorch",
    "entmax": "entmax",
    "gpytorch": "gpytorch",
    "info_nce": "info-nce-pytorch",
    "kornia": "kornia",
    "lightly": "lightly",
    "linear_attention_transformer": "linear-attention-transformer",
    "linformer": "linformer",
    "mambapy": "mambapy",
    "monai": "monai",
    "neuralop": "neuraloperator",
    "open_clip": "open_clip_torch",
    "peft": "peft",
    "perceiver_pytorch": "perceiver-pytorch",
    "performer_pytorch": "performer-pytorch",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "pytorch_msssim": "pytorch-msssim",
    "pytorch_tcn": "pytorch-tcn",
    "reformer_pytorch": "reformer-pytorch",
    "rotary_embedding_torch": "rotary-embedding-torch",
    "rtdl_revisiting_models": "rtdl-revisiting-models",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "siren_pytorch": "siren-pytorch",
    "tab_transformer_pytorch": "tab-transformer-pytorch",
    "timm": "timm",
    "torch_geometric": "torch_geometric",
    "torchdiffeq": "torchdiffeq",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "vector_quantize_pytorch": "vector-quantize-pytorch",
    "vit_pytorch": "vit-pytorch",
    "x_transformers": "x-transformers",
    "zuko": "zuko",
}
"""What is imported, and the name under which it is installed."""


@dataclasses.dataclass(frozen=True)
class Row(Case):
    """A case of the zoo.

    Attributes:
        package: What is imported.
        refused: A part of the error by which it is refused; None of a row that is right.
        wide: Compared in float64: eager torch itself is far from that in float32, by rounding, within three steps.
    """

    rules: dict[str, P] = dataclasses.field(default_factory=dict)
    rtol: float = 1e-4  # some are deep, or divide by the deviations of a small batch
    package: str = ""
    refused: str | None = None
    wide: bool = False

    def __str__(self) -> str:
        return f"{self.package}/{self.name}"

    def model(self, seed: int = 0) -> nn.Module:
        declare_operators_of_torchvision()
        model = super().model(seed)
        return model.double() if self.wide else model

    def batches(self, num: int, seed: int = 1) -> list[Any]:
        return [tree_map(self._cast, batch) for batch in super().batches(num, seed)]

    def _cast(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.double() if self.wide and leaf.is_floating_point() else leaf

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, if so: the package is not installed, and what installs it."""
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"{PACKAGES[self.package]} is not installed: pip install -e '.[zoo]'"

    def split(self) -> "Row":
        """The same with every weight split over the model axis where that is even."""
        weights = {n: p for n, p in self.model().named_parameters() if p.ndim > 1 and p.shape[0] % 2 == 0}
        return dataclasses.replace(self, rules=dict.fromkeys(weights, P("model")))


@functools.cache
def declare_operators_of_torchvision() -> None:
    """Let torchvision be imported where its compiled operators do not load, as beside a torch for the CPU alone."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def rows(package: str, *cases: Row) -> list[Row]:
    return [dataclasses.replace(case, package=package) for case in cases]


def images(size: int, out: int = 4, channels: int = 3) -> Callable[[], Batch]:
    return regression(channels, size, size, out=out)


def labelled(*shape: int, classes: int = 4) -> Callable[[], Batch]:
    return lambda: (torch.randn(BATCH, *shape), torch.arange(BATCH) % classes)


def tokens(length: int = 8, vocabulary: int = 32) -> Callable[[], Batch]:
    def batch() -> Batch:
        drawn = torch.randint(1, vocabulary, (BATCH, length + 1))
        return drawn[:, :-1], drawn[:, 1:]

    return batch


def pairs(*shape: int, out: tuple[int, ...] | None = None) -> Callable[[], Batch]:
    """Inputs and targets of these shapes."""
    return lambda: (torch.randn(BATCH, *shape), torch.randn(BATCH, *(shape if out is None else out)))


def masks(size: int, classes: int = 2, channels: int = 3) -> Callable[[], Batch]:
    """Images with a class for each pixel."""
    return lambda: (torch.randn(BATCH, channels, size, size), torch.randint(0, classes, (BATCH, size, size)))


def arrays(**shapes: tuple[int, ...]) -> Callable[[], Batch]:
    return lambda: {name: torch.randn(BATCH, *shape) for name, shape in shapes.items()}


def first(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The squared error of the first of what a model returns."""
    out = model(batch[0])
    return F.mse_loss(out[0], batch[1])


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean square of all that a model returns for the inputs."""
    return sum(t.float().square().mean() for t in _tensors(model(batch[0])))  # pyright: ignore


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class With(nn.Module):
    """A small net in front of a loss, whose parameters, if any, are trained along."""

    def __init__(self, loss: Any, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)) if net is None else net
        self.loss = loss

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), *others)


def through(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model itself returns."""
    return model(*batch)


def small_conv(out: int = 1, channels: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, out, 3, padding=1))


__all__ = [
    "BATCH",
    "Row",
    "With",
    "arrays",
    "cross_entropy",
    "first",
    "images",
    "labelled",
    "masks",
    "pairs",
    "regression",
    "rows",
    "small_conv",
    "squared_error",
    "squares",
    "through",
    "tokens",
]
