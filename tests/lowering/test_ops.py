"""Our own lowerings against eager torch: value and every gradient, over the arguments that change their meaning."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import torch_shard as ts

CLOSE = {"rtol": 2e-4, "atol": 1e-4}  # float32; sums of up to some hundred terms, gradients squared twice

Case = tuple[str, Callable[..., torch.Tensor], list[tuple[int, ...]]]


def convolutions() -> Iterator[Case]:
    for dims, stride, padding, dilation, groups in [
        (1, 1, 0, 1, 1),
        (1, 2, 1, 2, 2),
        (2, 1, 1, 1, 1),
        (2, (2, 1), (0, 2), (1, 2), 2),
        (3, 2, 1, 1, 1),
    ]:
        kind = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        shapes = [(2, 4, *(7,) * dims), (6, 4 // groups, *(3,) * dims), (6,)]
        yield f"conv{dims}d {options}", lambda x, w, b, kind=kind, o=options: kind(x, w, b, **o), shapes
        back = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        outer = {**options, "output_padding": 1 if stride == 2 else 0}
        shapes = [(2, 4, *(5,) * dims), (4, 6 // groups, *(3,) * dims), (6,)]
        yield f"conv_transpose{dims}d {outer}", lambda x, w, b, back=back, o=outer: back(x, w, b, **o), shapes
    yield "conv2d unbatched", lambda x, w: F.conv2d(x, w, padding="same"), [(3, 6, 6), (4, 3, 3, 3)]


def pools() -> Iterator[Case]:
    for kernel, stride, padding, ceil in [
        (2, None, 0, False),
        (3, 2, 1, False),
        (3, 2, 1, True),
        ((2, 3), (1, 2), 0, True),
    ]:
        options = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil}
        yield f"max_pool2d {options}", lambda x, o=options: F.max_pool2d(x, **o), [(2, 3, 7, 8)]
        for include in (True, False):
            more = {**options, "count_include_pad": include}
            yield f"avg_pool2d {more}", lambda x, o=more: F.avg_pool2d(x, **o), [(2, 3, 7, 8)]
    yield "max_pool2d dilated", lambda x: F.max_pool2d(x, 2, dilation=2), [(2, 3, 7, 8)]
    yield "max_pool1d", lambda x: F.max_pool1d(x, 3, 2), [(2, 3, 9)]
    yield "avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, padding=1), [(2, 3, 9)]
    yield "max_pool3d", lambda x: F.max_pool3d(x, 2), [(2, 3, 4, 4, 5)]
    yield "avg_pool3d", lambda x: F.avg_pool3d(x, 2, divisor_override=3), [(2, 3, 4, 4, 5)]
    for size in (1, 3, (2, 5)):
        yield f"adaptive_avg_pool2d {size}", lambda x, s=size: F.adaptive_avg_pool2d(x, s), [(2, 3, 7, 8)]


def norms() -> Iterator[Case]:
    for training, affine in itertools.product((True, False), repeat=2):

        def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t=training, a=affine) -> torch.Tensor:
            mean, var = torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)
            out = F.batch_norm(x, mean, var, w if a else None, b if a else None, training=t, momentum=0.3)
            return torch.cat([out.flatten(), mean, var])  # the statistics are part of the result

        yield f"batch_norm {training=} {affine=}", batch_norm, [(3, 4, 5, 2), (4,), (4,)]
    yield "batch_norm without statistics", lambda x: F.batch_norm(x, None, None, training=True), [(6, 4)]
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, (4, 5), w, b), [(3, 2, 4, 5), (4, 5), (4, 5)]
    yield "layer_norm plain", lambda x: F.layer_norm(x, (5,)), [(3, 5)]
    yield "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)]
    yield "instance_norm", lambda x: F.instance_norm(x), [(3, 4, 5)]
    yield "rms_norm", lambda x, w: F.rms_norm(x, (5,), w), [(3, 5), (5,)]


def attention() -> Iterator[Case]:
    shapes = [(2, 3, 4, 8)] * 3
    for options in [{}, {"is_causal": True}, {"scale": 0.3}]:
        yield f"attention {options}", lambda q, k, v, o=options: F.scaled_dot_product_attention(q, k, v, **o), shapes
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    yield "attention with a dead row", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), shapes
    bias = torch.linspace(-1, 1, 16).view(4, 4)
    yield "attention with a bias", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias), shapes
    grouped = [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
    yield "attention, grouped", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), grouped
    yield "attention by hand", lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, -1) @ v, shapes


def losses() -> Iterator[Case]:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1])
    for reduction, ignore, smoothing, w in itertools.product(
        ["mean", "sum", "none"], [-100, 1], [0.0, 0.1], [None, weight]
    ):
        options = {"reduction": reduction, "ignore_index": ignore, "label_smoothing": smoothing, "weight": w}
        name = f"cross_entropy {reduction} {ignore} {smoothing} {'weighted' if w is not None else ''}"
        target = torch.tensor([[0, 1, 2], [3, 3, 1]])
        yield name, lambda x, o=options, t=target: F.cross_entropy(x, t, **o), [(2, 4, 3)]
    yield "nll_loss without a batch", lambda x: F.nll_loss(x, torch.tensor(2)), [(4,)]
    yield "nll_loss of one dim", lambda x: F.nll_loss(x, torch.tensor([2, 0, 1])), [(3, 4)]


def others() -> Iterator[Case]:
    index = torch.tensor([[0, 2, 2], [1, 0, 3]])
    for options in [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}]:
        yield f"embedding {options}", lambda w, o=options: F.embedding(index, w, **o), [(5, 3)]
    for approximate in ("none", "tanh"):
        yield f"gelu {approximate}", lambda x, a=approximate: F.gelu(x, approximate=a), [(4, 5)]
    for function in (F.softmax, F.log_softmax):
        yield f"{function.__name__}", lambda x, f=function: f(x, 1), [(2, 3, 4)]
        yield f"{function.__name__} of a scalar", lambda x, f=function: f(x, 0), [()]
    yield "addmm", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(5,), (3, 4), (4, 5)]
    yield "baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, beta=0, alpha=2), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]
    yield "cat of an empty tensor", lambda x: torch.cat([x.new_empty(0), x, x * 2], -1), [(2, 3)]
    yield "split", lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.split(2, -1))], 0)[:3, :1], [(3, 4)]
    yield "views", lambda x: x.expand(2, -1, 4, -1).transpose(0, 3).flatten(1)[..., 1:-1:2].unsqueeze(-2), [(3, 1, 5)]
    yield "negative steps", lambda x: x[-3:-1].select(-1, -2), [(4, 5)]


ALL = [*convolutions(), *pools(), *norms(), *attention(), *losses(), *others()]


@pytest.mark.parametrize(("fn", "shapes"), [case[1:] for case in ALL], ids=[case[0] for case in ALL])
def test_value_and_gradients_equal_eager_torch(fn: Callable[..., torch.Tensor], shapes: list) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]

    def scalar(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = fn(*args)
        return (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).square().sum(), out

    leaves = [x.clone().requires_grad_() for x in inputs]
    value, out = scalar(*leaves)
    wanted = torch.autograd.grad(value, leaves, materialize_grads=True)
    positions = tuple(range(len(inputs)))
    (found_value, found), grads = ts.jax_jit(ts.jax_value_and_grad(scalar, argnums=positions, has_aux=True))(*inputs)
    torch.testing.assert_close(found.cpu(), out.detach(), **CLOSE)
    torch.testing.assert_close(found_value.cpu(), value.detach(), **CLOSE)
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), other, **CLOSE)
