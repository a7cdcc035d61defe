"""PyTorch's operators on the jax device: results, writes and gradients like torch's own."""

import copy

import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.device.test_tensor import assert_same
from tests.tables.odd import odd


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, dtype=torch.int32, device=d),
        lambda d: torch.full((2, 2), 7.0, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(1.0, 2.0, 0.25, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.tensor([[1.0, 2.0]], device=d),
        lambda d: torch.tensor(3, device=d),
        lambda d: torch.as_tensor(np.float32([1, 2]), device=d),
        lambda d: torch.zeros_like(torch.ones(2, device=d)),
        lambda d: torch.tril(torch.ones(3, 3, device=d)),
    ],
)
def test_factories_equal_those_of_the_cpu(make) -> None:
    assert_same(make("jax"), make("cpu"))


def test_random_numbers_on_the_jax_device_leave_the_cpu_generator_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(5, device="jax")
    assert torch.equal(torch.rand(3), wanted)


WRITES = {
    "setitem": lambda x: x.__setitem__((slice(None), 1), 5.0),
    "setitem of mask": lambda x: x.__setitem__(x > 8, -1.0),
    "data": lambda x: x.data.mul_(3),
    "augmented": lambda x: x.__iadd__(x.t().clone()),
    "out": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_land_where_torch_lands_them(name: str) -> None:
    wanted = torch.arange(16.0).view(4, 4)
    found = wanted.to("jax")
    alias = found[:]
    WRITES[name](wanted)
    WRITES[name](found)
    assert_same(found, wanted)
    assert_same(alias, wanted)


def test_eager_gradients_are_torchs_own() -> None:
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    found = copy.deepcopy(wanted).to("jax")
    x = torch.randn(3, 4)
    wanted(x).square().sum().backward()
    found(x.to("jax")).square().sum().backward()
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert a.grad.device.type == "jax", name
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-5)  # float32, other order of sums


DETERMINANTS = {
    "det": torch.linalg.det,
    "of a transpose": lambda x: torch.linalg.det(x.mT),
    "slogdet": lambda x: torch.linalg.slogdet(x @ x.mT + x)[1],
}


@pytest.mark.parametrize("name", DETERMINANTS)
def test_gradients_of_determinants(name: str) -> None:
    torch.manual_seed(0)
    wanted = torch.randn(3, 3, requires_grad=True)
    found = wanted.detach().to("jax").requires_grad_()
    compiled = ts.jax_jit(torch.func.grad(DETERMINANTS[name]))(wanted.detach())
    for x in (wanted, found):
        DETERMINANTS[name](x).backward()
    torch.testing.assert_close(found.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled.cpu(), wanted.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_torch_optimizer_runs_on_the_jax_device(foreach: bool) -> None:
    torch.manual_seed(0)
    wanted = nn.Linear(3, 2)
    found = copy.deepcopy(wanted).to("jax")
    x = torch.randn(5, 3)
    for model, device in ((wanted, "cpu"), (found, "jax")):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(found.weight.cpu(), wanted.weight, rtol=1e-4, atol=1e-5)  # Adam divides small numbers


def test_cpu_and_jax_tensors_do_not_mix_unless_scalar() -> None:
    x = torch.ones(3, device="jax")
    assert_same(x * torch.tensor(2.0), torch.full((3,), 2.0))
    with pytest.raises(
        RuntimeError, match=r"CPU tensor of shape \(3,\) meets a tensor on the jax device.*\.to\('jax'\)"
    ):
        x + torch.ones(3)


def test_a_generator_of_torchs_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(NotImplementedError, match=r"given a torch\.Generator.*Leave generator= out"):
        torch.randn(2, device="jax", generator=generator)
    with pytest.raises(NotImplementedError, match=r"given a torch\.Generator"):
        ts.jax_jit(lambda x: torch.bernoulli(x, generator=generator))(torch.ones(2))


def test_operators_without_a_lowering_run_on_the_cpu_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Also in a backward pass, where PyTorch cannot survive an error on a device written in Python."""
    x = torch.randn(1, 2, 3, 3)
    found, wanted = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    for leaf in (found, wanted):
        (odd(leaf) ** 2).sum().backward()
    assert_same(found.grad, wanted.grad)
    assert "tests.odd_backward.default has no lowering to JAX: it runs on the CPU" in caplog.text


def test_unfolding_has_a_backward_pass() -> None:
    x = torch.randn(1, 2, 5, 5)
    found, wanted = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    for leaf in (found, wanted):
        (nn.functional.unfold(leaf, 3, padding=1) ** 2).sum().backward()
    assert_same(found.grad, wanted.grad)


def test_rrelu() -> None:
    x = torch.linspace(-2, 2, 8)
    found = x.to("jax").requires_grad_()
    out = nn.functional.rrelu(found, training=False)
    assert_same(out.detach(), nn.functional.rrelu(x))
    (slope,) = torch.autograd.grad(nn.functional.rrelu(found, training=True).sum(), found)
    slope = slope.cpu()
    assert (slope[x > 0] == 1).all()
    assert ((slope[x < 0] > 1 / 8) & (slope[x < 0] < 1 / 3)).all()
    assert len(slope.unique()) == 5
    out = found * 1
    assert nn.functional.rrelu_(out, training=True) is out
    assert_same(out.detach()[4:], x[4:])


MADE = {"real": lambda z: z.real, "imag": lambda z: z.imag[1:], "conjugate": lambda z: z.conj()[:2]}


@pytest.mark.parametrize("name", MADE)
def test_views_with_numbers_of_their_own_are_read_and_not_written_to(name: str) -> None:
    z = torch.complex(torch.arange(3.0), torch.arange(3.0, 6.0))
    found = MADE[name](z.to("jax"))
    assert_same(found, MADE[name](z).resolve_conj())
    with pytest.raises(NotImplementedError, match=r"numbers of its own.*Write to the base"):
        found.mul_(2)


def test_a_tensor_does_not_change_its_shape_in_place() -> None:
    x = torch.ones(1, 3, device="jax")
    for change in (torch.Tensor.squeeze_, torch.Tensor.t_):
        with pytest.raises(NotImplementedError, match=r"another shape in place\. Use a new tensor.*x = x\."):
            change(x)
    assert x.detach_() is x


def test_a_write_to_a_part_leaves_the_whole_on_its_shards() -> None:
    plan = ts.ShardingPlan({"w": P(None, "model")}, default=P())
    x = ts.place({"w": torch.ones(8, 8)}, ts.make_mesh(batch=4, model=2), plan)["w"]
    x[0] = 3.0
    x.t().mul_(2)
    assert x.sharding.spec == P(None, "model")
    assert x.sum().item() == 8 * 6 + 56 * 2


USES = {
    "sum": lambda w: w.sum(),
    "mean of a column": lambda w: w[:, 0].mean(),
    "product": lambda w: (w * torch.arange(6.0).view(2, 3).to(w.device)).sum(),
    "transposed": lambda w: (w.t() @ torch.ones(2, 1).to(w.device)).sum(),
    "with itself": lambda w: (w + w[0] + w).sum(),
}


def test_gradients_of_several_backward_passes_are_added() -> None:
    """PyTorch adds to `.grad` in place, and takes the first gradient as it is, which must not be a view."""
    for use in USES.values():
        found, wanted = torch.ones(2, 3, device="jax").requires_grad_(), torch.ones(2, 3).requires_grad_()
        for leaf in (found, wanted):
            for each in (use, *USES.values()):
                each(leaf).backward()
        assert_same(found.grad, wanted.grad)


def test_gradients_of_two_leaves_are_two_tensors() -> None:
    x, y = (torch.ones(3, device="jax").requires_grad_() for _ in range(2))
    (x + y).sum().backward()
    x.grad.add_(torch.arange(3.0).to("jax"))
    assert (x.grad.tolist(), y.grad.tolist()) == ([1, 2, 3], [1, 1, 1])


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.view(6)], ids=["transposed", "flat"])
def test_gradients_through_views_of_two_leaves_are_two_tensors(view) -> None:
    x, y = (torch.ones(2, 3, device="jax").requires_grad_() for _ in range(2))
    factor = view(torch.arange(6.0).view(2, 3)).to("jax")
    for _ in range(2):
        ((view(x) + view(y)) * factor).sum().backward()
    for grad in (x.grad, y.grad):
        assert_same(grad, 2 * torch.arange(6.0).view(2, 3))


INFERRED = {
    "moved": lambda x: x.cpu() + 1,
    "a copy": lambda x: (x.t().contiguous().zero_(), x)[1],
    "a view": lambda x: (x.reshape(-1).mul_(2), x.T[0].zero_(), x)[2],
    "normalised": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("name", INFERRED)
def test_in_inference_mode(name: str) -> None:
    x = torch.arange(12.0).view(3, 4)
    with torch.inference_mode():
        found, wanted = (INFERRED[name](x.to(device, copy=True)) for device in ("jax", "cpu"))
        torch.testing.assert_close(found.cpu(), wanted)


def test_an_expanded_tensor_is_not_written_to() -> None:
    x = torch.zeros(3, 1, device="jax")
    with pytest.raises(RuntimeError, match=r"Several elements of this view.*Write to a clone\(\)"):
        x.expand(3, 4).add_(1)
