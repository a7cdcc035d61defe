"""Long attention against eager torch, at both orders, and on a mesh by the collectives that it costs."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.oracles.derivatives import assert_equals_torch, both, second, weighted
from tests.oracles.graphs import nodes_of, targets_of
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._lowering.ops.attention import SHORTEST, SHORTEST_NARROW
from torch_shard._lowering.ops.dropout import kept, seed_of

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums of some hundred terms in another order
OURS, LONG = torch.ops.torch_shard.attention.default, SHORTEST + 44  # blocks of unequal length
# Heads of queries and of keys, how many keys, features of values, options.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "scaled, another width": (2, 2, LONG, 3, {"scale": 0.3}),
    "grouped": (4, 2, LONG, 4, {"enable_gqa": True}),
    "more keys": (1, 1, LONG + 7, 4, {}),
    "fewer keys": (1, 1, 150, 4, {}),
    "all, more keys": (2, 1, LONG + 7, 4, {"is_causal": False, "enable_gqa": True}),
    "all, fewer keys": (1, 1, 150, 4, {"is_causal": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_eager_torch(name: str) -> None:
    heads, key_heads, num, width, options = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, LONG, 4), torch.randn(1, key_heads, num, 4), torch.randn(1, key_heads, num, width)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **options})

    assert OURS in targets_of(attend, inputs)
    assert_equals_torch(attend, inputs, num=3, **CLOSE)


@pytest.mark.parametrize("is_biased", [False, True])
def test_a_gradient_of_a_gradient_equals_eager_torch(is_biased: bool) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, LONG, 4), torch.randn(1, 1, LONG, 4)
    mask = {"attn_mask": torch.randn(1, 1, LONG, LONG)} if is_biased else {"is_causal": True}

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **mask)

    torch.testing.assert_close(*second(attend, torch.randn(1, 1, LONG, 4)), **CLOSE)


def test_short_attention_in_half_precision_is_one_block() -> None:
    torch.manual_seed(0)
    attend = F.scaled_dot_product_attention

    def narrow(*qkv: torch.Tensor) -> torch.Tensor:
        return attend(*(x.bfloat16() for x in qkv)).float()

    def has_ours(attend: Any, length: int = 197) -> bool:
        return OURS in targets_of(attend, [torch.empty(2, 2, length, 8)] * 3)

    assert has_ours(narrow)
    assert not has_ours(attend)
    assert not has_ours(narrow, SHORTEST_NARROW - 1)
    inputs = [torch.randn(2, 2, 197, 8).bfloat16().float() for _ in range(3)]
    (found, out), *grads = both(narrow, inputs, eager=attend)
    torch.testing.assert_close(found, out, rtol=0, atol=0.03)  # weights and output rounded to 2**-8
    for grad, other in grads:
        torch.testing.assert_close(grad, other, rtol=0, atol=0.01 * other.abs().max().item())  # so are scores


def biases_of(nodes: Any) -> list[int]:
    """Of each attention that is ours, whether its mask is added to the scores, as it is no band."""
    return [len(node.args[-1]) for node in nodes if node.target == OURS]


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries and of keys."""
    places = torch.arange(LONG)
    return places[:, None], places[None, :]


def triangle() -> torch.Tensor:
    i, j = positions()
    return j <= i


def as_numbers(mask: torch.Tensor, lowest: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def queries(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[:, None, :, None]


def keys(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[:, None, None, :]


ROWS = torch.arange(2)[:, None, None, None]
# Made in the captured function, as models do, of what the batch says, n, and of the places of queries, i, and keys, j:
# n is 0 where padding is, and what has the same number is one document. And whether that is known.
MASKS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "triangle": (lambda n, i, j: torch.ones(LONG, LONG, dtype=torch.bool).tril(), True),
    "compared": (lambda n, i, j: j <= i, True),
    "for each row and head": (lambda n, i, j: (j <= i).repeat(2, 2, 1, 1), True),
    "-inf": (lambda n, i, j: as_numbers(j <= i, -math.inf), True),
    "lowest": (lambda n, i, j: as_numbers(j <= i, torch.finfo(torch.float32).min), True),
    "low": (lambda n, i, j: as_numbers(j <= i, -1e4), False),
    "window": (lambda n, i, j: (j <= i) & (j > i - 9), True),
    "one in all": (lambda n, i, j: j <= i + (i == 7), False),
    "both sides": (lambda n, i, j: (j - i).abs() <= 60, True),
    "all": (lambda n, i, j: torch.ones(1, 1, LONG, LONG, dtype=torch.bool), True),
    "all keys": (lambda n, i, j: torch.ones(1, 1, 1, LONG, dtype=torch.bool), True),
    "not itself": (lambda n, i, j: j != i, False),
    "upper triangle": (lambda n, i, j: j >= i, True),
    "some keys": (lambda n, i, j: j != 7, False),
    "another head": (lambda n, i, j: (j <= i).repeat(2, 2, 1, 1).index_fill(1, torch.tensor(1), True), False),
    "biased": (lambda n, i, j: as_numbers(j <= i, -math.inf) + 0.5 * j, False),
    "padding": (lambda n, i, j: (j <= i) & (keys(n) != 0), True),
    "documents": (lambda n, i, j: (j <= i) & (queries(n) == keys(n)), True),
    "documents and padding": (lambda n, i, j: (queries(n) == keys(n)) & (j <= i) & (keys(n) != 0), True),
    "indexed": (lambda n, i, j: n.bool()[ROWS, torch.arange(LONG)] & (j <= i), True),
    "documents in a window": (lambda n, i, j: (j <= i) & (j > i - 40) & (queries(n) == keys(n)), False),
    "other numbers": (lambda n, i, j: (j <= i) & (queries(n) == keys(n.flip(1))), False),
    "rows that see nothing": (lambda n, i, j: (j <= i) & (queries(n) != 0), False),
    "indexed on one side": (lambda n, i, j: (j <= i) & (n[ROWS, torch.arange(LONG)[:, None]] == keys(n)), False),
    "one key for all": (lambda n, i, j: (j <= i) & (n[0] == n[1]).expand(2, 1, LONG, LONG), False),
    "no triangle": (lambda n, i, j: (keys(n) != 0).expand(2, 1, LONG, LONG), True),
    "keys": (lambda n, i, j: keys(n) != 0, True),
    "no keys": (lambda n, i, j: keys(n) > 4, True),
    "documents alone": (lambda n, i, j: queries(n) == keys(n), True),
    "documents on both sides": (lambda n, i, j: ((j - i).abs() < 40) & (queries(n) == keys(n)), False),
    "no later documents": (lambda n, i, j: queries(n) >= keys(n), False),
    "queries": (lambda n, i, j: (queries(n) != 0).expand(2, 1, LONG, LONG), False),
    "of heads": (lambda n, i, j: torch.stack([n != 0, n != 1], 1)[:, :, None, :], False),
}


# Nothing but a band, of which the tests above and below have the numbers.
CAUSAL, WHOLE = [-1, 0], [-1, -1]
BANDS = {**dict.fromkeys(("triangle", "compared", "for each row and head", "-inf", "lowest"), CAUSAL)}
BANDS |= {"all": WHOLE, "all keys": WHOLE}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_known(name: str) -> None:
    make, is_known = MASKS[name]
    torch.manual_seed(0)
    numbers = torch.arange(LONG).div(200, rounding_mode="floor").repeat(2, 1) + 1
    numbers[0, LONG - 30 :] = numbers[1, :20] = 0  # queries that see nothing
    numbers[1, 300:320] = 1  # a document again
    inputs = [*(torch.randn(2, 2, LONG, 4) for _ in range(3)), numbers]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(numbers, *positions()))

    (node,) = (node for node in nodes_of(attend, inputs) if node.target == OURS)
    assert len(node.args[-1]) == (not is_known)
    if name in BANDS:
        assert (node.args[3], node.args[5]) == ([], BANDS[name])
    elif is_known or name in ("biased", "rows that see nothing"):  # what is not known is added, as a bias is
        assert_equals_torch(attend, inputs, num=3, **CLOSE)


def bands(attend: Any, length: int, rows: int = 2) -> list[Any]:
    """The bands of the attention that is ours in a capture."""
    nodes = nodes_of(attend, [torch.empty(rows, 2, length, 4, device="meta")] * 3)
    return [node.args[5] for node in nodes if node.target == OURS and not node.args[-1]]


BY_PLACES = ["window", "one in all", "upper triangle", "some keys", "not itself"]


@pytest.mark.parametrize("name", BY_PLACES)
def test_comparisons_of_places_are_known_without_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, is_known = MASKS[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(torch.empty(0), *positions()))

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
    "of queries": (2, 1, LONG, 1),
    "of two dims": (LONG, LONG),
    "of heads alone": (4, 1, 1),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_has_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, LONG, 4), torch.randn(2, 2, LONG, 4), torch.randn(2, 2, LONG, 3)]
    numbers = torch.randn(BIASES[name])
    inputs.append(numbers.masked_fill(torch.rand(numbers.shape) < 0.1, -math.inf) if numbers.shape[-2] > 1 else numbers)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=0.3 * bias, scale=0.7, enable_gqa=True)

    assert biases_of(nodes_of(attend, inputs)) == [1]
    for found, wanted in both(attend, inputs, num=4):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-5 * float(wanted.abs().max()) + 2e-5)


def test_a_bias_that_pytorch_refuses_is_refused() -> None:
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    for mask, said in ((torch.zeros(LONG, LONG).half(), "attn_mask dtype"), (torch.zeros(LONG, 7), "must match|broad")):
        for run in (attend, ts.jax_jit(attend)):
            with pytest.raises(RuntimeError, match=said):
                run(torch.randn(1, 2, LONG, 4), mask)


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


class Attention(torch.nn.Module):
    """Four heads; with options of torch's function, a trained bias for keys, or a triangle where no mask is given."""

    def __init__(self, kv_heads: int = 4, *, is_biased: bool = False, makes_mask: bool = False, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 4 * heads) for heads in (4, kv_heads, kv_heads, 4))
        self.bias = nn.Parameter(torch.randn(1, 4, 1, LONG)) if is_biased else None
        self.makes_mask, self.options = makes_mask, options

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = self.bias if mask is None else mask[:, :, : x.shape[1], : x.shape[1]]
        mask = triangle() if self.makes_mask else mask
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **self.options)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Layers that have these masks in turn, as Hugging Face's models make them."""

    def __init__(self, *masks: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.masks, self.first = masks, torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(Attention(makes_mask=masks == (made,)) for _ in range(4))

    def forward(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        x, masks = self.first(x), [make(is_word) for make in self.masks]
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[number % len(masks)])
        return x


def longer(is_word: torch.Tensor) -> torch.Tensor:
    places = torch.arange(LONG + 5)
    return (places[None, :] <= places[:, None]).expand(2, 1, -1, -1)


def near(is_word: torch.Tensor) -> torch.Tensor:
    i, j = positions()
    return ((j - i).abs() <= 40).expand(2, 1, LONG, LONG)


def made(is_word: torch.Tensor) -> None:
    """By each layer."""


def words(is_word: torch.Tensor) -> torch.Tensor:
    return keys(is_word).expand(2, 1, LONG, LONG)


@pytest.mark.parametrize(
    ("masks", "dtype", "turns"),
    [((words, near), None, 2), ((longer,), torch.bfloat16, 4), ((made,), torch.bfloat16, 4)],
    ids=["in turn", "given", "made"],
)
def test_layers_in_a_loop_know_their_masks(masks: Any, dtype: torch.dtype | None, turns: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, LONG, 16), torch.arange(LONG)[None, :] < torch.tensor([[LONG - 60], [0]])
    loss_fn = lambda model, batch: model(*batch).square().mean()  # noqa: E731
    step = step_of(Model(*masks), loss_fn, mesh=make_mesh((2, 1)), compute_dtype=dtype, scan_layers=True)
    lowered = step.lower(step.structs, batch).as_text(debug_info=True)
    assert [loop.num_iterations for loop in step.programs[0].loops] == [turns, turns]
    assert "/attention/" in lowered
    assert "softmax" not in lowered
    if dtype is None:
        step.prove(step.init(), batch).raise_if_different()


def test_heads_over_a_mesh_cost_no_more_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's split, heads over `model`: the forward pass sums once over `model`, the backward pass once."""
    compiled = attention_step()
    assert "/attention/" in compiled.as_text()
    ours = count_collectives(compiled)
    monkeypatch.setattr("torch_shard._lowering.ops.attention.SHORTEST", LONG + 1)
    assert ours == count_collectives(attention_step())


def attention_step() -> Any:
    """The optimised program of a training step."""
    rules = {f"{name}.{part}": P("model") for name in "qkv" for part in ("weight", "bias")}
    plan = ts.ShardingPlan({**rules, "o.weight": P(None, "model")}, default=P())
    torch.manual_seed(0)
    step = step_of(Attention(is_causal=True), plan=plan)
    return step.lower(step.init(), torch.randn(8, LONG, 16)).compile()


def test_dropout_drops_in_blocks_what_it_drops_of_all_weights() -> None:
    torch.manual_seed(0)
    layers = [Attention(2, dropout_p=0.3, is_biased=True) for _ in range(3)]
    model, x = nn.Sequential(nn.Linear(16, 16), *layers), torch.randn(2, LONG, 16)
    step = step_of(model, lambda model, x: weighted(model(x)), mesh=make_mesh((2, 2)), remat="block")
    assert f"{LONG}x{LONG}x" not in step.lower(step.structs, x).as_text()  # no weights as a whole
    step.prove(step.init(seed=3), x).raise_if_different()  # eager torch draws by the key of the step


@pytest.mark.slow
def test_a_gradient_of_a_gradient_drops_the_same_weights() -> None:
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            leaf = x.requires_grad_()
            return torch.autograd.grad(weighted(model(leaf).square()), leaf, create_graph=True)[0].square().sum()

    torch.manual_seed(0)
    step = step_of(Attention(2, dropout_p=0.3, is_causal=True), penalty, mesh=make_mesh((1, 1)))
    step.prove(step.init(), torch.randn(1, LONG, 16)).raise_if_different()


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
