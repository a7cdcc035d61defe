"""Our own lowerings against eager torch: value and every gradient, over what `test_nn.py` does not have."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch

CLOSE = {"rtol": 2e-4, "atol": 1e-4}  # float32; sums of up to some hundred terms, gradients squared twice
SDPA, SHORT, GROUPED = F.scaled_dot_product_attention, [(2, 3, 4, 8)] * 3, [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
DEAD_ROW = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
BIAS, WEIGHT = torch.linspace(-1, 1, 16).view(4, 4), torch.tensor([0.5, 1.0, 2.0, 0.1])
INDEX, TARGET = torch.tensor([[0, 2, 2], [1, 0, 3]]), torch.tensor([[0, 1, 2], [3, 3, 1]])


def cross_entropy(reduction: str, smooth: float, weight: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    return lambda x: F.cross_entropy(x, TARGET, weight, ignore_index=1, reduction=reduction, label_smoothing=smooth)


ROWS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "attention, scaled": (lambda q, k, v: SDPA(q, k, v, scale=0.3), SHORT),
    "attention, causal": (lambda q, k, v: SDPA(q, k, v, is_causal=True), SHORT),
    "attention with a dead row": (lambda q, k, v: SDPA(q, k, v, DEAD_ROW), SHORT),
    "attention with a bias": (lambda q, k, v: SDPA(q, k, v, BIAS), SHORT),
    "attention, grouped": (lambda q, k, v: SDPA(q, k, v, enable_gqa=True), GROUPED),
    "attention by hand": (lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, -1) @ v, SHORT),
    "conv2d unbatched": (lambda x, w: F.conv2d(x, w, padding="same"), [(3, 6, 6), (4, 3, 3, 3)]),
    "avg_pool2d of cut windows": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), [(2, 3, 7, 8)]),
    **{
        f"cross_entropy {options}": (cross_entropy(*options), [(2, 4, 3)])
        for options in itertools.product(["mean", "sum", "none"], [0.0, 0.1], [None, WEIGHT])
    },
    "nll_loss without a batch": (lambda x: F.nll_loss(x, torch.tensor(2)), [(4,)]),
    "embedding padded from the end": (lambda w: F.embedding(INDEX, w, padding_idx=-1), [(5, 3)]),
    "softmax of a scalar": (lambda x: F.softmax(x, 0) * F.log_softmax(x, 0), [()]),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b, x, y, beta=0, alpha=2), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "cat of an empty tensor": (lambda x: torch.cat([x.new_empty(0), x, x * 2], -1), [(2, 3)]),
    "split": (lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.split(2, -1))], 0)[:3, :1], [(3, 4)]),
    "views": (lambda x: x.expand(2, -1, 4, -1).transpose(0, 3).flatten(1)[..., 1:-1:2].unsqueeze(-2), [(3, 1, 5)]),
    "negative steps": (lambda x: x[-3:-1].select(-1, -2), [(4, 5)]),
}


@pytest.mark.parametrize("start", range(0, len(ROWS), 5))
def test_values_and_gradients_equal_eager_torch(start: int) -> None:
    """Five rows are one program."""
    torch.manual_seed(0)
    rows = list(ROWS.values())[start : start + 5]

    def outputs(*inputs: torch.Tensor) -> list[torch.Tensor]:
        left = iter(inputs)
        return [fn(*itertools.islice(left, len(shapes))) for fn, shapes in rows]

    assert_equals_torch(outputs, [torch.randn(shape) for _, shapes in rows for shape in shapes], **CLOSE)


READ: dict[str, Callable[..., torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "bags": lambda x, i: F.embedding_bag(i[:, None], x, mode="sum"),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 2)),
    "x[i]": lambda x, i: x[i],
    "x[i, j]": lambda x, i: x[i, torch.tensor([[0], [1]])].T,
    "take": lambda x, i: torch.take(x, i[:, None] * 2 + torch.arange(2)),
}
FROM_THE_END = {"x[i]", "x[i, j]", "take"}


@pytest.mark.parametrize("name", READ)
def test_an_index_that_torch_refuses_reads_nan(name: str) -> None:
    x, places = torch.arange(6.0).view(3, 2), [-4, 3] if name in FROM_THE_END else [-4, -1, 3]
    for place in places:
        with pytest.raises((IndexError, RuntimeError)):
            READ[name](x, torch.tensor([place]))
    found = ts.jax_jit(READ[name])(x, torch.tensor([2, *places])).cpu()
    assert found[0].tolist() == [4.0, 5.0]
    assert found[1:].isnan().all()


def test_an_index_that_torch_refuses_is_not_written() -> None:
    x, index = torch.zeros(3, 2), torch.tensor([[-1, 1], [3, 2]])
    with pytest.raises(RuntimeError):
        x.scatter_add(0, index, torch.ones(2, 2))
    written = ts.jax_jit(lambda x, i: x.scatter_add(0, i, torch.ones(2, 2)))(x, index).cpu()
    assert written.tolist() == [[0, 0], [0, 1], [0, 1]]
