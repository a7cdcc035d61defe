"""All rows of the zoo, with what those that are refused are told."""

import dataclasses

from validation.zoo.losses import LOSSES
from validation.zoo.science import SCIENCE
from validation.zoo.sequence import SEQUENCE
from validation.zoo.vision import VISION

_VALUE, _SIZE = "Python needs the value of a tensor", "the shape of a result depends on the values"

REFUSED = {
    "monai/HausdorffDTLoss": _VALUE,
    "pytorch_metric_learning/MultiSimilarityLoss with MultiSimilarityMiner": _SIZE,
    "torchdiffeq/odeint, dopri5": _VALUE,
    "transformers/AutoformerForPrediction": _VALUE,
}
"""A part of the error of each row that is refused."""

ZOO = [dataclasses.replace(row, refused=REFUSED.get(str(row))) for row in (*VISION, *SEQUENCE, *SCIENCE, *LOSSES)]
NAMED = {str(row): row for row in ZOO}
