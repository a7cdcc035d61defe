"""Functions of libraries that a capture runs in plain operators, beside the libraries' own in eager torch."""

import functools
from typing import Any

import jax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.loss import test_metric_updates
from tests.oracles import derivatives
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import sgd_step
from validation.zoo.rows import declare_operators_of_torchvision

ROWS = 8

agrees = functools.partial(derivatives.agrees, rtol=1e-5, atol=1e-5)


@pytest.fixture
def reducers() -> Any:
    return pytest.importorskip("pytorch_metric_learning.reducers")


BOUNDS = [{"low": 0}, {"high": 1.0}, {"low": -0.5, "high": 0.5}, {"low": 100.0}]  # the last one leaves nothing


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_between_bounds(reducers: Any, bounds: dict[str, float], dtype: torch.dtype) -> None:
    reducer = reducers.ThresholdReducer(**bounds)

    def loss(x: torch.Tensor) -> torch.Tensor:
        losses = x.sum(1) * 2
        found = {"loss": {"losses": losses, "indices": torch.arange(ROWS), "reduction_type": "element"}}
        return reducer(found, x, torch.arange(ROWS))

    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # of 8 bits
    agrees(loss, torch.randn(ROWS, 3, dtype=dtype), rtol=tolerance, atol=tolerance)


def test_the_mean_of_selected_losses(reducers: Any) -> None:
    reducer = reducers.ThresholdReducer(high=1.0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0
        losses, indices = x.sum(1)[chosen], torch.arange(ROWS)[chosen]
        found = {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}
        return reducer(found, x, torch.arange(ROWS))

    torch.manual_seed(0)
    x = torch.randn(ROWS, 3)
    for given in (x, -x.abs(), 9 + x.abs()):
        agrees(loss, given)


def test_a_threshold_that_is_changed_makes_another_program(reducers: Any) -> None:
    reducer, model = reducers.ThresholdReducer(low=0.0), nn.Linear(3, 1)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = {"loss": {"losses": model(x)[:, 0], "indices": torch.arange(ROWS), "reduction_type": "element"}}
        return reducer(found, x, torch.arange(ROWS))

    torch.manual_seed(0)
    x = torch.randn(ROWS, 3)
    step = sgd_step(model, loss_fn, (8, 1), rate=0.0)
    state = step.init()
    for low in (0.0, 0.3):
        reducer.low = low
        state, metrics = step(state, x)
        torch.testing.assert_close(torch.tensor(float(metrics["loss"])), loss_fn(model, x).detach())


def test_a_function_of_another_source_is_left_as_it_is(reducers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def element_reduction_helper(self: Any, losses: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        past = losses[losses > self.low]
        return past.sum() if len(past) >= 1 else self.zero_loss(embeddings)

    monkeypatch.setattr(reducers.ThresholdReducer, "element_reduction_helper", element_reduction_helper)
    reducer = reducers.ThresholdReducer(low=0)
    with pytest.raises(NotImplementedError, match=r"len\(past\) >= 1"):
        ts.jax_jit(lambda x: reducer.element_reduction_helper(x, x))(torch.randn(ROWS))


def test_a_function_that_is_wrapped_runs_in_its_wrapper(reducers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = reducers.ThresholdReducer.element_reduction_helper

    @functools.wraps(original)
    def doubled(*args: Any) -> torch.Tensor:
        return 2 * original(*args)

    monkeypatch.setattr(reducers.ThresholdReducer, "element_reduction_helper", doubled)
    reducer = reducers.ThresholdReducer(low=0)
    with pytest.raises(NotImplementedError, match=r"num_past_filter = len\(losses\)"):
        ts.jax_jit(lambda x: reducer.element_reduction_helper(x, x))(torch.randn(ROWS))


def test_statistics_of_the_model_are_refused(reducers: Any) -> None:
    reducer = reducers.ThresholdReducer(low=0, collect_stats=True)
    with pytest.raises(NotImplementedError, match=r"num_past_filter = len\(losses\)"):
        ts.jax_jit(lambda x: reducer.element_reduction_helper(x, x))(torch.randn(ROWS))


def test_a_miner_that_notes_how_many_it_has_found(reducers: Any) -> None:
    """Found of the labels: index tensors that differ from batch to batch, beside an attribute that changes."""
    from pytorch_metric_learning import losses, miners

    loss, miner = losses.TripletMarginLoss(), miners.BatchHardMiner()

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = model(batch[0])
        return loss(out, batch[1], miner(out, batch[1]))

    torch.manual_seed(0)
    batches = [(torch.randn(ROWS, 3), torch.arange(ROWS) % classes) for classes in (2, 4, 3)]
    agrees_with_torch(nn.Linear(3, 4), loss_fn, batches)


def pearson(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from torchmetrics.functional.regression import pearson_corrcoef

    return pearson_corrcoef(x, y)


def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return pearson(x, y).nansum()


def concordance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from torchmetrics.functional.regression import concordance_corrcoef

    return concordance_corrcoef(x, y).nansum()


@pytest.mark.filterwarnings("ignore:The variance of predictions")  # of the library, where there is hardly any
def test_correlations() -> None:
    declare_operators_of_torchvision()
    pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS, 3)
    agrees(correlation, x, y)
    agrees(correlation, x[:, 0], y[:, 0])
    agrees(concordance, x, y)
    agrees(correlation, x, x * torch.tensor([1.0, -1.0, 0.0]))  # exactly one, and one side that does not vary
    constant = torch.ones(ROWS, 3)
    assert torch.isnan(pearson(x, constant)).all()
    assert torch.isnan(ts.jax_jit(pearson)(x, constant).cpu()).all()


def factor(x: torch.Tensor) -> torch.Tensor:
    from linear_operator.utils.cholesky import psd_safe_cholesky

    found = psd_safe_cholesky(x @ x.mT)
    return (found * torch.arange(found.shape[-1])).square().sum()


def test_factors_of_matrices_that_are_hardly_positive() -> None:
    utils = pytest.importorskip("linear_operator.utils")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6)
    agrees(factor, x)
    x[1, 2:] = x[1, :2] * 3  # of rank 2, so that the diagonal is enlarged, of this one alone
    with jax.enable_x64(True), pytest.warns(utils.warnings.NumericalWarning, match="added jitter"):
        agrees(factor, x.double())  # a rounding of 1e-16 beside a pivot of 1e-8
    negative = -torch.eye(3)
    with pytest.raises(utils.errors.NotPSDError), pytest.warns(utils.warnings.NumericalWarning):
        utils.cholesky.psd_safe_cholesky(negative)
    assert torch.isnan(ts.jax_jit(utils.cholesky.psd_safe_cholesky)(negative).cpu()).any()


@pytest.mark.parametrize("name", ["accuracy", "auroc", "collection"])
def test_torchmetrics(name: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": 4}
    metric = {
        "accuracy": lambda: torchmetrics.Accuracy(**options),
        "auroc": lambda: torchmetrics.AUROC(**options),
        "collection": lambda: torchmetrics.MetricCollection([torchmetrics.F1Score(**options)]),
    }[name]
    test_metric_updates.check(metric, lambda m, out, target: m.update(out, target), within=True)
