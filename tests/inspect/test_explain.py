"""What a capture is made of, and what of it is refused."""

import rich
import torch
from torch import nn

import torch_shard as ts
from tests.inspect.test_compare import linear
from tests.tables import odd  # noqa: F401  (defines operators)
from tests.tables.cases import squared_error


def test_an_explanation_counts_operators_and_names_what_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.isfinite().all()
            return torch.dropout(x * torch.ops.tests.odd(x.detach()), 0.5, True) + OUTSIDE

    found = ts.explain_capture(linear(Odd()), squared_error, (torch.ones(8, 4), torch.ones(8, 2)))
    assert [op.name for op in found.refused] == ["tests.odd.default"]
    assert "test_explain.py" in found.refused[0].place
    assert found.random
    assert found.closure == ((2,),)
    assert len(found.skipped_checks) == 1
    assert "assert x.isfinite().all()" in found.skipped_checks[0]
    assert sum(op.count for op in found.operators if op.name == "aten.mm.default") == 1  # the weight's gradient
    rich.print(found)


OUTSIDE = torch.ones(2)
