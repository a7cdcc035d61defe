"""A function by name on stacked arrays: equal to the plain call, and as small as its pattern allows."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shard._optim.by_name import run_by_name
from torch_shard._optim.vectorize import RowProgram, RowSlot, RowValue
from torch_shard._sharding.stacked import Layout, Stacks, as_dicts

DEPTH = 4
SHAPES = {"up": (8, 4), "down": (4, 8), "bias": (8,), "scale": ()}
NAMES = ["first", *(f"h.{i}.{key}" for i in range(DEPTH) for key in SHAPES), "last"]
LAYOUT = Layout.of([tuple(f"h.{i}.{key}" for i in range(DEPTH)) for key in SHAPES], NAMES)
CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # sums over all names in another order; fused otherwise


def values(seed: int = 0) -> dict[str, jax.Array]:
    shapes = {name: SHAPES.get(name.split(".")[-1], (3, 8)) for name in NAMES}
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def few() -> dict[str, jax.Array]:
    return {name: value for name, value in values().items() if name.endswith(("bias", "last"))}


def stacked(tree: dict[str, Any]) -> Stacks:
    return Stacks.from_dict(tree, LAYOUT if len(tree) == len(NAMES) else LAYOUT.restricted(list(tree)))


def assert_equal(found: Any, wanted: Any, **close: float) -> None:
    found = as_dicts(found)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(b, a, err_msg=jax.tree_util.keystr(path), **(close or {"rtol": 0}))


def batched(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(lambda *given: run_by_name(fn, *given, layout=args[0].layout))(*args)


def counts(fn: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How many equations of each kind the run on stacks has."""
    jaxpr = jax.make_jaxpr(lambda *a: run_by_name(fn, *a, layout=LAYOUT))(*args)
    return collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)


def decayed(params: Any) -> Any:
    return {name: name.endswith(("up", "down")) for name in params}


def early(params: Any) -> Any:
    """Labels that differ within a stack."""
    return {name: "early" if name.startswith(("h.0", "h.1", "first")) else "late" for name in params}


OPTIMIZERS = {  # each has parts that none of the others has
    "adamw": optax.adamw(1e-2, mask=decayed),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
    "labels": optax.multi_transform({"early": optax.adam(1e-2), "late": optax.sgd(0.1)}, early),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 5)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "jitted": optax.GradientTransformation(optax.adam(1e-2).init, jax.jit(optax.adam(1e-2).update)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_names_and_shapes(name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    plain, stacks = jax.jit(update), jax.jit(lambda *args: run_by_name(update, *args, layout=LAYOUT))
    params = values()
    state, held = optimizer.init(params), stacked(params)
    stored = batched(optimizer.init, held)
    assert_equal(stored, state)
    for seed in (1, 2, 3):
        params, state = plain(values(seed), state, params)
        held, stored = stacks(stacked(values(seed)), stored, held)
    assert held.layout == LAYOUT
    # Muon's five products of matrices, in float32, are taken by another routine where they are batched.
    assert_equal((held, stored), (params, state), **({"rtol": 1e-4, "atol": 1e-5} if name == "muon" else CLOSE))


def test_what_is_alike_runs_once() -> None:
    found = counts(lambda p: {n: jnp.sin(v) * 2 for n, v in p.items()}, stacked(values()))
    assert found == {"sin": len(LAYOUT.groups), "mul": len(LAYOUT.groups)}


def test_the_order_of_the_equations_does_not_matter() -> None:
    def fn(p: Any) -> Any:
        sines = {n: jnp.sin(p[n]) for n in reversed(NAMES)}
        return {n: sines[n] * p[n] if i % 2 else jnp.multiply(jnp.sin(p[n]), p[n]) for i, n in enumerate(NAMES)}

    assert counts(fn, stacked(values())) == {"sin": len(LAYOUT.groups), "mul": len(LAYOUT.groups)}
    assert_equal(batched(fn, stacked(values())), jax.jit(fn)(values()), **CLOSE)


def test_a_sum_over_all_names_is_one_reduction_for_each_stack() -> None:
    def norm(p: Any) -> Any:
        return optax.tree.norm(p)

    found = counts(norm, stacked(values()))
    assert found["add"] == 2 * len(LAYOUT.groups)  # within the squares of optax, and from stack to stack
    assert "slice" not in found
    found, wanted = batched(norm, stacked(values())), jax.jit(norm)(values())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # float32 sums of 400 squares in another order


@pytest.mark.parametrize("fold", [jnp.maximum, jnp.add], ids=["max", "add"])
def test_chains_over_some_rows(fold: Any) -> None:
    """A term twice, rows out of order, a row left out, an array that is no row."""

    def fn(p: Any) -> Any:
        total = p["h.3.bias"]
        for name in ("h.1.bias", "h.1.bias", "h.0.bias"):
            total = fold(total, p[name])
        return fold(fold(jnp.ones(8), total), p["first"][0]), total

    assert_equal(batched(fn, stacked(values())), jax.jit(fn)(values()), **CLOSE)


def test_different_constants_parameters_and_shapes_stay_apart() -> None:
    def fn(p: Any) -> Any:
        out = {n: v * 2.0 for n, v in p.items()}
        out["h.1.up"] = p["h.1.up"] * -0.0
        out["h.2.up"] = p["h.2.up"] * 0.0
        out["h.3.bias"] = p["h.3.bias"] ** 3
        out["h.2.bias"] = jnp.flip(p["h.2.bias"])
        out["h.0.down"] = p["h.1.down"]  # another row's
        out["h.3.down"] = p["h.0.down"] @ p["h.2.up"] @ p["h.1.down"]
        return out

    found = batched(fn, stacked(values()))
    assert_equal(found, jax.jit(fn)(values()), **CLOSE)
    assert np.array_equal(np.signbit(found["h.1.up"]), np.signbit(values()["h.1.up"] * -0.0))


def test_functions_within() -> None:
    """jit, custom derivatives, cond, scan, while; grouped where they line up, right where they do not."""

    def each(x: Any, shared: Any) -> Any:
        x = jax.jit(lambda x: jnp.where(x > 0, x, jax.nn.softplus(x)))(x)
        x = jax.lax.cond(shared > 0, lambda x: x + 1, lambda x: x * 2, x)
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x + 1, lambda x: x * 2, x)
        x, _ = jax.lax.scan(lambda c, t: (c * t, None), x, jnp.arange(1.0, 4.0))
        return jax.lax.while_loop(lambda x: jnp.sum(jnp.abs(x)) < 100, lambda x: x * 2, x)

    def fn(p: Any, shared: Any) -> Any:
        swapped = jax.lax.cond(shared > 1, lambda p: p, lambda p: jax.tree.map(jnp.negative, p), p)
        return {n: each(v, shared) for n, v in p.items()}, swapped, jax.nn.relu(shared)

    shared = jnp.float32(0.5)
    assert_equal(batched(fn, stacked(few()), shared), jax.jit(fn)(few(), shared), **CLOSE)
    found = counts(lambda p, s: fn(p, s)[0], stacked(values()), shared)
    assert found["while"] == found["scan"] == len(LAYOUT.groups)


def test_random_numbers_are_those_of_each_name() -> None:
    def fn(p: Any, key: Any) -> Any:
        same = {n: jax.random.normal(key, v.shape) for n, v in p.items()}
        keys = dict(zip(p, jax.random.split(key, len(p)), strict=True))
        return same, {n: v + jax.random.normal(keys[n], v.shape) for n, v in p.items()}, keys

    for impl in ("threefry2x32", "rbg"):
        key = jax.random.key(3, impl=impl)
        assert_equal(batched(fn, stacked(few()), key), fn(few(), key), **CLOSE)


def test_keys_by_name_are_state() -> None:
    """rbg draws other numbers for a batch of keys, so what draws is never batched."""
    keys = {n: jax.random.key(i, impl="rbg") for i, n in enumerate(NAMES)}

    def fn(keys: Any) -> Any:
        return {n: jax.random.uniform(key, (3,)) for n, key in keys.items()}

    assert_equal(batched(fn, stacked(keys)), fn(keys))


def test_what_cannot_be_batched_runs_row_by_row() -> None:
    seen = []

    def host(x: np.ndarray) -> np.ndarray:
        seen.append(x.shape)
        return x + 1

    def fn(p: Any) -> Any:
        return {n: jax.pure_callback(host, jax.ShapeDtypeStruct(v.shape, v.dtype), v) * 2 for n, v in p.items()}

    assert_equal(batched(fn, stacked(values())), jax.jit(fn)(values()))
    assert (DEPTH, 8, 4) not in seen


def test_effects_happen_once_for_each_name_in_order() -> None:
    seen: list[float] = []

    def fn(p: Any) -> Any:
        for value in p.values():
            jax.debug.callback(lambda x: seen.append(float(x)), jnp.sum(value), ordered=True)
        return p

    jax.block_until_ready(batched(fn, stacked(values())))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [np.sum(v) for _, v in sorted(values().items())], rtol=1e-4, atol=1e-5)


def test_a_chain_longer_than_pythons_stack_is_computed_when_asked() -> None:
    def longer(x: jax.Array) -> jax.Array:
        for _ in range(600):
            x = 1 - x
        return x

    program = RowProgram()
    (slot,) = program.add(jax.make_jaxpr(longer)(0.25).jaxpr, [RowSlot(RowValue(jnp.float32(0.25)), None)])
    program.run_when_asked()
    assert slot.value.array is None
    assert float(slot.take()) == 0.25


def test_results_that_are_shared_rearranged_or_of_another_type() -> None:
    def fn(p: Any) -> Any:
        one = jnp.ones((2,), jnp.int32)
        half = {n: v.astype(jnp.bfloat16) if n in ("h.1.up", "last") else v for n, v in p.items()}
        turned = {n: p[m] for n, m in zip(NAMES, reversed(NAMES), strict=True)}
        return dict.fromkeys(p, one), turned, half, dict.fromkeys(p, ())

    found = batched(fn, stacked(values()))
    assert_equal(found, jax.jit(fn)(values()))
    assert len(found[0].arrays) == len(LAYOUT.groups)
    assert len(found[2].arrays) == len(LAYOUT.groups) + DEPTH - 1  # a stack of two dtypes falls apart


UNARY = [jnp.sin, jnp.negative, lambda x: x * 2, lambda x: x * 3, jax.jit(jnp.tanh)]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, jax.lax.sub]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(range(5)), st.integers(0, 30), st.integers(0, 30)), max_size=25
    )
)
def test_any_program_over_rows(moves: list[tuple[int, int, int, int]]) -> None:
    """Random programs over the rows of one stack: mostly the same for all rows, sometimes across them."""
    names = [f"h.{i}.bias" for i in range(DEPTH)]

    def fn(p: Any) -> Any:
        found = [[p[n] for n in names]]
        for kind, op, left, right in moves:
            a, b = found[left % len(found)], found[right % len(found)]
            if kind == 0:
                found.append([UNARY[op](x) for x in a])
            elif kind == 1:
                found.append([BINARY[op % 4](x, y) for x, y in zip(a, b, strict=True)])
            elif kind == 2:  # one row apart
                found.append(
                    [BINARY[op % 4](x, y) if i == op else x for i, (x, y) in enumerate(zip(a, b, strict=True))]
                )
            else:  # across rows
                total = a[right % DEPTH]
                for x in a[: op + 1]:
                    total = BINARY[left % 3](total, x)
                found.append([total, *a[:-1]])
        return [dict(zip(names, rows, strict=True)) for rows in found[-3:]]

    layout = Layout.of([tuple(names)])
    p = {n: jnp.linspace(-1.0, 1.0, 8) * (i + 1) / 7 for i, n in enumerate(names)}
    found = as_dicts(run_by_name(fn, Stacks.from_dict(p, layout), layout=layout))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(fn(p)), strict=True):
        # A chain over rows is summed in another order; repeated products let rounding grow with the values.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + float(jnp.nanmax(jnp.abs(b)))))
