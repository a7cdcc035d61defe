"""A fixed subset of PyTorch's operator samples, and the committed table of all of them."""

import re

import pytest
import torch

from docs.pages import section_of
from tests.tables.cases import chosen
from validation.operators.coverage import PAGE, all_ops, committed
from validation.operators.samples import outcomes_of

OPS = all_ops()
# Operators whose lowering is ours, one or two of each family.
SUBSET = [
    "angle",
    "cdist",
    "cholesky_solve",
    "digamma",
    "gather",
    "index_put",
    "index_reduce.mean",
    "kthvalue",
    "linalg.det",
    "linalg.eigh",
    "linalg.lu_solve",
    "linalg.solve",
    "linalg.svd",
    "masked_scatter",
    "median",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.ctc_loss",
    "nn.functional.dropout",
    "nn.functional.embedding_bag",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.grid_sample",
    "nn.functional.pad.replicate",
    "nn.functional.rrelu",
    "nonzero",
    "special.polygamma.special_polygamma_n_0",
    "put",
    "scatter_reduce.prod",
    "searchsorted",
    "_segment_reduce.lengths",
]


# One or two of each way to compute.
OFTEN = (
    "gather",
    "index_put",
    "linalg.lu_solve",
    "linalg.svd",
    "masked_scatter",
    "nn.functional.dropout",
    "nn.functional.embedding_bag",
    "nn.functional.rrelu",
    "nonzero",
    "put",
    "scatter_reduce.prod",
    "_segment_reduce.lengths",
)


@pytest.mark.filterwarnings("ignore")  # some samples use what PyTorch deprecates
@pytest.mark.parametrize("name", chosen(SUBSET, OFTEN))
def test_operator_equals_eager_torch_or_refuses(name: str) -> None:
    found = list(outcomes_of(OPS[name], num_samples=2))
    assert not [(where, kind, o) for where, kind, o in found if o.status in ("wrong", "error")]
    by_nature = name in ("nonzero", "index_put")  # the shape of a result depends on values
    assert by_nature or not [(where, kind, o) for where, kind, o in found if o.status == "refused"]
    assert any(o.status in ("right", "random", "refused") for _, _, o in found)


def test_the_table_has_nothing_wrong() -> None:
    assert len(committed()) > 600
    assert not [row for row in committed() if {"wrong", "error"} & set(row[1:3])]


def test_the_table_lists_every_operator() -> None:
    recorded = re.search(r"\(torch ([\w.]+),", section_of(PAGE, "operators"))
    assert recorded is not None
    if recorded[1] != torch.__version__.split("+")[0]:
        pytest.skip("the table was made with another version of PyTorch, whose operators differ")
    assert {row[0] for row in committed()} == set(OPS)
