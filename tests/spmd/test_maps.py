"""jax_shard_map, jax_pmap and jax_vmap against the unmapped computation by eager torch; what composes; errors."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.derivatives import assert_equals_torch
from tests.oracles.steps import mean_square, step_of
from tests.spmd.mapping import CLOSE, MESH, assert_close, shard_map
from torch_shard.collectives import ppermute, psum

X = torch.arange(8.0)


def grad_of(fn: Any, *args: torch.Tensor) -> Any:
    leaves = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(fn(*leaves), leaves)


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x[i : i + 3] * w).sum() for i in range(3)])


ROWS, WINDOW = torch.arange(40.0).view(8, 5), torch.tensor([2.0, 3.0, 4.0])


def test_a_shard_map_sees_local_shapes_and_lays_out_results() -> None:
    shapes: list[Any] = []

    def affine(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(x.shape), tuple(w.shape), tuple(b.shape)))
        return x @ w + b

    x, w, b = torch.randn(192, 64), torch.randn(64, 128), torch.randn(128)
    fn = shard_map(affine, (P("i", None), P(None, "j"), P("j")), P("i", "j"))
    for _ in range(3):
        out = fn(x, w, b)
    assert shapes == [((48, 64), (64, 64), (64,))]  # one capture, one compilation
    assert out.sharding.is_equivalent_to(NamedSharding(ts.make_mesh(**MESH), P("i", "j")), 2)
    assert_close(out, x @ w + b)


def test_pytrees_and_specs_for_whole_parts() -> None:
    def fn(tree: dict, scale: Any) -> Any:
        return {"twice": [tree["a"] * scale], "sum": psum(tree["b"].sum(), "i")}

    tree, both = {"a": torch.arange(8.0), "b": torch.arange(4.0)}, P(("i", "j"))
    out = shard_map(fn, ({"a": both, "b": P("i")}, P()), {"twice": both, "sum": P()})(tree, 2.0)
    assert_close(out["twice"][0], tree["a"] * 2)
    assert_close(out["sum"], tree["b"].sum())
    whole = shard_map(lambda tree: (tree["a"] + 1, tree), P("i"), P("i"))
    assert_close(whole(tree)[0], tree["a"] + 1)


def test_closed_over_modules_are_read_at_each_call_and_switch_modes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    fn = shard_map(lambda x: model(x), P("i"), P("i"))
    x = torch.randn(8, 3)
    assert (fn(x) == 0).any()
    model.eval()
    assert_close(fn(x), model(x))
    with torch.no_grad():
        model[0].weight.add_(1)
    assert_close(fn(x), model(x))
    ts.place(model, ts.make_mesh(**MESH), ts.ShardingPlan({"0.weight": P("i")}, default=P()))
    found = fn(x)
    assert_close(found, ts.gather(model)(x))


COMPOSITIONS = {
    "jit of shard_map": lambda f: ts.jax_jit(shard_map(f, P("i"), P("i"))),
    "shard_map of jit": lambda f: shard_map(ts.jax_jit(f), P("i"), P("i")),
    "shard_map of checkpoint": lambda f: shard_map(ts.jax_checkpoint(f), P("i"), P("i")),
    "shard_map of vmap": lambda f: shard_map(ts.jax_vmap(f), P("i"), P("i")),
    "vmap of shard_map": lambda f: (
        lambda x: ts.jax_vmap(shard_map(f, P("i"), P("i")), in_axes=1, out_axes=1)(x[:, None])[:, 0]
    ),
    "shard_map of shard_map": lambda f: shard_map(shard_map(f, P("j"), P("j")), P("i"), P("i"), axis_names={"i"}),
    "pmap": lambda f: lambda x: ts.jax_pmap(f)(x.view(8, 1, 3)).view(8, 3),
    "pmap of vmap": lambda f: lambda x: ts.jax_pmap(ts.jax_vmap(f))(x.view(4, 2, 3)).view(8, 3),
    "vmap of pmap": lambda f: lambda x: ts.jax_vmap(ts.jax_pmap(f))(x.view(4, 2, 3)).view(8, 3),
}


def wavy(x: torch.Tensor) -> torch.Tensor:
    """Its derivatives differ where torch cuts them."""
    with torch.no_grad():
        weight = x.cos()
    return x.sin() * weight * x.detach()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_have_torchs_values_and_gradients(name: str) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    assert_equals_torch(COMPOSITIONS[name](wavy), [x], eager=wavy, **CLOSE)


@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap], ids=["vmap", "pmap"])
def test_convolution_by_rows(adapt: Any) -> None:
    wanted = torch.stack([convolve(row, WINDOW) for row in ROWS])
    assert_close(adapt(convolve)(ROWS, WINDOW.repeat(8, 1)), wanted)
    assert_close(adapt(convolve, in_axes=(0, None))(ROWS, WINDOW), wanted)
    assert_close(adapt(convolve, in_axes=(1, None), out_axes=1)(ROWS.T, WINDOW), wanted.T)


def test_what_pmap_gives_stays_on_its_devices() -> None:
    fn = ts.jax_pmap(convolve)
    once = fn(ROWS, WINDOW.repeat(8, 1))
    rows = ROWS.to("jax").shard_(once.sharding)
    fn(rows, once)
    with jax.transfer_guard("disallow"):
        twice = fn(rows, once)
    assert twice.sharding == once.sharding
    assert len(once.sharding.device_set) == 8
    assert_close(twice, torch.stack([convolve(row, convolve(row, WINDOW)) for row in ROWS]))


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = convolve(x, w)
    return out / psum(out, "p")


@pytest.mark.parametrize("adapt", [ts.jax_vmap, ts.jax_pmap], ids=["vmap", "pmap"])
def test_collectives_of_a_mapped_axis_and_their_gradients(adapt: Any) -> None:
    fn = adapt(normalised, in_axes=(0, None), axis_name="p")

    def whole(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.stack([convolve(row, w) for row in rows])
        return out / out.sum(0)

    assert_close(fn(ROWS, WINDOW), whole(ROWS, WINDOW))
    found = ts.jax_jit(ts.jax_grad(lambda *args: fn(*args).square().sum(), argnums=(0, 1)))(ROWS, WINDOW)
    for f, wanted in zip(found, grad_of(lambda *args: whole(*args).square().sum(), ROWS, WINDOW), strict=True):
        torch.testing.assert_close(f.cpu(), wanted, rtol=1e-4, atol=1e-7)  # small differences of quotients near 1


def test_nested_maps_have_axes_of_their_own() -> None:
    x = torch.arange(8.0).view(2, 4)

    def sums(x: torch.Tensor) -> Any:
        return psum(x, "rows"), psum(x, "columns"), psum(x, ("rows", "columns"))

    for outer, inner in [(ts.jax_vmap, ts.jax_pmap), (ts.jax_pmap, ts.jax_vmap), (ts.jax_vmap, ts.jax_vmap)]:
        found = outer(inner(sums, axis_name="columns"), axis_name="rows")(x)
        for f, wanted in zip(found, (x.sum(0).expand(2, 4), x.sum(1)[:, None].expand(2, 4), x.sum()), strict=True):
            assert_close(f, wanted.expand(2, 4))


SHARING = {
    "jax_vmap": (lambda f: ts.jax_vmap(f, in_axes=(None, 0)), 3),
    "jax_vmap, not mapped": (lambda f: ts.jax_vmap(f, in_axes=(None, 0), out_axes=(None, None, 0)), 1),
    "jax.vmap": (lambda f: ts.torch_view(jax.vmap(ts.jax_view(f), in_axes=(None, 0))), 3),
}


@pytest.mark.parametrize("name", SHARING)
def test_what_all_rows_share_is_counted_once_for_each_result(name: str) -> None:
    """An output that is not mapped beside one that is: JAX alone multiplies the gradient of the first."""
    adapt, num_results = SHARING[name]
    x, y = torch.tensor(2.0), torch.arange(3.0)
    mapped = adapt(lambda x, y: (x**2, None, x * y))
    found = ts.jax_jit(ts.jax_grad(lambda x: sum(o.sum() for o in mapped(x, y) if o is not None)))(x)
    assert_close(found, 2 * x * num_results + y.sum())


STALE = {
    "jit": ts.jax_jit,
    "vmap": lambda f: lambda x: ts.jax_vmap(f)(x).sum(),
    "pmap": lambda f: lambda x: ts.jax_pmap(f)(x).sum(),
    "shard_map": lambda f: shard_map(lambda x: psum(f(x), "i"), P("i"), P()),
}


@pytest.mark.parametrize("name", STALE)
def test_gradients_of_compiled_functions_read_closed_over_parameters_at_each_call(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(8, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    grad = ts.jax_jit(ts.jax_grad(STALE[name](loss)))
    for _ in range(2):
        assert_close(grad(x), grad_of(loss, x)[0])
        with torch.no_grad():
            model.weight.add_(1)


def test_a_recurrent_net_within_shard_map_has_torchs_gradients() -> None:
    """Its lowering has loops, whose types JAX checks there; `validation/operators/test_modules.py` has all modules."""
    torch.manual_seed(0)
    net, x = nn.LSTM(3, 4, batch_first=True), torch.randn(8, 5, 3)
    names = [name for name, _ in net.named_parameters()]

    def loss(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, params, strict=True)), (x,))[0].sin().sum()

    mapped = shard_map(lambda *given: psum(loss(*given), "i"), (P("i"), *(P() for _ in names)), P())
    given = [x, *(p.detach() for p in net.parameters())]
    assert_equals_torch(mapped, given, eager=loss, rtol=1e-4, atol=1e-5)  # float32, over 8 x 5 products


def test_a_conditional_within_shard_map_is_each_devices_own() -> None:
    fn = shard_map(lambda x: torch.cond(x.sum() > 8, lambda x: x.sin(), lambda x: torch.zeros(2), (x,)), P("i"), P("i"))
    x = torch.arange(8.0)
    wanted = torch.where(x.view(4, 2).sum(1, keepdim=True) > 8, x.view(4, 2).sin(), 0).flatten()
    assert_close(fn(x), wanted)


class Parallel(nn.Module):
    """A block whose forward splits its hidden width over `j`, written for one device."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.mapped = ts.jax_shard_map(
            lambda x, up, down: psum(F.gelu(x @ up.T) @ down.T, "j"),
            mesh=mesh,
            in_specs=(P("i"), P("j"), P(None, "j")),
            out_specs=P("i"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mapped(x, self.up.weight, self.down.weight)


class Plain(Parallel):
    """The same on one device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def test_a_training_step_takes_mapped_functions_within_forward() -> None:
    torch.manual_seed(0)
    mesh = ts.make_mesh(**MESH)
    model, plain = (nn.Sequential(kind(mesh), kind(mesh)) for kind in (Parallel, Plain))
    plain.load_state_dict(model.state_dict())
    plan = ts.ShardingPlan({"*.up.weight": P("j"), "*.down.weight": P(None, "j")}, default=P())
    step, x = step_of(model, mesh=mesh, plan=plan, batch_spec=P("i")), torch.randn(8, 4)
    state, metrics = step(step.init(), x)
    loss = mean_square(plain, x)
    loss.backward()
    assert_close(ts.torch_view(metrics["loss"]), loss)
    for name, p in plain.named_parameters():
        assert_close(torch.tensor(np.asarray(state.params[name])), p - 0.1 * p.grad, name)


def test_loops_of_jax_within_shard_map_carry_what_varies() -> None:
    def turn(_: Any, x: torch.Tensor) -> torch.Tensor:
        return ppermute(x, "i", [(k, (k + 1) % 4) for k in range(4)])

    fn = shard_map(lambda x: ts.torch_view(jax.lax.fori_loop)(0, 3, ts.jax_view(turn), x), P("i"), P("i"))
    assert_close(fn(torch.arange(4.0)), torch.arange(4.0).roll(3))


@pytest.mark.parametrize("closed_over", [0, 1, 2])
def test_pmap_splits_every_leaf(closed_over: int) -> None:
    """By how many arrays there are, JAX 0.10 may take the axes of arguments for those of leaves."""
    weights = [torch.ones(5) for _ in range(closed_over)]
    shapes = []

    def local(first: Any, x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        shapes.append(jax.tree.map(lambda t: tuple(t.shape), (first, x, whole)))
        return x + sum(w.sum() for w in weights)

    mapped = ts.jax_pmap(local, in_axes=(0, 1, None))
    for arg in ([torch.ones(8, 3)], {"b": torch.ones(8), "w": torch.ones(8, 3)}, (torch.ones(8),) * 3):
        found = mapped(arg, torch.zeros(2, 8), torch.zeros(8))
        assert found.tolist() == [[5.0 * closed_over] * 2] * 8
        assert shapes[-1] == (jax.tree.map(lambda t: tuple(t.shape[1:]), arg), (2,), (8,))


def test_autocast_around_a_mapped_function_holds_for_its_derivative() -> None:
    """JAX traces the derivative when the region is over."""
    dtypes = []

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dtypes.append((x @ w).dtype)
        return (x @ w).float() ** 2

    def loss(fn: Any, where: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where, torch.bfloat16):
            return fn(x, w).sum()

    x, w = torch.randn(8, 4), torch.randn(4, 3)
    mapped = shard_map(product, (P("i"), P()), P("i"))
    found = ts.jax_grad(lambda *args: loss(mapped, "cuda", *args), argnums=(0, 1))(x, w)
    assert set(dtypes) == {torch.bfloat16}
    for f, wanted in zip(found, grad_of(lambda *args: loss(product, "cpu", *args), x, w), strict=True):
        torch.testing.assert_close(f.cpu(), wanted, rtol=0.03, atol=0.1)  # bfloat16 has 8 bits, over 8 rows
