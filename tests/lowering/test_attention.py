"""Long attention against eager torch, at both orders, and on a mesh by the collectives that it costs."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.oracles.derivatives import assert_equals_torch, both, second, weighted
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._capture.trace import Spec, capture
from torch_shard._lowering.ops import keeps_whole
from torch_shard._lowering.ops.attention import SHORTEST, SHORTEST_NARROW
from torch_shard._lowering.ops.dropout import KeptWeights, kept, seed_of

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums of some hundred terms in another order
OURS, LONG = torch.ops.torch_shard.attention.default, SHORTEST + 44  # blocks of unequal length
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
CASES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "scaled, another width": (((1, 2, LONG, 4), (1, 2, LONG, 4), (1, 2, LONG, 3)), {"scale": 0.3}),
    "grouped": (((1, 4, LONG, 4), (1, 2, LONG, 4), (1, 2, LONG, 4)), {"enable_gqa": True}),
    "more keys": (((1, 1, LONG, 4), (1, 1, LONG + 7, 4), (1, 1, LONG + 7, 4)), {}),
    "fewer keys": (((1, 1, LONG, 4), (1, 1, 150, 4), (1, 1, 150, 4)), {}),
    "all, more keys": (
        ((1, 2, LONG, 4), (1, 1, LONG + 7, 4), (1, 1, LONG + 7, 4)),
        {"is_causal": False, "enable_gqa": True},
    ),
    "all, fewer keys": (((1, 1, LONG, 4), (1, 1, 150, 4), (1, 1, 150, 4)), {"is_causal": False}),
}


def nodes_of(fn: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """Of its capture."""
    specs = [Spec(tuple(x.shape), x.dtype) for x in inputs]
    return list(capture(lambda *x: ([fn(*x)], None), specs, keep=keeps_whole).module.graph.nodes)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_eager_torch(name: str) -> None:
    shapes, options = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **options})

    assert OURS in {node.target for node in nodes_of(attend, inputs)}
    assert_equals_torch(attend, inputs, num=3, **CLOSE)


@pytest.mark.parametrize("is_biased", [False, True])
def test_a_gradient_of_a_gradient_equals_eager_torch(is_biased: bool) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, LONG, 4), torch.randn(1, 1, LONG, 4)
    mask = {"attn_mask": torch.randn(1, 1, LONG, LONG)} if is_biased else {"is_causal": True}

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **mask)

    torch.testing.assert_close(*second(attend, torch.randn(1, 1, LONG, 4)), **CLOSE)


@pytest.mark.parametrize("is_causal", [True, False])
def test_short_attention_in_half_precision_is_one_block(is_causal: bool) -> None:
    torch.manual_seed(0)
    shape = (2, 2, 197, 8)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def narrow(*qkv: torch.Tensor) -> torch.Tensor:
        return attend(*(x.bfloat16() for x in qkv)).float()

    def has_ours(attend: Any, length: int = 197) -> bool:
        return OURS in {node.target for node in nodes_of(attend, [torch.empty(2, 2, length, 8)] * 3)}

    assert has_ours(narrow)
    assert not has_ours(attend)
    assert not has_ours(narrow, SHORTEST_NARROW - 1)
    (found, out), *grads = both(narrow, [torch.randn(shape).bfloat16().float() for _ in range(3)], eager=attend)
    torch.testing.assert_close(found, out, rtol=0, atol=0.03)  # weights and output rounded to 2**-8
    for grad, other in grads:
        torch.testing.assert_close(grad, other, rtol=0, atol=0.01 * other.abs().max().item())  # so are scores


def biases_of(nodes: Any) -> list[int]:
    """Of each attention that is ours, whether its mask is added to the scores, as it is no band."""
    return [len(node.args[-1]) for node in nodes if node.target == OURS]


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(LONG)
    return places[:, None], places[None, :]


def as_numbers(mask: torch.Tensor, lowest: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def triangle() -> torch.Tensor:
    return positions()[1] <= positions()[0]


def band() -> torch.Tensor:
    return triangle() & (positions()[1] > positions()[0] - 40)


# Made in the captured function, as models do, of places and of what the batch says: 0 is padding, and what has the same
# number is one document. And whether that is known.
MASKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "triangle": (lambda _: torch.ones(LONG, LONG, dtype=torch.bool).tril(), True),
    "compared": (lambda _: positions()[1] <= positions()[0], True),
    "for each row and head": (lambda _: (positions()[1] <= positions()[0]).repeat(2, 2, 1, 1), True),
    "-inf": (lambda _: as_numbers(positions()[1] <= positions()[0], -math.inf), True),
    "lowest": (lambda _: as_numbers(positions()[1] <= positions()[0], torch.finfo(torch.float32).min), True),
    "low": (lambda _: as_numbers(positions()[1] <= positions()[0], -1e4), False),
    "window": (lambda _: (positions()[1] <= positions()[0]) & (positions()[1] > positions()[0] - 9), True),
    "one in all": (lambda _: positions()[1] <= positions()[0] + (positions()[0] == 7), False),
    "both sides": (lambda _: (positions()[1] - positions()[0]).abs() <= 60, True),
    "all": (lambda _: torch.ones(1, 1, LONG, LONG, dtype=torch.bool), True),
    "all keys": (lambda _: torch.ones(1, 1, 1, LONG, dtype=torch.bool), True),
    "not itself": (lambda _: positions()[1] != positions()[0], False),
    "upper triangle": (lambda _: positions()[1] >= positions()[0], True),
    "some keys": (lambda _: positions()[1] != 7, False),
    "another head": (
        lambda _: (positions()[1] <= positions()[0]).repeat(2, 2, 1, 1).index_fill(1, torch.tensor(1), True),
        False,
    ),
    "biased": (lambda _: as_numbers(positions()[1] <= positions()[0], -math.inf) + 0.5 * positions()[1], False),
    "padding": (lambda numbers: triangle() & (numbers != 0)[:, None, None, :], True),
    "documents": (lambda numbers: triangle() & (numbers[:, None, :, None] == numbers[:, None, None, :]), True),
    "documents and padding": (
        lambda n: (n[:, None, :, None] == n[:, None, None, :]) & triangle() & (n != 0)[:, None, None, :],
        True,
    ),
    "indexed": (
        lambda n: n.bool()[torch.arange(2)[:, None, None, None], torch.arange(LONG)] & triangle(),
        True,
    ),
    "documents in a window": (lambda n: band() & (n[:, None, :, None] == n[:, None, None, :]), False),
    "other numbers": (lambda n: triangle() & (n[:, None, :, None] == n.flip(1)[:, None, None, :]), False),
    "rows that see nothing": (lambda n: triangle() & (n != 0)[:, None, :, None], False),
    "indexed on one side": (
        lambda n: (
            triangle() & (n[torch.arange(2)[:, None, None, None], torch.arange(LONG)[:, None]] == n[:, None, None, :])
        ),
        False,
    ),
    "one key for all": (lambda n: triangle() & (n[0] == n[1]).expand(2, 1, LONG, LONG), False),
    "no triangle": (lambda n: (n != 0)[:, None, None, :].expand(2, 1, LONG, LONG), True),
    "keys": (lambda n: (n != 0)[:, None, None, :], True),
    "no keys": (lambda n: (n > 4)[:, None, None, :], True),
    "documents alone": (lambda n: n[:, None, :, None] == n[:, None, None, :], True),
    "documents on both sides": (
        lambda n: ((positions()[1] - positions()[0]).abs() < 40) & (n[:, None, :, None] == n[:, None, None, :]),
        False,
    ),
    "no later documents": (lambda n: n[:, None, :, None] >= n[:, None, None, :], False),
    "queries": (lambda n: (n != 0)[:, None, :, None].expand(2, 1, LONG, LONG), False),
    "of heads": (lambda n: torch.stack([n != 0, n != 1], 1)[:, :, None, :], False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_known(name: str) -> None:
    make, is_known = MASKS[name]
    torch.manual_seed(0)
    numbers = torch.arange(LONG).div(200, rounding_mode="floor").repeat(2, 1) + 1
    numbers[0, LONG - 30 :] = numbers[1, :20] = 0  # queries that see nothing
    numbers[1, 300:320] = 1  # a document again
    inputs = [*(torch.randn(2, 2, LONG, 4) for _ in range(3)), numbers]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(numbers))

    assert biases_of(nodes_of(attend, inputs)) == [int(not is_known)]
    assert_equals_torch(attend, inputs, num=3, **CLOSE)


def bands(attend: Any, length: int, rows: int = 2) -> list[Any]:
    """The bands of the attention that is ours in a capture."""
    specs = [Spec((rows, 2, length, 4), torch.float32)] * 3
    graph = capture(lambda *x: ([attend(*x)], None), specs, keep=keeps_whole).module.graph
    return [node.args[5] for node in graph.nodes if node.target == OURS and not node.args[-1]]


BY_PLACES = [
    "compared",
    "window",
    "one in all",
    "upper triangle",
    "some keys",
    "not itself",
]


@pytest.mark.parametrize("name", BY_PLACES)
def test_comparisons_of_places_are_known_without_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, is_known = MASKS[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(torch.empty(0)))

    wanted = bands(attend, LONG)
    monkeypatch.setattr("torch_shard._capture.constants._LARGEST", 8 * LONG)
    assert bands(attend, LONG) == wanted
    assert bool(wanted) == is_known


def test_a_mask_that_no_memory_would_hold_is_known() -> None:
    """As Hugging Face has it: places, and numbers of documents that are constants."""
    length = 1 << 17

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places, documents = torch.arange(length), torch.zeros(64, length, dtype=torch.int64)
        mask = (places[None, :] <= places[:, None]) & (documents[:, None, :, None] == documents[:, None, None, :])
        near = mask & (places[None, :] > places[:, None] - 4096)
        return sum(F.scaled_dot_product_attention(q, k, v, attn_mask=each) for each in (mask, near))

    assert bands(attend, length, rows=64) == [[-1, 0], [4095, 0]]


BIASES = {
    "of all": (2, 4, LONG, LONG),
    "of heads, for all rows": (1, 4, LONG, LONG),
    "of keys": (1, 4, 1, LONG),
    "of queries": (2, 1, LONG, 1),
    "of two dims": (LONG, LONG),
    "of heads alone": (4, 1, 1),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_has_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, LONG, 4), torch.randn(2, 2, LONG, 4), torch.randn(2, 2, LONG, 3)]
    inputs += [torch.randn(BIASES[name])]
    inputs[3] = (
        inputs[3].masked_fill(torch.rand(BIASES[name]) < 0.1, -math.inf) if inputs[3].shape[-2] > 1 else inputs[3]
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=0.3 * bias, scale=0.7, enable_gqa=True)

    assert biases_of(nodes_of(attend, inputs)) == [1]
    for found, wanted in both(attend, inputs, num=4):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-5 * float(wanted.abs().max()) + 2e-5)


@pytest.mark.parametrize(
    ("mask", "said"),
    [(torch.zeros(LONG, LONG).half(), "attn_mask dtype"), (torch.zeros(LONG, 7), "must match|broadcast")],
    ids=["dtype", "size"],
)
def test_a_bias_that_pytorch_refuses_is_refused(mask: torch.Tensor, said: str) -> None:
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(1, 2, LONG, 4)
    for run in (attend, ts.jax_jit(attend)):
        with pytest.raises(RuntimeError, match=said):
            run(x, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_heads_are_taken_once(dtype: torch.dtype) -> None:
    """As models of grouped queries repeat them; rounding in between, as autocast has it."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, LONG, 4) for heads in (4, 2, 2)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        many = k[:, :, None].expand(2, 2, 2, LONG, 4).reshape(2, 4, LONG, 4)
        each = (x.to(dtype) for x in (q, many, v.repeat_interleave(2, 1)))
        return F.scaled_dot_product_attention(*each, is_causal=True).float()

    def gradient(*given: torch.Tensor) -> torch.Tensor:
        leaves = [x.detach().requires_grad_() for x in given]
        return torch.cat([x.flatten() for x in torch.autograd.grad(weighted(attend(*leaves)), leaves)])

    backward = torch.ops.torch_shard.attention_backward.default
    (node,) = (node for node in nodes_of(gradient, inputs) if node.target is backward)
    assert [tuple(x.meta["val"].shape) for x in node.args[1][:3]] == [tuple(x.shape) for x in inputs]
    close = CLOSE if dtype is torch.float32 else {"rtol": 2**-7, "atol": 0.05}  # rounded to 2**-8 in between
    assert_equals_torch(attend, inputs, **close)


class Layer(torch.nn.Module):
    """With a mask that it is given, or makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x + self.attention(x, triangle() if mask is None else mask[:, :, : x.shape[1], : x.shape[1]])


class Model(torch.nn.Module):
    """One mask for all layers, longer than the sequences, as Hugging Face's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = torch.nn.Linear(16, 16), torch.nn.ModuleList(Layer() for _ in range(3))
        self.makes_mask = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LONG + 5)
        mask = (places[None, :] <= places[:, None]).expand(len(x), 1, LONG + 5, LONG + 5) if self.makes_mask else None
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize(
    ("dtype", "is_given"), [(None, True), (torch.bfloat16, True), (torch.bfloat16, False)], ids=str
)
def test_layers_in_a_loop_know_their_mask(dtype: torch.dtype | None, is_given: bool) -> None:
    """Which they are given, or make themselves."""
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(2, LONG, 16)
    model.makes_mask = is_given
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    step = step_of(model, loss_fn, mesh=make_mesh((2, 1)), compute_dtype=dtype)
    lowered = step.lower(step.structs, batch).as_text(debug_info=True)
    assert [loop.num_iterations for loop in step.programs[0].loops] == [3, 3]
    assert "/attention/" in lowered
    assert "softmax" not in lowered
    if dtype is None:
        step.prove(step.init(), batch).raise_if_different()


class Encoder(torch.nn.Module):
    """Layers that see what is near and layers that see all but padding, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        near = ((positions()[1] - positions()[0]).abs() <= 40).expand(len(x), 1, LONG, LONG)
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, near if number % 2 else is_word[:, None, None, :].expand(len(x), 1, LONG, LONG))
        return x


def test_layers_of_one_loop_may_have_different_masks() -> None:
    torch.manual_seed(0)
    step = step_of(
        Encoder(), lambda model, batch: model(*batch).square().mean(), mesh=make_mesh((2, 1)), scan_layers=True
    )
    batch = torch.randn(2, LONG, 16), torch.arange(LONG)[None, :] < torch.tensor([[LONG - 60], [0]])
    step.prove(step.init(), batch).raise_if_different()
    assert [loop.num_iterations for loop in step.programs[0].loops] == [2, 2]
    assert "softmax" not in step.lower(step.structs, batch).as_text(debug_info=True)


def test_heads_over_a_mesh_cost_no_more_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's split, heads over `model`: the forward pass sums once over `model`, the backward pass once."""
    compiled = attention_step()
    assert "/attention/" in compiled.as_text()
    ours = count_collectives(compiled)
    monkeypatch.setattr("torch_shard._lowering.ops.attention.SHORTEST", LONG + 1)
    assert ours == count_collectives(attention_step())


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(out.transpose(1, 2).reshape(x.shape))


def attention_step() -> Any:
    """The optimised program of a training step."""
    rules = {f"{name}.{part}": P("model") for name in "qkv" for part in ("weight", "bias")}
    plan = ts.ShardingPlan({**rules, "o.weight": P(None, "model")}, default=P())
    torch.manual_seed(0)
    step = step_of(Attention(), plan=plan)
    return step.lower(step.init(), torch.randn(8, LONG, 16)).compile()


class Dropping(nn.Module):
    """Attention that drops weights, of two heads of queries for each of keys."""

    def __init__(self, is_causal: bool, *, is_biased: bool = False) -> None:
        super().__init__()
        self.q, self.kv, self.is_causal = nn.Linear(8, 16), nn.Linear(8, 16), is_causal
        self.bias = nn.Parameter(torch.randn(1, 4, 1, LONG)) if is_biased else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 8)).transpose(1, 2).chunk(2, -1)
        options = {"dropout_p": 0.3, "is_causal": self.is_causal, "enable_gqa": True}
        out = F.scaled_dot_product_attention(q, k, v, self.bias, **options)
        return x + out[:, :2].transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("is_causal", "is_biased", "remat"),
    [(True, False, "none"), (False, True, "none"), pytest.param(False, False, "block", marks=pytest.mark.slow)],
)
def test_dropout_drops_in_blocks_what_it_drops_of_all_weights(is_causal: bool, is_biased: bool, remat: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Dropping(is_causal, is_biased=is_biased) for _ in range(3)))
    step = step_of(model, lambda model, x: weighted(model(x)), mesh=make_mesh((2, 2)), remat=remat)
    x = torch.randn(2, LONG, 8)
    assert f"{LONG},{LONG}]" not in (step.lower(step.structs, x).compile().as_text() or "")  # no weights as a whole
    step.prove(step.init(seed=3), x).raise_if_different()  # eager torch draws by the key of the step


@pytest.mark.slow
def test_a_gradient_of_a_gradient_drops_the_same_weights() -> None:
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            leaf = x.requires_grad_()
            return torch.autograd.grad(weighted(model(leaf).square()), leaf, create_graph=True)[0].square().sum()

    torch.manual_seed(0)
    step = step_of(Dropping(True), penalty, mesh=make_mesh((1, 1)))
    step.prove(step.init(), torch.randn(1, LONG, 8)).raise_if_different()


@pytest.mark.parametrize("dropout", [0.3, 1e-9, 0.999999])
@pytest.mark.parametrize("length", [7, 40, 700], ids=str)
def test_blocks_of_what_is_kept_are_cut_from_all(length: int, dropout: float) -> None:
    seed, of = seed_of(jax.random.fold_in(jax.random.key(3), 7)), (2, 6, length, 50)
    whole = np.where(kept(seed, of, dropout), np.float32(1 / (1 - dropout)), 0)
    half = length // 2
    q, k = np.zeros((1, 6, half, 8)), np.zeros((1, 3, 25, 8))
    blocks = [(slice(0, half // 3), slice(0, 25)), (slice(half // 3, half), slice(5, 20))]
    for start in ((0, 0, 0, 0), (1, 0, 0, 25), (1, 0, jnp.int32(half), 25)):
        parts = KeptWeights(q, k, seed, dropout, of=of, start=start).factors(blocks)
        for (queries, keys), part in zip(blocks, parts, strict=True):
            first, at = (
                np.arange(x.start, x.stop) + int(begin) for x, begin in zip((queries, keys), start[2:], strict=True)
            )
            wanted = whole[start[0], :, first[:, None], at].transpose(2, 0, 1)
            np.testing.assert_array_equal(np.asarray(part).reshape(wanted.shape), wanted)


@pytest.mark.parametrize("dropout", [0.5, 0.1, 1e-3])
def test_what_one_call_draws_is_independent(dropout: float) -> None:
    drops = ~np.asarray(kept(seed_of(jax.random.key(5)), (512, 8192), dropout))
    share = drops.mean()
    spread = math.sqrt(dropout * (1 - dropout) / drops.size)
    assert abs(share - dropout) < 4 * spread  # four standard deviations, of a fixed key
    pieces = drops.reshape(4, 128, 8192) - dropout
    for one, other in itertools.combinations(pieces, 2):
        correlation = (one * other).mean() / (dropout * (1 - dropout))
        assert abs(correlation) < 4 / math.sqrt(one.size)
