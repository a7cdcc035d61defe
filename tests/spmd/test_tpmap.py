"""tpmap against a loop of eager torch over the devices, and JAX's own keys."""

# ruff: noqa: E501  (a table)

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import collectives_of
from tests.oracles.errors import assert_refused
from tests.oracles.processes import run_alone
from tests.spmd.mapping import assert_close
from torch_shard.collectives import axis_index, pmean, psum

N = 8
DATA, MATRIX = torch.arange(128.0).view(16, 8) / 64, torch.linspace(-1, 1, 40).view(8, 5)


def test_each_device_sees_its_shard_and_the_whole_of_what_is_broadcast() -> None:
    seen = []

    def f(data: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(data.shape), tuple(matrix.shape)))
        return torch.tanh(data @ matrix)

    found = ts.tpmap(f, "i", ["shard", "broadcast"])(DATA, MATRIX)
    assert seen == [((2, 8), (8, 5))]
    assert found.sharding.is_equivalent_to(jax.sharding.NamedSharding(ts.make_mesh(i=N), P("i")), 3)
    assert_close(found, torch.tanh(DATA @ MATRIX).view(8, 2, 5))


def test_noisy_product() -> None:
    @functools.partial(ts.tpmap, axis_name="i", argtypes=["rng", "shard", "broadcast"], wrap_return="shard")
    def noisy_product(key: torch.Tensor, data: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return data @ matrix + torch.randn(2, 5)

    assert noisy_product.__name__ == "noisy_product"
    found = noisy_product(0, DATA, MATRIX)
    assert found.shape == (16, 5)
    noise = (found.cpu() - DATA @ MATRIX).view(8, 10)
    assert len({tuple(row.tolist()) for row in noise}) == 8
    assert noise.std().item() == pytest.approx(1, abs=0.3)  # 80 draws: three standard errors are 0.24
    assert torch.equal(noisy_product(0, DATA, MATRIX).cpu(), found.cpu())
    assert not torch.equal(noisy_product(1, DATA, MATRIX).cpu(), found.cpu())


def test_trees_in_and_out_with_keywords() -> None:
    def f(tree: Any, *, scale: Any, mode: str = "plain") -> Any:
        return {"sum": tree["x"].sum() * scale["by"], "all": [psum(tree["y"], "i"), 3], "mode": len(mode)}

    fn = ts.tpmap(f, "i", ["shard"], {"scale": "broadcast", "mode": "static"})
    found = fn({"x": DATA, "y": torch.arange(8)}, scale={"by": 2.0, "unused": None}, mode="other")
    assert_close(found["sum"], 2 * DATA.view(8, -1).sum(1))
    whole, three = found["all"]
    assert (whole.tolist(), three.tolist(), found["mode"].tolist()) == ([[28]] * 8, [3] * 8, [5] * 8)


@pytest.mark.parametrize("kind", ["shard", "thru"])
def test_mapping_again_moves_no_data(kind: str) -> None:
    double = ts.tpmap(lambda x: 2 * x, "i", [kind], wrap_return=kind)
    x = torch.randn(8, 3)
    once = double(x)
    assert_close(double(once), 4 * x)
    key = jax.random.key(0)
    program = jax.jit(lambda x: ts.jax_view(double)(x, key=key)).lower(once.jax()).compile()
    assert not collectives_of(program)
    (placed,), _ = program.input_shardings
    assert placed.is_equivalent_to(once.sharding, 2)
    assert program.output_shardings.is_equivalent_to(once.sharding, 2)


def test_kinds_of_ones_own() -> None:
    dealt = ts.ArgKind(
        spread=lambda x, n: x.view(-1, n, *x.shape[1:]).movedim(1, 0),
        join=lambda x: x.movedim(0, 1).flatten(0, 1),
        check=lambda leaf, n: None if leaf.shape[0] % n == 0 else f"cannot be dealt to {n}",
    )
    fn = ts.tpmap(lambda x: x.cumsum(0), "i", [dealt], wrap_return=dealt)
    assert_close(fn(DATA), torch.cat([DATA[:8], DATA[:8] + DATA[8:]]))
    with pytest.raises(ValueError, match=r"x \(7,\) cannot be dealt to 8"):
        fn(torch.ones(7))


def test_devices_in_their_order() -> None:
    devices = jax.devices()[5:1:-1]
    found = ts.tpmap(lambda x: x + axis_index("i"), "i", ["shard"], devices=devices)(torch.zeros(4))
    assert {shard.device: shard.data.item() for shard in found.jax().addressable_shards} == {
        device: i for i, device in enumerate(devices)
    }


def test_modules_collectives_and_each_devices_own_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    def both(weights: Any, x: torch.Tensor) -> Any:
        own = ts.jax_grad(loss)(weights, x)
        return own["weight"], pmean(own, "i")["weight"]

    own, mean = ts.tpmap(both, "i", ["broadcast", "shard"])(weights, x)
    wanted = torch.stack([torch.func.grad(loss)(weights, part)["weight"] for part in x.view(8, 2, 8)])
    assert_close(own, wanted)
    assert_close(mean, wanted.mean(0).expand(8, 3, 8))
    assert_close(ts.tpmap(model, "i", ["shard"], wrap_return="shard")(x), model(x).detach())
    with torch.no_grad():
        model.weight.zero_()
    assert_close(ts.tpmap(model, "i", ["shard"], wrap_return="shard")(x), model(x).detach())


def plain(data: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Of the function below, on whole tensors."""
    out = (data @ matrix).sin().view(8, 2, 5)
    return out * out.sum((1, 2)).mean()


def spread(data: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    out = (data @ matrix).sin()
    return out * pmean(out.sum(), "i")


@pytest.mark.parametrize("how", ["autograd", "jax_grad", "within jax_jit"])
def test_gradients_are_those_of_the_plain_function(how: str) -> None:
    weights = torch.arange(8.0).view(8, 1, 1)
    fn = ts.tpmap(spread, "i", ["shard", "broadcast"], wrap_return=lambda r: r * weights.to(r.device))
    leaves = [DATA.clone().requires_grad_(), MATRIX.clone().requires_grad_()]
    (plain(*leaves) * weights).sum().backward()
    if how == "autograd":
        moved = [DATA.to("jax").requires_grad_(), MATRIX.to("jax").requires_grad_()]
        fn(*moved).sum().backward()
        found = [t.grad for t in moved]
    else:
        grad = ts.jax_grad(lambda *args: fn(*args).sum(), argnums=(0, 1))
        found = (ts.jax_jit(grad) if how == "within jax_jit" else grad)(DATA, MATRIX)
    for grad, leaf in zip(found, leaves, strict=True):
        assert_close(grad, leaf.grad)


# Random numbers.


KEYS = {
    "seed": 3,
    "numpy seed": np.int64(3),
    "key": lambda: jax.random.key(3),
    "words": lambda: jax.random.key_data(jax.random.key(3)),
    "words in torch": torch.tensor([0, 3], dtype=torch.uint32),
}


def test_rng_gives_each_device_the_key_that_jax_splits_off() -> None:
    wanted = jax.random.key_data(jax.random.split(jax.random.key(3), 8))
    for name, key in KEYS.items():
        given = key() if callable(key) else key
        found = ts.tpmap(lambda key: key["a"], "i", ["rng"])({"a": given, "b": 4})
        assert np.array_equal(found.numpy(), wanted), name


def test_torch_draws_from_the_first_key_alone_and_apart_from_it() -> None:
    def f(first: torch.Tensor, second: torch.Tensor) -> Any:
        below = ts.call_jax(lambda k: jax.random.bits(jax.random.split(jax.random.wrap_key_data(k))[0], (4,)), first)
        return torch.randint(0, 2**31 - 1, (4,)), nn.functional.dropout(torch.ones(64)), below

    fn = ts.tpmap(f, "i", ["rng", "rng"])
    draws, masks, below = fn(0, 1)
    again, _, _ = fn(0, 2)
    other, _, _ = fn(1, 1)
    assert torch.equal(draws.cpu(), again.cpu())
    assert not set(draws.flatten().tolist()) & set(other.flatten().tolist())
    assert len({tuple(m) for m in masks.tolist()}) == 8
    bits = set((below.cpu().long() % (2**31 - 1)).flatten().tolist()) | set(
        (below.cpu().long() >> 1).flatten().tolist()
    )
    assert not bits & set(draws.flatten().tolist())


def test_gradients_drop_what_the_forward_pass_dropped() -> None:
    fn = ts.tpmap(lambda x, key: nn.functional.dropout(x, 0.25), "i", ["shard", "rng"], wrap_return="shard")
    x = torch.linspace(1, 2, 64)
    grad = ts.jax_jit(ts.jax_grad(lambda x: fn(x, 5).sum()))(x).cpu()
    assert_close(x * grad, fn(x, 5).cpu())
    moved = x.to("jax").requires_grad_()
    fn(moved, 5).sum().backward()
    assert torch.equal(moved.grad.cpu(), grad)  # pyright: ignore[reportOptionalMemberAccess]


def test_without_a_key_draws_differ_by_device_and_call_and_follow_torchs_seed() -> None:
    fn = ts.tpmap(lambda x: torch.rand(3), "i", ["shard"])
    torch.manual_seed(0)
    first, second = fn(torch.ones(8)).tolist(), fn(torch.ones(8)).tolist()
    torch.manual_seed(0)
    assert fn(torch.ones(8)).tolist() == first
    assert len({tuple(row) for row in first + second}) == 16


# One program per signature.


class Compiles:
    """Counts what XLA compiles."""

    num, counting = 0, False  # a step that is compiled meanwhile sees that a listener reads this


def _count(event: str, duration: float, **_: Any) -> None:
    if Compiles.counting:
        Compiles.num += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> type[Compiles]:
    monkeypatch.setattr(Compiles, "counting", True)
    return Compiles


def test_one_compile_per_signature(compiles: type[Compiles]) -> None:
    traces = []

    def f(x: torch.Tensor, key: torch.Tensor, n: Any) -> torch.Tensor:
        traces.append(n)
        return x * n + torch.rand(())

    fn = ts.tpmap(f, "i", ["shard", "rng", "static"], wrap_return="shard")
    fn(torch.ones(8), 0, 2)
    before = compiles.num
    for seed in range(3):
        fn(torch.ones(8), seed, 2)
    assert (traces, compiles.num) == ([2], before)
    fn(torch.ones(16), 0, 2)
    assert len(traces) == 2
    assert compiles.num > before


def test_no_device_is_touched_before_the_first_call() -> None:
    program = """
fn = ts.tpmap(lambda x, key: x + torch.rand(2), "i", ["shard", "rng"], wrap_return="shard")
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
assert fn(torch.zeros(6), 0).shape == (6,)
"""
    ended = run_alone(program)
    assert ended.status == 0, ended.output


# What is refused.

REFUSED = {
    "ts.tpmap(torch.sin, 'i', [['shard']])": r"argtypes\[0\] is \['shard'\], which is not a kind",
    "ts.tpmap(spread, 'i', ['shard', 'broadcast'])(DATA, MATRIX, 1)": "spread takes 2 positional arguments by its argtypes "
    r"\(data, matrix\), and got 3",
    "ts.tpmap(spread, 'i', ['shard', 'broadcast'])(DATA, matrix=MATRIX)": "and got 1. Arguments that are passed by name need an entry in "
    "kwargtypes",
    "ts.tpmap(spread, 'i', ['shard'], {'matrix': 'broadcast'})(DATA, matrx=MATRIX)": "spread got the keyword 'matrx', and its "
    r"kwargtypes name \['matrix'\]",
    "ts.tpmap(spread, 'i', ['shard', 'broadcast'])(DATA[:15], MATRIX)": r"data \(15, 8\) has 15 rows, which do not divide among 8 devices",
    "ts.tpmap(spread, 'i', ['shard', 'shard'])(DATA, 2)": "matrix is a scalar, which has no",
    "ts.tpmap(lambda x: x, 'i', ['thru'])({'a': torch.ones(4, 2)})": r"x\['a'\] \(4, 2\) must have a leading dim of 8, one row for each device",
    "ts.tpmap(lambda x, n: x, 'i', ['shard', 'static'])(DATA, [1])": 'n is "static", and a list is not hashable: pass a tuple',
    "ts.tpmap(lambda x, n: x, 'i', ['shard', 'static'])(DATA, (torch.ones(2), 1))": 'n is "static", and holds a tensor',
    "ts.tpmap(lambda k: k, 'i', ['rng'])(torch.ones(2))": r"k \(2,\) is neither one key of JAX",
    "ts.tpmap(lambda k: k, 'i', ['rng'])(True)": "k is neither one key of JAX",
    "ts.tpmap(lambda k: k, 'i', ['rng'])(torch.Generator())": "k is <torch._C.Generator",
    "ts.tpmap(lambda k: k, 'i', ['rng'])(jax.random.split(jax.random.key(0), 8))": "neither one",
    "ts.tpmap(lambda k: k, 'i', ['rng'])(jax.random.key(0, impl='rbg'))": "neither one",
    "ts.tpmap(lambda k: k, 'i', ['rng'])(2**32)": "is the seed 4294967296: give one from 0 to",
    "ts.tpmap(lambda k: k, 'i', ['broadcast'])(jax.random.key(0))": 'k is a key of JAX: its kind is "rng"',
    "ts.tpmap(lambda k: k, 'i', ['rng'])(None)": "k is None: it holds no tensor",
    "ts.tpmap(lambda x, y, n: x, 'i', ['shard', 'thru', 'static'])(DATA[:15], DATA, {})": r"15 rows.*\n.*y \(16, 8\) must have.*\n.*"
    'n is "static"',
}


BY_JAX = {
    "ts.tpmap(lambda x: x, 'i', ['shard'])(jax.device_put(DATA.numpy(), jax.devices()[3]))": "ValueError: Received incompatible devices",
    "ts.tpmap(lambda x: x, 'i', [ts.ArgKind(spread=lambda x, n: x)])({'a': torch.ones(3)})": "ValueError: .*evenly divisible",
    "ts.tpmap(lambda x: x, 'i', [ts.ArgKind(spread=lambda x, n: x)])(torch.ones(16))": "ValueError: cannot select an axis to squeeze out",
    "ts.tpmap(lambda x: {'a': '5'}, 'i', ['shard'])(DATA)": "TypeError: .*<class 'str'>",
}


def test_what_jax_refuses_by_itself() -> None:
    assert_refused(BY_JAX, lambda text: eval(text))


def test_refused() -> None:
    assert_refused({call: f"ValueError: tpmap: .*{words}" for call, words in REFUSED.items()}, lambda text: eval(text))
