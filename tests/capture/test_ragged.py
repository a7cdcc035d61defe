"""Selections by a mask, against eager torch: values and gradients, also where the mask selects nothing."""

import functools
from collections.abc import Callable

import jax
import pytest
import torch
import torch.nn.functional as F

import torch_shard as ts

torch.manual_seed(0)
X = torch.randn(6, 4)
INPUTS = (X, -X.abs(), X.abs())  # with a mask of some, of none, of all
LINEAR = torch.randn(3, 4)
LABELS = torch.tensor([2, -100, 0, 1, -100, 3])


def pairs(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.where(x[:, :1] > x[:, 0])
    return F.relu(1 - (x[a] - x[b]).norm(dim=-1)).sum()


def written(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(6, 4)
    out[x > 0] = x[x > 0].exp()
    return out.square().sum()


MASK = torch.tensor([True, False, True, True, False, False])


def closed_over(x: torch.Tensor) -> torch.Tensor:
    return (x[MASK].exp() * x[MASK]).sum()


def rows_written(x: torch.Tensor) -> torch.Tensor:
    places = torch.nonzero(x[:, 0] > 0)[:, 0]
    out = torch.zeros(6, 4)
    out[places] = 2 * x[places]
    return (out * x).sum()


def contrast(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x[:, 0] > 0]
    return torch.logsumexp(chosen @ x.T, 1).sum()


def linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x[x[:, 0] > 0], LINEAR * x.mean()).tanh().sum()


def edges(x: torch.Tensor) -> torch.Tensor:
    """A message along each edge that is no loop, and along all loops, to the largest of each node."""
    index = torch.tensor([[0, 1, 2, 3, 3, 5], [1, 1, 0, 2, 3, 4]])
    chosen = (x[:, 0] > 0) | (index[0] != index[1])
    index = torch.cat([index[:, chosen], torch.arange(6).repeat(2, 1)], 1)
    messages = x[index[0]].sin()
    to = index[1][:, None].expand_as(messages)
    largest = torch.zeros(6, 4).scatter_reduce(0, to, messages.detach(), "amax", include_self=False)
    return torch.zeros(6, 4).scatter_add(0, to, messages - largest[index[1]]).square().sum()


def inverted_after(x: torch.Tensor) -> torch.Tensor:
    """The first of two masks alike is another one when the second is used."""
    first, second = x > 0, x > 0
    total = x.detach()[first].sum()  # for the backward of which eager torch would need the mask as it was
    first.logical_not_()
    return total + 10 * x[second].sum()


def inverted_below(x: torch.Tensor) -> torch.Tensor:
    """So is the second, by a write to what it is a view of."""
    first, second = (x > 0)[:], (whole := x > 0)[:]
    total = x[first].sum()
    whole.logical_not_()
    return total + 10 * x[second].sum()


def inverted_between(x: torch.Tensor) -> torch.Tensor:
    """So is what both are made of, but for the name; and the one that is made first is used last."""
    y = x.clone()
    view = y[:]
    second = view > 0
    y.neg_()
    first = view > 0
    return x[first].sum() + 10 * x[second].sum()


def inverted_constant(x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(6) > 3
    total = x.detach()[mask].sum()
    mask.logical_not_()
    return total + 10 * x[mask].sum()


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x[x > 0].mean(),
    "rows": lambda x: x[x[:, 1] > 0].square().mean(),
    "masked_select": lambda x: torch.masked_select(x, x > 0).log().mean(),
    "masked_select, broadcast": lambda x: torch.masked_select(x, x[:, :1] > 0).sin().mean(),
    "by shape": lambda x: x[x > 0].sin().sum() / x[x > 0].shape[0],
    "by numel": lambda x: x[x[:, 0] > 0].sin().sum() / (2 * x[x[:, 0] > 0].numel()),
    "counted": lambda x: x.square().sum() * torch.nonzero(x > 0).shape[0],
    "two masks": lambda x: F.mse_loss(x[x > 0], x.cos()[x > 0]),
    "huber_loss": lambda x: F.huber_loss(x[x > 0], x.cos()[x > 0]),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x[x > 0], x.sigmoid()[x > 0]),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1)[x[:, 0] > 0], x.softmax(1)[x[:, 0] > 0], reduction="batchmean"),
    "cross_entropy": lambda x: F.cross_entropy(x[LABELS != -100], LABELS[LABELS != -100]),
    "cross_entropy, ignored": lambda x: F.cross_entropy(x[x[:, 0] > 0], LABELS[x[:, 0] > 0]),
    "middle dim": lambda x: x.view(2, 3, 4)[:, x[:3, 0] > 0].square().mean((1, 2)).sum(),
    "reshaped": lambda x: x[x[:, 0] > 0].reshape(-1).exp().mean(),
    "halves": lambda x: x[x[:, 0] > 0].view(-1, 2, 2).norm(dim=-1).mean(),
    "softmax": lambda x: x[x[:, 0] > 0].softmax(-1).square().sum(),
    "layer_norm": lambda x: F.layer_norm(x[x[:, 0] > 0], (4,), x[0], x[1]).square().sum(),
    "embedding": lambda x: F.embedding(LABELS[LABELS >= 0], x[:4]).square().mean(),
    "selected again": lambda x: (lambda y: y[y > 0.5].mean())(x[x > 0]),
    "mean of rows": lambda x: x[x[:, 0] > 0].mean(0).square().sum(),
    "normalize": lambda x: F.normalize(x[x[:, 0] > 0]).sum(0).square().sum(),
    "pairs": pairs,
    "written": written,
    "closed over": closed_over,
    "rows written": rows_written,
    "contrast": contrast,
    "linear": linear,
    "joined": lambda x: torch.cat([x[x[:, 0] > 0], x[:2]]).sin().mean(),
    "two joined": lambda x: torch.cat([x[x > 0], x[x < -0.5]]).sin().sum(),
    "scattered": lambda x: torch.zeros(6, 4).index_add(0, torch.nonzero(x[:, 1] > 0)[:, 0], x[x[:, 1] > 0]).exp().sum(),
    "edges": edges,
    "inverted after": inverted_after,
    "inverted below": inverted_below,
    "inverted between": inverted_between,
    "inverted constant": inverted_constant,
}


AT_ONCE = 12  # a program of all would take as long as they take together, and be one test


@functools.cache
def compiled(part: int) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Value and gradient of each case of a part for each input, from one program."""
    names = list(CASES)[AT_ONCE * part : AT_ONCE * (part + 1)]
    fns = {name: ts.jax_view(ts.jax_value_and_grad(CASES[name])) for name in names}
    run = ts.torch_view(jax.jit(lambda x: {name: fn(x) for name, fn in fns.items()}))
    return [run(x) for x in INPUTS]


@pytest.mark.parametrize("name", CASES)
def test_a_selection_that_is_reduced_equals_eager_torch(name: str) -> None:
    for x, results in zip(INPUTS, compiled(list(CASES).index(name) // AT_ONCE), strict=True):
        leaf = x.clone().requires_grad_()
        wanted = CASES[name](leaf)
        (wanted_grad,) = torch.autograd.grad(wanted, leaf)
        found, grad = results[name]
        torch.testing.assert_close(found.cpu(), wanted.detach(), equal_nan=True)
        torch.testing.assert_close(grad.cpu(), wanted_grad, equal_nan=True)


REFUSED = {
    "more than is selected by another mask": (lambda x: (x[x > 0] + x[x < 0]).sum(), "only for some values"),
    "added to as many as there may be": (
        lambda x: (x[:, 0][x[:, 0] > 0] + x[:, 0]).sum(),
        "a size 6|only for some values",
    ),
    "a result": (lambda x: x[x > 0], "a result of the function"),
    "the largest": (lambda x: x[x > 0].max(), "along the selected elements"),
    "one of them": (lambda x: x[x > 0][0], "along the selected elements"),
    "added up on the way": (lambda x: x[x > 0].cumsum(0).sum(), "along the selected elements"),
    "cut": (lambda x: x[x > 0].view(2, -1).sum(), "a"),
    "dropped": (lambda x: F.dropout(x[x > 0]).sum(), "dropout|rand|bernoulli"),
    "asked for their number": (lambda x: x.sum() if x[x > 0].shape[0] > 3 else -x.sum(), "x"),
    "joined twice": (
        lambda x: (torch.cat([x[x > 0]] * 2) * x[x > 0][:, None].expand(-1, 2).reshape(-1)).sum(),
        "twice",
    ),
    "lengths that may differ": (
        lambda x: x.sum() if len(x[x > 0]) == len(x[x < 0]) else -x.sum(),
        "the shape of a result depends",
    ),
    "a length beside a comparison": (lambda x: x.sum() * (len(x[x > 0]) == 3), "the shape of a result depends"),
    "a mask beside an index": (lambda x: x[x[:, 0] > 0, torch.tensor([0, 1, 2])].sum(), "a mask"),
    "a standard deviation": (lambda x: x[x > 0].std(), "std|var"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_is_refused_with_the_line(name: str) -> None:
    fn, meets = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"(?s)test_ragged.py\", line \d+, in <lambda>: .*x\[.*{meets}"):
        ts.jax_jit(fn)(X)


def compares(x: torch.Tensor) -> torch.Tensor:
    chosen, labels = x[x[:, 0] > 0], LABELS[x[:, 0] > 0]
    if len(chosen) != len(labels):
        chosen = 2 * chosen
    both = [chosen, labels]
    return 3 * chosen.sum() if len(both[0]) == len(labels) == len(both[1]) else chosen.sum()


def test_lengths_that_are_one_unknown_number_are_equal() -> None:
    compiled = ts.jax_jit(compares)
    for x in INPUTS:
        torch.testing.assert_close(compiled(x).cpu(), compares(x))
