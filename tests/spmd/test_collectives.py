"""Collectives against the unsharded computation by eager torch: values, gradients within and without, bad input."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch
from tests.oracles.errors import assert_refused
from tests.spmd.mapping import CLOSE, assert_close, shard_map
from torch_shard.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    fold_in_axis,  # noqa: F401  (in the table)
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)

X = P("i", "j")


@dataclasses.dataclass
class Case:
    """A function of one device's shards, and the same of whole tensors.

    `x` is (8, 8), split by both axes; `s`, a scalar, is the same on every device.
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
    "psum": Case(lambda x, s: psum(x, "i").sin(), lambda x, s, i, j: blocks(x, i, 0).sum(0).sin(), P(None, "j")),
    "psum of both": Case(
        lambda x, s: psum((x * s).sum(), ("i", "j")).cos(), lambda x, s, i, j: (x * s).sum().cos(), P()
    ),
    "pmean": Case(
        lambda x, s: x - pmean(x.mean(1, keepdim=True), "j") * s,
        lambda x, s, i, j: x - x.mean(1, keepdim=True) * s,
    ),
    "what is the same meets what is not": Case(
        lambda x, s: (t := psum(x.square().sum(), ("i", "j")).sqrt()) * t + psum((x * t).sum(), ("i", "j")) * s,
        lambda x, s, i, j: (t := x.square().sum().sqrt()) * t + (x * t).sum() * s,
        P(),
    ),
    "the same, summed": Case(
        lambda x, s: psum(s, "i") + psum(s * x.sum(), ("i", "j")),
        lambda x, s, i, j: s * i + s * x.sum(),
        P(),
    ),
    "pmax": Case(
        lambda x, s: x - pmax(x.amax(1, keepdim=True), "j") * s,
        lambda x, s, i, j: x - x.amax(1, keepdim=True) * s,
    ),
    "pmax of ties": Case(
        lambda x, s: pmax((x * 0 + s).amax(), ("i", "j")) * s,
        lambda x, s, i, j: (x * 0 + s).amax() * s,
        P(),
    ),
    "pmin": Case(lambda x, s: pmin(x.amin(), ("i", "j")) * x, lambda x, s, i, j: x.amin() * x),
    "all_gather": Case(
        lambda x, s: pmean(
            all_gather(x, "j", dim=-1).sin().sum(1, keepdim=True) * s * rank(all_gather(x.flatten(), ("i", "j"))), "j"
        ),
        lambda x, s, i, j: (
            x.sin().sum(1, keepdim=True) * s * rank(x.view(i, 8 // i, j, 8 // j).transpose(1, 2).flatten())
        ),
        P("i"),
    ),
    "all_gather to the same": Case(
        lambda x, s: (
            all_gather(all_gather(x, "i", to="invarying"), "j", dim=1, to="invarying").sin() * s + x.new_ones(8, 8)
        ),
        lambda x, s, i, j: x.sin() * s + 1,
        P(),
    ),
    "all_gather along a new dim": Case(
        lambda x, s: (
            all_gather(x, "i", dim=1, tiled=False, to="invarying").sin() * torch.arange(axis_size("i"))[:, None] * s
        ),
        lambda x, s, i, j: blocks(x, i, 0).transpose(0, 1).sin() * torch.arange(i)[:, None] * s,
        P(None, None, "j"),
    ),
    "psum_scatter": Case(
        lambda x, s: psum_scatter(all_gather(x, "j", dim=1) * s, "j", dim=1).exp(),
        lambda x, s, i, j: (x * s * j).exp(),
    ),
    "ppermute": Case(
        lambda x, s: x * ppermute(x, "i", [(k, (k + 1) % axis_size("i")) for k in range(axis_size("i"))]),
        lambda x, s, i, j: x * torch.cat(blocks(x, i, 0).roll(1, 0).unbind()),
    ),
    "ppermute to some": Case(
        lambda x, s: x * (s + ppermute(x, "i", [(0, 1)])),
        lambda x, s, i, j: x * (s + torch.cat([torch.zeros(8 // i, 8), x[: 8 // i], torch.zeros(8 - 16 // i, 8)])),
    ),
    "all_to_all": Case(
        lambda x, s: all_to_all(
            all_to_all(x, "i", split_dim=1, concat_dim=0).cumsum(0), "i", split_dim=0, concat_dim=-1
        ),
        lambda x, s, i, j: x.cumsum(0),
    ),
    "axis_index": Case(
        lambda x, s: x * (axis_index("i") + 10 * axis_index("j")) * s,
        lambda x, s, i, j: (
            x
            * (torch.arange(i).repeat_interleave(8 // i)[:, None] + 10 * torch.arange(j).repeat_interleave(8 // j))
            * s
        ),
    ),
}


@pytest.mark.parametrize(
    ("sizes", "check_vma", "first"),
    [
        *(((4, 2), True, first) for first in range(0, len(CASES), 4)),
        *(pytest.param((2, 4), False, first, marks=pytest.mark.slow) for first in (0, 8)),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_unsharded(sizes: tuple[int, int], check_vma: bool, first: int) -> None:
    """Several in one program, whose gradients are added."""
    cases = list(CASES.values())[first : first + 4]
    options = {"mesh": ts.make_mesh(i=sizes[0], j=sizes[1]), "in_specs": (X, P()), "check_vma": check_vma}
    mapped = [ts.jax_shard_map(case.local, out_specs=case.out, **options) for case in cases]

    def whole(*given: torch.Tensor) -> list[torch.Tensor]:
        return [case.whole(*given, *sizes) for case in cases]

    torch.manual_seed(0)
    given = [torch.randn(8, 8), torch.tensor(0.7)]
    assert_equals_torch(lambda *given: [fn(*given) for fn in mapped], given, eager=whole, **CLOSE)


JAX_INSIDE = {
    "a loss that is the same everywhere": (
        lambda w, x: pmean((w * x).square().sum(), "i"),
        lambda w, x: lax.pmean(jnp.square(w * x).sum(), "i"),
    ),
    "each device's own loss": (lambda w, x: (w * x).square().sum(), lambda w, x: jnp.square(w * x).sum()),
    "without any x": (lambda w, x: (w**3).sum(), lambda w, x: (w**3).sum()),
    "both": (
        lambda w, x: psum((w * x).sin().sum(), "i") * (w**2).sum() + (w * x).sum(),
        lambda w, x: lax.psum(jnp.sin(w * x).sum(), "i") * (w**2).sum() + (w * x).sum(),
    ),
}


def gradient(transform: Any, fn: Any, order: int) -> Any:
    first = transform(fn, (0, 1))
    return first if order == 1 else transform(lambda w, x: sum((g * g).sum() for g in first(w, x)), (0, 1))


@pytest.mark.parametrize(("check_vma", "order"), [(True, 1), (True, 2), (False, 1)])
def test_gradients_within_shard_map_are_those_of_jax(check_vma: bool, order: int) -> None:
    """Of each function, and of one that was adapted before."""
    x, w = torch.arange(1.0, 9.0) / 8, torch.tensor([0.5, 2.0])

    def mapped(shard_map: Any, fns: dict[Any, Any]) -> Any:
        def each(w: Any, x: Any) -> Any:
            found = {key: fn(w, x) for key, fn in fns.items()}
            return {key: (by_w[None] + 0 * x[:, None], by_x) for key, (by_w, by_x) in found.items()}

        options = {"mesh": ts.make_mesh(i=4), "in_specs": (P(), P("i")), "out_specs": P("i"), "check_vma": check_vma}
        return shard_map(each, **options)

    theirs = {name: gradient(jax.grad, fn, order) for name, (_, fn) in JAX_INSIDE.items()}
    wanted = ts.torch_view(jax.jit(mapped(jax.shard_map, theirs)))(w, x)
    for adapt in (lambda fn: fn, ts.jax_jit)[: 3 - order]:
        ours = {name: gradient(ts.jax_grad, adapt(fn), order) for name, (fn, _) in JAX_INSIDE.items()}
        for key, grads in mapped(ts.jax_shard_map, ours)(w, x).items():
            for f, j in zip(grads, wanted[key], strict=True):
                torch.testing.assert_close(f.cpu(), j.cpu(), **CLOSE, msg=lambda said, key=key: f"{key}: {said}")


@pytest.mark.parametrize("check_vma", [True, False])
def test_torchs_own_gradient_within_is_that_of_one_process_per_device(check_vma: bool) -> None:
    x, w = torch.arange(8.0), torch.tensor(2.0)

    def local(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        own, summed = (w * x).square().sum(), psum((w * x).square().sum(), "i")
        found = [torch.autograd.grad(y, w, retain_graph=True)[0] for y in (w**3, own, summed)]
        return [g.expand(1) for g in found]

    fn = ts.jax_shard_map(local, mesh=ts.make_mesh(i=8), in_specs=(P(), P("i")), out_specs=P("i"), check_vma=check_vma)
    alone, own, summed = fn(w, x)
    assert_close(alone, torch.full((8,), 12.0))  # no other device has a part in it
    assert_close(own, 2 * w * x * x)
    assert_close(summed, 8 * 2 * w * x * x)  # eight processes have this sum


def test_pytrees_integers_bools_and_numbers() -> None:
    names = ("long", "bool", "half")  # jax sorts the keys of a dict
    tree = {"long": torch.arange(4), "bool": torch.tensor([True, True, False, True]), "half": torch.ones(4).half()}

    def local(tree: Any) -> Any:
        summed = psum({"tree": tree, "one": 1}, "i")
        assert (summed.pop("one"), psum(1, ("i", "j")), axis_size("j"), pmean(3.0, "i")) == (4, 8, 2, 3.0)
        assert [summed["tree"][name].dtype for name in names] == [torch.int64, torch.int64, torch.float16]
        return summed["tree"], pmax(tree, "i"), pmin(tree, "i")

    found = shard_map(local, P("i"), P())(tree)
    values = [[each[name].item() for name in names] for each in found]
    assert values == [[6, 3, 4.0], [3, True, 1.0], [0, False, 1.0]]


def test_one_function_on_meshes_of_other_sizes_is_captured_for_each() -> None:
    """Its local shapes are the same; what it makes of the axis is not."""
    gather = ts.jax_jit(lambda x: all_gather(x, "i", to="invarying") * axis_size("i"))
    for size in (2, 4, 2):
        x = torch.arange(2.0 * size)
        mapped = ts.jax_shard_map(gather, mesh=ts.make_mesh(i=size), in_specs=P("i"), out_specs=P())
        assert_close(mapped(x), x * size)
    assert_close(ts.jax_vmap(gather, axis_name="i")(torch.arange(6.0).view(3, 2))[0], torch.arange(6.0) * 3)


BAD = {
    "psum(x, 'k')": r"NameError: psum: axis 'k' is not bound here \('i', 'j' of the mesh are\)",
    "all_gather(1.0, 'i')": "TypeError: all_gather: expected torch tensors",
    "all_gather(x, 'i', to='same')": "ValueError: .*unexpected `to` value",
    "all_gather(x, 'i', dim=2)": "ValueError: axis 2 is out of bounds",
    "all_gather(x, 'i', dim=2, tiled=False)": "IndexError: Dimension out of range",
    "psum_scatter(x, ('i', 'j'))": "ValueError: psum_scatter: dim 0 of local shape .* is not a multiple of .*'j': 2",
    "psum_scatter(x, 'i', dim=1)": "IndexError: Dimension out of range",
    "all_to_all(x.repeat(4), 'i', split_dim=0, concat_dim=1)": "IndexError: Dimension out of range",
    "ppermute(x, 'i', [(-1, 0)])": "ValueError: ppermute: sources and destinations must be unique, of 0 to 3",
    "ppermute(x, 'i', [(0, 1), (2, 1)])": "ValueError: ppermute: sources and destinations must be unique",
    "fold_in_axis(x, 'i')": r"TypeError: .*a key is the two words of a JAX key, \(2,\) uint32",
    "x if axis_index('i') == 0 else -x": "NotImplementedError: .*Python needs the value of a tensor",
}


def test_bad_calls_are_refused_with_a_reason() -> None:
    assert_refused(BAD, lambda text: shard_map(eval(f"lambda x: {text}"), P("i"), P("i"))(torch.arange(4.0)))


def test_outside_of_any_map_the_error_names_what_binds_an_axis() -> None:
    words = (
        r"pmean: axis 'i' is not bound here\. .*jax_shard_map\(f, mesh=...\).*jax_pmap\(f, axis_name='i'\), jax_vmap\("
    )
    for call in (lambda: pmean(torch.ones(2), "i"), lambda: ts.jax_jit(lambda x: pmean(x, "i"))(torch.ones(2))):
        with pytest.raises(NameError, match=words):
            call()


def test_pairs_along_axes_of_several_maps_are_refused() -> None:
    """Of which JAX takes one alone."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return ts.jax_vmap(lambda x: ppermute(x, ("i", "rows"), [(0, 1)]), axis_name="rows")(x)

    mapped = ts.jax_shard_map(rows, mesh=ts.make_mesh(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=False)
    nested = ts.jax_vmap(rows, axis_name="i")
    for fn, x in ((mapped, torch.ones(8)), (nested, torch.ones(4, 2))):
        with pytest.raises(NotImplementedError, match=r"ppermute: 'i' and 'rows' are not all axes of one mesh"):
            fn(x)


def test_jax_cannot_communicate_along_rows_of_what_it_tracks() -> None:
    rows = torch.arange(8.0).view(2, 4)
    summed = ts.jax_vmap(lambda x: psum(x, ("i", "rows")), axis_name="rows")
    with pytest.raises(NotImplementedError, match=r"'rows' is the axis_name of a jax_vmap.*check_vma=False"):
        shard_map(summed, P(None, "i"), P())(rows)
    assert_close(shard_map(summed, P(None, "i"), P(), check_vma=False)(rows), rows.sum().expand(2, 1))


def test_second_derivatives_of_the_largest_are_torchs() -> None:
    """JAX differentiates the rule of its first derivative, value and all."""
    x = torch.arange(1.0, 9.0) / 4
    mapped = shard_map(lambda x: pmax(x.sin() * x, "i"), P("i"), P())

    def second(value: Any, grad: Any, x: torch.Tensor) -> Any:
        return grad(lambda x: (grad(lambda x: (value(x) ** 3).sum())(x) ** 2).sum())(x)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).view(4, 2).amax(0)

    wanted = second(whole, torch.func.grad, x)
    in_torch = ts.jax_jit(lambda x: second(mapped, ts.jax_grad, x))(x)
    in_jax = ts.torch_view(jax.jit(lambda x: second(ts.jax_view(mapped), jax.grad, x)))(x)
    for found in (in_torch, in_jax):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)  # products of numbers up to 50
