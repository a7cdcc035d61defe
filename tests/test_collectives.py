"""Collectives against the unsharded computation by eager torch: values, gradients within and without, bad input."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from torch_shard.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)

MESHES = [(8, 1), (4, 2), (2, 4)]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32, sums in another order
X = P("i", "j")


@dataclasses.dataclass
class Case:
    """A function of one device's shards, and the same of whole tensors.

    `x` is (8, 8), split by both axes; `w`, (2, 4), and `s`, a scalar, are the same on every device.
    """

    local: Callable[..., torch.Tensor]
    whole: Callable[..., torch.Tensor]
    out: P = X


def blocks(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    return torch.stack(x.chunk(n, dim))


def rank(x: torch.Tensor) -> torch.Tensor:
    """A number that tells the order of the elements."""
    return (x * torch.arange(x.numel())).sum()


CASES = {
    "psum": Case(lambda x, w, s: psum(x, "i").sin(), lambda x, w, s, i, j: blocks(x, i, 0).sum(0).sin(), P(None, "j")),
    "psum of both": Case(
        lambda x, w, s: psum((x * s).sum(), ("i", "j")).cos(), lambda x, w, s, i, j: (x * s).sum().cos(), P()
    ),
    "pmean": Case(
        lambda x, w, s: x - pmean(x.mean(1, keepdim=True), "j") * s,
        lambda x, w, s, i, j: x - x.mean(1, keepdim=True) * s,
    ),
    "what is the same meets what is not": Case(
        lambda x, w, s: (t := psum(x.square().sum(), ("i", "j")).sqrt()) * t + psum((x * t).sum(), ("i", "j")) * s,
        lambda x, w, s, i, j: (t := x.square().sum().sqrt()) * t + (x * t).sum() * s,
        P(),
    ),
    "the same, summed": Case(
        lambda x, w, s: psum(w * s, "i") + psum(w.sum() * x.sum(), ("i", "j")),
        lambda x, w, s, i, j: w * s * i + w.sum() * x.sum(),
        P(),
    ),
    "pmax": Case(
        lambda x, w, s: x - pmax(x.amax(1, keepdim=True), "j") * s,
        lambda x, w, s, i, j: x - x.amax(1, keepdim=True) * s,
    ),
    "pmax of ties": Case(
        lambda x, w, s: pmax((x * 0 + s).amax(), ("i", "j")) * s,
        lambda x, w, s, i, j: (x * 0 + s).amax() * s,
        P(),
    ),
    "pmin": Case(lambda x, w, s: pmin(x.amin(), ("i", "j")) * x, lambda x, w, s, i, j: x.amin() * x),
    "all_gather": Case(
        lambda x, w, s: pmean(
            all_gather(x, "j", dim=-1).sin().sum(1, keepdim=True) * s * rank(all_gather(x.flatten(), ("i", "j"))), "j"
        ),
        lambda x, w, s, i, j: (
            x.sin().sum(1, keepdim=True) * s * rank(x.view(i, 8 // i, j, 8 // j).transpose(1, 2).flatten())
        ),
        P("i"),
    ),
    "all_gather to the same": Case(
        lambda x, w, s: (
            all_gather(all_gather(x, "i", to="invarying"), "j", dim=1, to="invarying").sin() * s + x.new_ones(8, 8)
        ),
        lambda x, w, s, i, j: x.sin() * s + 1,
        P(),
    ),
    "psum_scatter": Case(
        lambda x, w, s: psum_scatter(all_gather(x, "j", dim=1) * s, "j", dim=1).exp(),
        lambda x, w, s, i, j: (x * s * j).exp(),
    ),
    "ppermute": Case(
        lambda x, w, s: x * ppermute(x, "i", [(k, (k + 1) % axis_size("i")) for k in range(axis_size("i"))]),
        lambda x, w, s, i, j: x * torch.cat(blocks(x, i, 0).roll(1, 0).unbind()),
    ),
    "ppermute to some": Case(
        lambda x, w, s: x * (s + ppermute(x, "i", [(0, 1)])),
        lambda x, w, s, i, j: x * (s + torch.cat([torch.zeros(8 // i, 8), x[: 8 // i], torch.zeros(8 - 16 // i, 8)])),
    ),
    "all_to_all": Case(
        lambda x, w, s: all_to_all(
            all_to_all(x, "i", split_dim=1, concat_dim=0).cumsum(0), "i", split_dim=0, concat_dim=-1
        ),
        lambda x, w, s, i, j: x.cumsum(0),
    ),
    "axis_index": Case(
        lambda x, w, s: x * (axis_index("i") + 10 * axis_index("j")) * w.sum(),
        lambda x, w, s, i, j: (
            x
            * (torch.arange(i).repeat_interleave(8 // i)[:, None] + 10 * torch.arange(j).repeat_interleave(8 // j))
            * w.sum()
        ),
    ),
}


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator), torch.randn(2, 4, generator=generator), torch.tensor(0.7)


def by_torch(case: Case, sizes: tuple[int, int]) -> Any:
    """Value, and gradients of a loss that weighs every element differently."""
    leaves = [t.clone().requires_grad_() for t in inputs()]
    out = case.whole(*leaves, *sizes)
    grads = torch.autograd.grad(weigh(out), leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), grads


def weigh(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(1, 2, out.numel()).view(out.shape)).sum()


def assert_close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, **CLOSE)


@functools.cache
def by_mesh(sizes: tuple[int, int], check_vma: bool) -> dict[str, Any]:
    """Value and gradients of each case, from one compiled program."""
    options = {"mesh": ts.make_mesh(i=sizes[0], j=sizes[1]), "in_specs": (X, P(), P()), "check_vma": check_vma}
    fns = {name: ts.jax_shard_map(case.local, out_specs=case.out, **options) for name, case in CASES.items()}

    def evaluate(*args: torch.Tensor) -> dict[str, Any]:
        def of(fn: Any) -> Any:
            return fn(*args), ts.jax_grad(lambda *args: weigh(fn(*args)), argnums=(0, 1, 2))(*args)

        return {name: of(fn) for name, fn in fns.items()}

    return ts.jax_jit(evaluate)(*inputs())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("sizes", "check_vma"), [*((sizes, True) for sizes in MESHES), ((4, 2), False)], ids=str)
def test_values_and_gradients_are_those_of_the_unsharded(sizes: tuple[int, int], check_vma: bool, name: str) -> None:
    found, found_grads = by_mesh(sizes, check_vma)[name]
    value, grads = by_torch(CASES[name], sizes)
    assert_close(found, value)
    for grad, wanted in zip(found_grads, grads, strict=True):
        assert_close(grad, wanted)


JAX_INSIDE = {
    "a loss that is the same everywhere": (
        lambda w, x: pmean((w * x).square().sum(), "i"),
        lambda w, x: lax.pmean(jnp.square(w * x).sum(), "i"),
    ),
    "each device's own loss": (lambda w, x: (w * x).square().sum(), lambda w, x: jnp.square(w * x).sum()),
    "a loss of what is the same": (lambda w, x: (w**3).sum() + 0 * x.sum(), lambda w, x: (w**3).sum() + 0 * x.sum()),
    "without any x": (lambda w, x: (w**3).sum(), lambda w, x: (w**3).sum()),
    "both": (
        lambda w, x: psum((w * x).sin().sum(), "i") * (w**2).sum() + (w * x).sum(),
        lambda w, x: lax.psum(jnp.sin(w * x).sum(), "i") * (w**2).sum() + (w * x).sum(),
    ),
}


@pytest.mark.parametrize(("order", "check_vma"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("name", JAX_INSIDE)
def test_gradients_within_shard_map_are_those_of_jax(name: str, order: int, check_vma: bool) -> None:
    in_torch, in_jax = JAX_INSIDE[name]
    mesh, x, w = ts.make_mesh(i=4), torch.arange(1.0, 9.0) / 8, torch.tensor([0.5, 2.0])

    def grad(transform: Any, fn: Any) -> Any:
        if order == 1:
            return transform(fn, (0, 1))
        return transform(lambda w, x: sum((g * g).sum() for g in transform(fn, (0, 1))(w, x)), (0, 1))

    def mapped(shard_map: Any, fn: Any) -> Any:
        def each(w: Any, x: Any) -> Any:
            by_w, by_x = fn(w, x)
            return by_w[None] + 0 * x[:, None], by_x

        return shard_map(each, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=check_vma)

    found = mapped(ts.jax_shard_map, grad(ts.jax_grad, in_torch))(w, x)
    wanted = mapped(jax.shard_map, grad(jax.grad, in_jax))(w.numpy(), x.numpy())
    for f, j in zip(found, wanted, strict=True):
        assert_close(f, ts.torch_view(j).cpu())
    if order == 1 and check_vma:
        adapted_before = mapped(ts.jax_shard_map, grad(ts.jax_grad, ts.jax_jit(in_torch)))(w, x)
        for f, j in zip(adapted_before, wanted, strict=True):
            assert_close(f, ts.torch_view(j).cpu())


def test_torchs_own_gradient_within_is_a_share_that_psum_adds_up() -> None:
    x, w = torch.arange(8.0), torch.tensor(2.0)

    def local(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        return psum(torch.autograd.grad((w * x).square().sum(), w)[0], "i")

    fn = ts.jax_shard_map(local, mesh=ts.make_mesh(i=8), in_specs=(P(), P("i")), out_specs=P())
    assert_close(fn(w, x), 2 * w * (x * x).sum())
