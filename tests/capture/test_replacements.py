"""Functions that captures write in another way than PyTorch: over their arguments, against eager torch."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.derivatives import X, agrees
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH, squared_error
from torch_shard._capture import replacements as _initialisers

CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums and logarithms of sums, in another order

Case = tuple[str, Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]


def ctc(**options: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.ctc_loss(x.log_softmax(-1), **options)


def cases() -> Iterator[Case]:
    rows, row = torch.tensor([[1, 2, 2], [3, 0, 0], [1, 4, 1]]), torch.tensor([1, 2, 2, 3, 1, 4, 1])
    lengths = {"input_lengths": torch.tensor([7, 5, 6]), "target_lengths": torch.tensor([3, 1, 3])}
    as_numbers = {"input_lengths": (7, 5, 6), "target_lengths": (3, 1, 3)}
    for reduction in ("none", "sum", "mean"):
        yield f"ctc {reduction}", ctc(targets=rows, reduction=reduction, **lengths), (7, 3, 5)
        yield f"ctc in a row {reduction}", ctc(targets=row, reduction=reduction, **as_numbers), (7, 3, 5)
    none = {"input_lengths": torch.tensor([7, 0]), "target_lengths": torch.tensor([0, 0])}
    yield "ctc without labels", ctc(targets=torch.ones(2, 3).long(), reduction="none", **none), (7, 2, 5)
    one = {"input_lengths": torch.tensor(6), "target_lengths": torch.tensor(2)}
    yield "ctc of one sequence", ctc(targets=torch.tensor([4, 4]), blank=1, **one), (6, 5)
    target = torch.tensor([[3, -1, 0, 1], [1, 2, -1, 0], [-1, 0, 1, 2], [0, 1, 2, 3]])
    for reduction in ("none", "sum", "mean"):
        margins = lambda x, r=reduction: F.multilabel_margin_loss(x, target, reduction=r)  # noqa: E731
        yield f"multilabel_margin_loss {reduction}", margins, (4, 4)
    yield "multilabel_margin_loss of one row", lambda x: F.multilabel_margin_loss(x, target[0]), (4,)
    torch.manual_seed(0)
    net = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=2.0, head_bias=True).requires_grad_(False)
    labels = torch.tensor([0, 2, 3, 6, 7, 11])
    yield "adaptive log-softmax", lambda x: net(x, labels).output, (6, 8)
    yield "adaptive log-softmax of one cluster", lambda x: net(x, torch.tensor([8, 9])).loss, (2, 8)
    yield "adaptive log-softmax of one row", lambda x: net(x, torch.tensor(5)).output, (8,)
    at = lambda x: (x[0, 0, 0] > 9).long()  # noqa: E731  (0, as a tensor that depends on the input)
    yield "index by a number in a tensor", lambda x: x[at(x)] + x[at(x) - 1], (3, 4, 5)
    yield "index by numbers in tensors", lambda x: x[at(x), :, at(x) + 2], (3, 4, 5)
    yield "index after an ellipsis", lambda x: x[..., at(x) - 2] + x[:, :, None, at(x) + 1].squeeze(2), (3, 4, 5)
    yield "index beside a list", lambda x: x[[0, 2], at(x) + 1], (3, 4, 5)
    yield "index beside a mask", lambda x: x[torch.ones(3, 4).bool(), at(x) + 1], (3, 4, 5)


def of_tensors(x: torch.Tensor) -> torch.Tensor:
    y = x.detach()  # eager torch warns without
    made = torch.tensor([[y[0], 2], [y.sum(), 3.5]]) * x[0]
    whole = torch.tensor([x.argmax(), 3, torch.tensor(2, dtype=torch.int32)])
    assert (whole.dtype, torch.tensor([x[0] > 0, True]).dtype) == (torch.int64, torch.bool)
    return made.flatten() + whole.sum() + torch.tensor([y[1]], dtype=torch.float64).float()


def test_a_tensor_of_a_list_of_tensors_has_their_values() -> None:
    agrees(lambda x: of_tensors(x).sum(), X)
    torch.testing.assert_close(ts.jax_jit(of_tensors)(X).cpu(), of_tensors(X), **CLOSE)


ALL = {name: (fn, shape) for name, fn, shape in cases()}


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, (_, shape) in ALL.items()}


def weighed(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = fn(x)
    return (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum(), out


@functools.cache
def compiled(kind: str) -> dict[str, Any]:
    """Value, result and gradient of each case whose name begins so, from one program."""
    of = {name: functools.partial(weighed, fn) for name, (fn, _) in ALL.items() if name.startswith(kind)}
    fns = {name: ts.jax_view(ts.jax_value_and_grad(fn, has_aux=True)) for name, fn in of.items()}
    return ts.torch_view(jax.jit(lambda xs: {name: fn(xs[name]) for name, fn in fns.items()}))(inputs())


@pytest.mark.parametrize("name", ALL)
def test_value_and_gradient_equal_eager_torch(name: str) -> None:
    leaf = inputs()[name].requires_grad_()
    value, out = weighed(ALL[name][0], leaf)
    (_, found), grad = compiled(name.partition(" ")[0])[name]
    torch.testing.assert_close(found.cpu(), out.detach(), **CLOSE)
    torch.testing.assert_close(grad.cpu(), torch.autograd.grad(value, leaf)[0], **CLOSE)


def test_a_sequence_without_a_path_is_infinitely_unlikely() -> None:
    logp, target = torch.zeros(2, 1, 3).log_softmax(-1), torch.tensor([[1, 1]])
    lengths = torch.tensor([2]), torch.tensor([2])  # a repeated label needs a blank between
    assert ts.jax_jit(lambda x: F.ctc_loss(x, target, *lengths))(logp).cpu().isinf()


def test_a_target_of_the_adaptive_log_softmax_that_is_no_class_is_loud() -> None:
    net = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=2.0).requires_grad_(False)
    output = ts.jax_jit(lambda x, y: net(x, y).output)(torch.randn(3, 8), torch.tensor([0, 12, -1])).cpu()
    assert output.isnan().tolist() == [False, True, True]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("end", [0, 1])
def test_no_outlier_at_the_ends_of_a_wide_interval(
    end: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of the first and the last of the numbers that are drawn: eight million to one, each."""

    def extreme(x: torch.Tensor, *ends: float, generator: Any = None) -> torch.Tensor:
        return x.fill_(ends[end])

    monkeypatch.setattr(torch.Tensor, "uniform_", extreme)
    drawn = _initialisers.trunc_normal_(torch.empty(3, dtype=dtype), 0, 0.02, -2, 2)
    assert 5 * 0.02 < drawn.abs().max() < 6 * 0.02


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_wrapper_that_a_loss_closes_over_runs_its_module(wrapper: type, caplog: Any) -> None:
    torch.manual_seed(0)
    layer, batch = nn.Linear(8, 4), (torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    eager = copy.deepcopy(layer)
    plan = ts.ShardingPlan({"weight": P("model")}, default=P())
    model = wrapper(layer)

    def loss_fn(_: nn.Module, batch: Any) -> torch.Tensor:
        return squared_error(model, batch)

    step = sgd_step(model, loss_fn, (4, 2), plan=plan)
    with caplog.at_level("INFO", "torch_shard"):
        state, _ = step(step.init(), batch)
    assert f"{wrapper.__name__} runs its module" in caplog.text
    squared_error(eager, batch).backward()
    wanted = (eager.weight - 0.1 * eager.weight.grad).detach()
    assert set(state.params) == set(layer.state_dict())
    torch.testing.assert_close(step.export(state).weight.detach(), wanted, **CLOSE)
    assert model.module is layer


def test_a_conversion_within_forward_is_refused() -> None:
    layer = nn.Linear(8, 4)
    with refuses(
        r"(?s)test_replacements.*a Linear is converted from torch.float32 .* to torch.float64", NotImplementedError
    ):
        ts.jax_jit(lambda x: layer.double()(x.double()))(torch.ones(2, 8))
    assert layer.weight.dtype is torch.float32
