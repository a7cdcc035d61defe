"""HF's experts as one operator: against HF's own in eager torch, and what the TPU's compiler makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

import torch_shard as ts
from tests.oracles.collectives import collectives_of
from tests.oracles.derivatives import assert_equals_torch, second, weighted
from tests.oracles.graphs import targets_of
from tests.oracles.steps import step_of
from torch_shard._lowering.ops import expert_blocks, expert_dispatch

CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of up to 16 terms in another order
TOKENS, WIDTH, EXPERTS = 24, 8, 4

OURS = torch.ops.torch_shard.experts.default


@pytest.fixture(autouse=True)
def rows_that_nobody_writes_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they may be on TPUs and GPUs; on CPUs they would be zero, which hides that they are read."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the few rows of these tests."""
    monkeypatch.setattr(expert_blocks, "WORTH", expert_blocks.SMALLEST)


ROUTES = {
    "spread": lambda: torch.rand(TOKENS, EXPERTS).topk(2).indices,
    "one has none": lambda: torch.rand(TOKENS, EXPERTS - 1).topk(2).indices,
    "one has all": lambda: torch.full((TOKENS, 1), 2),
    "uneven": lambda: (torch.arange(TOKENS) > 16).long()[:, None] * 3,
}


KINDS: dict[str, Any] = {
    "plain": (MixtralExperts, transformers.MixtralConfig),
    "interleaved": (GptOssExperts, transformers.GptOssConfig),
    "in halves": (OpenAIPrivacyFilterExperts, transformers.GptOssConfig),
}


def make_experts(kind: str = "plain", **fields: Any) -> torch.nn.Module:
    """Other kinds have biases and transposed matrices, and many of their inner values are clamped."""
    experts_of, config_of = KINDS[kind]
    sizes = {"hidden_size": WIDTH, "intermediate_size": 12, "num_local_experts": EXPERTS}
    config = config_of(**{**sizes, **fields}, experts_implementation="grouped_mm")
    torch.manual_seed(0)
    experts = experts_of(config)
    experts.limit = 1.25
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def check(experts: torch.nn.Module, *ids: torch.Tensor) -> None:
    """Results and gradients by tokens, weights and matrices are torch's; `ids` and weights are given, or none."""
    weights, names = [torch.rand(each.shape) for each in ids], [name for name, _ in experts.named_parameters()]

    def fn(x: torch.Tensor, *values: torch.Tensor) -> Any:
        held = dict(zip(names, values[len(ids) :], strict=True))
        return torch.func.functional_call(experts, held, (x, *ids, *values[: len(ids)]))

    given = [torch.randn(TOKENS, WIDTH), *weights, *(p.detach() for p in experts.parameters())]
    if not isinstance(getattr(experts, "act_fn", None), torch.nn.ReLU):
        assert OURS in targets_of(lambda *args: weighted(fn(*args)), given)
    assert_equals_torch(fn, given, **CLOSE)


@pytest.mark.parametrize(
    ("route", "act"), [("uneven", "silu"), ("one has none", "silu"), ("one has all", "gelu"), ("spread", "relu")]
)
def test_value_and_gradients_equal_eager_torch(route: str, act: str) -> None:
    check(make_experts(hidden_act=act), ROUTES[route]())


@pytest.mark.parametrize(
    ("kind", "route"), [("interleaved", "uneven"), ("interleaved", "one has none"), ("in halves", "one has all")]
)
def test_biases_and_clamped_gates_equal_eager_torch(kind: str, route: str) -> None:
    check(make_experts(kind), ROUTES[route]())


def test_tokens_in_pieces() -> None:
    """Of a parameter that is stored in pieces, which elementwise operators keep apart, as they do all others."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.experts = torch.nn.Parameter(torch.rand(WIDTH)), make_experts("interleaved")

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.experts(x * self.scale, ids, weights)

    model, ids = Scaled(), ROUTES["spread"]()
    batch = torch.randn(TOKENS, WIDTH), ids, torch.rand(ids.shape)
    rules = {"experts.gate_up_proj": P("model"), "experts.down_proj": P("model")}
    plan = ts.ShardingPlan(rules, default=P(), stored={"scale": ts.Pieces(2, dim=0)})
    ts.prove(
        model,
        lambda model, batch: model(*batch).square().mean(),
        batch,
        plans={"pieces": plan},
        meshes=ts.make_mesh(batch=2, model=2),
        steps=1,
    ).raise_if_different()


def test_other_experts_stay_as_they_are() -> None:
    class Other(GptOssExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up[..., ::2] * gate_up[..., 1::2]

    experts = make_experts("interleaved")
    experts.__class__ = Other
    ids = ROUTES["spread"]()
    given = [torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)]
    assert OURS not in targets_of(lambda x, weights: experts(x, ids, weights), given)


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_tokens_of_no_expert_get_nothing(kind: str) -> None:
    experts, ids = make_experts(kind), torch.arange(TOKENS)[:, None] % (EXPERTS + 1)
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)
    out = ts.jax_jit(lambda x, weights: experts(x, ids, weights))(x, weights).cpu()
    assert not out[EXPERTS :: EXPERTS + 1].any()
    kept = ids[:, 0] < EXPERTS
    torch.testing.assert_close(out[kept], experts(x[kept], ids[kept], weights[kept]).detach(), **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_derivative_of_a_derivative(kind: str) -> None:
    experts, ids = make_experts(kind), ROUTES["spread"]()
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)

    found, wanted = second(lambda x: experts(x, ids, weights), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())  # cubic in the weights


@pytest.mark.slow
def test_arithmetic_on_a_tpu_does_not_grow_with_the_number_of_experts() -> None:
    with torch.device("meta"):
        experts = make_experts(hidden_size=128, intermediate_size=256, num_local_experts=16)
        batch = torch.empty(4096, 128), torch.empty(4096, 2, dtype=torch.int64), torch.empty(4096, 2)
    mesh, plan = ts.make_mesh(topology="v5e:2x2", batch=2, model=2), ts.ShardingPlan({"*": P("model")}, default=P())
    step = step_of(experts, lambda experts, batch: experts(*batch).square().mean(), mesh=mesh, plan=plan)
    flops = sum(module.flops for module in step.preview(batch).modules)
    slots_here, products = 2048 * 2 / 2, 3 + 2 + 6  # forward, again the first, gradients; of D by F each
    needed = 2 * slots_here * products * 128 * 256
    assert needed <= flops <= 1.3 * needed  # half a block more of each expert


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_autocast_takes_them_as_products(kind: str) -> None:
    experts, ids = make_experts(kind), ROUTES["spread"]()
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)

    def loss_fn(experts: Any, x: torch.Tensor) -> torch.Tensor:
        return experts(x, ids, weights).float().square().mean()

    wanted = loss_fn(experts, x).item()
    step = step_of(experts, loss_fn, mesh=(1, 1), compute_dtype=torch.bfloat16)
    state = step.init()
    text = step.lower(state, x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
    assert products
    assert not [line for line in products if "xf32>, tensor" in line]
    assert float(step(state, x)[1]["loss"]) == pytest.approx(wanted, rel=2**-6)  # bfloat16


def test_a_loop_gathers_the_experts_of_one_layer_and_not_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TPU's compiler, which took the whole stack to every device, in each iteration."""
    monkeypatch.setattr(expert_dispatch.Exchange, "moves_tokens", lambda *_: False)  # nothing would be gathered
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        num_experts=16,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model, tokens = transformers.Qwen3MoeForCausalLM(config), torch.empty(8, 16, dtype=torch.int64)
    mesh = ts.make_mesh(topology="v5e:2x4", batch=4, model=2)
    step = step_of(
        model,
        lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        mesh=mesh,
        plan=ts.plans.fsdp_tp(model, mesh),
        compute_dtype=torch.bfloat16,
        scan_layers=True,
    )
    found = collectives_of(step.preview(tokens).compiled)
    gathered = [size for each in found if each.kind == "all-gather" for size in each.sizes]
    assert 0 < max(gathered) <= 16 * 64 * 32  # of one layer, the gates and values of half of the features


def test_gradients_of_wide_biases_beside_narrow_matrices_are_not_rounded() -> None:
    """As under autocast, which takes products in bfloat16 and biases as they are."""
    wide, narrow = jnp.float32, jnp.bfloat16
    ids = jnp.zeros((TOKENS, 1), jnp.int32)
    grad = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    weights, x = jnp.ones((TOKENS, 1)), jnp.ones((TOKENS, WIDTH))
    shapes = [((1, 24, WIDTH), narrow), ((1, WIDTH, 12), narrow), ((1, 24), wide), ((1, WIDTH), wide)]
    tensors = (x, weights, *(jnp.ones(shape, dtype) for shape, dtype in shapes))
    slots = expert_blocks.sort_slots(ids, 0, 1, 1)
    *_, of_bias = expert_blocks.experts_backward(grad, tensors, slots, expert_blocks.Gate("silu"))
    expected = grad.astype(narrow).astype(wide).sum(0)
    np.testing.assert_allclose(of_bias[0], expected, rtol=1e-6)  # a sum of 24 terms in another order
