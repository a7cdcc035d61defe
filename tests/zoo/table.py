"""All rows of the zoo, with what those that are refused are told."""

import dataclasses

from tests.zoo.losses import LOSSES
from tests.zoo.science import SCIENCE
from tests.zoo.sequence import SEQUENCE
from tests.zoo.vision import VISION

_VALUE, _SIZE = "Python needs the value of a tensor", "the shape of a result depends on the values"

REFUSED = {
    "gpytorch/exact GP, marginal likelihood": _VALUE,
    "kornia/FocalLoss": "aten.mean.default has no lowering to JAX",
    "monai/HausdorffDTLoss": _VALUE,
    "pytorch_metric_learning/ArcFaceLoss": _SIZE,
    "pytorch_metric_learning/CircleLoss": _SIZE,
    "pytorch_metric_learning/ContrastiveLoss": _SIZE,
    "pytorch_metric_learning/CosFaceLoss": _SIZE,
    "pytorch_metric_learning/MultiSimilarityLoss": _SIZE,
    "pytorch_metric_learning/MultiSimilarityLoss with MultiSimilarityMiner": _SIZE,
    "pytorch_metric_learning/NTXentLoss": _SIZE,
    "pytorch_metric_learning/ProxyAnchorLoss": _SIZE,
    "pytorch_metric_learning/ProxyNCALoss": _SIZE,
    "pytorch_metric_learning/SubCenterArcFaceLoss": _SIZE,
    "pytorch_metric_learning/SupConLoss": _SIZE,
    "pytorch_metric_learning/TripletMarginLoss": _SIZE,
    "pytorch_metric_learning/TripletMarginLoss with BatchHardMiner": _SIZE,
    "segmentation_models_pytorch/LovaszLoss": _VALUE,
    "tab_transformer_pytorch/TabTransformer": _VALUE,
    "torch_geometric/ChebConv": _SIZE,
    "torchdiffeq/odeint, dopri5": _VALUE,
    "torchmetrics/regression.pearson_corrcoef": _VALUE,
    "transformers/AutoformerForPrediction": _VALUE,
    "transformers/BeitForMaskedImageModeling": _SIZE,
    "transformers/HubertForCTC": _SIZE,
    "transformers/Qwen2VLForConditionalGeneration": _VALUE,
    "transformers/VideoMAEForPreTraining": _SIZE,
    "transformers/Wav2Vec2ForCTC": _SIZE,
    "transformers/Wav2Vec2ForPreTraining": _VALUE,
    "x_transformers/Decoder, ALiBi": "The captured function registers the buff",
}
"""A part of the error of each row that is refused."""

ZOO = [dataclasses.replace(row, refused=REFUSED.get(str(row))) for row in (*VISION, *SEQUENCE, *SCIENCE, *LOSSES)]
NAMED = {str(row): row for row in ZOO}
