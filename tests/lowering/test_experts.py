"""HF's experts as one operator: against HF's own in eager torch, and what the TPU's compiler makes of them."""

import functools
from typing import Any

import optax
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import torch_shard as ts

CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of up to 16 terms in another order
TOKENS, WIDTH, EXPERTS = 24, 8, 4

ROUTES = {
    "spread": lambda: torch.rand(TOKENS, EXPERTS).topk(2).indices,
    "one has none": lambda: torch.rand(TOKENS, EXPERTS - 1).topk(2).indices,
    "one has all": lambda: torch.full((TOKENS, 1), 2),
    "uneven": lambda: (torch.arange(TOKENS) > 16).long()[:, None] * 3,
}


def make_experts(**fields: Any) -> MixtralExperts:
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=12,
        num_local_experts=EXPERTS,
        experts_implementation="grouped_mm",
        **fields,
    )
    torch.manual_seed(0)
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def value_and_gradients(experts: MixtralExperts, ids: torch.Tensor) -> tuple[Any, Any]:
    """Ours and HF's: the result, and gradients by tokens, weights and both matrices."""
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)
    wanted = torch.randn(TOKENS, WIDTH)
    names = [name for name, _ in experts.named_parameters()]

    def fn(x: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = dict(zip(names, matrices, strict=True))
        out = torch.func.functional_call(experts, held, (x, ids, weights))
        return (out * wanted).sum(), out

    given = [x, weights, *(p.detach() for p in experts.parameters())]
    (_, out), grads = ts.jax_jit(ts.jax_value_and_grad(fn, argnums=(0, 1, 2, 3), has_aux=True))(*given)
    leaves = [t.clone().requires_grad_() for t in given]
    loss, expected = fn(*leaves)
    return (out.cpu(), *(g.cpu() for g in grads)), (expected.detach(), *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(("route", "act"), [*((r, "silu") for r in ROUTES), ("spread", "gelu"), ("spread", "relu")])
def test_value_and_gradients_equal_eager_torch(route: str, act: str) -> None:
    experts = make_experts(hidden_act=act)
    found, wanted = value_and_gradients(experts, ROUTES[route]())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_tokens_of_no_expert_get_nothing() -> None:
    experts, ids = make_experts(), torch.arange(TOKENS)[:, None] % (EXPERTS + 1)
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)
    out = ts.jax_jit(lambda x, weights: experts(x, ids, weights))(x, weights).cpu()
    assert not out[EXPERTS :: EXPERTS + 1].any()
    kept = ids[:, 0] < EXPERTS
    torch.testing.assert_close(out[kept], experts(x[kept], ids[kept], weights[kept]).detach(), **CLOSE)


def test_derivative_of_a_derivative() -> None:
    experts, ids = make_experts(), ROUTES["spread"]()
    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(experts(x, ids, weights).square().sum(), x, create_graph=True)
        return grad.square().sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(penalty(leaf), leaf)
    found = ts.jax_jit(ts.jax_grad(penalty))(x).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())  # cubic in the weights


@functools.cache
def tpu_preview(kind: str, num_experts: int) -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 128, "num_experts_per_tok": 2}
    of_kind: dict[str, Any] = {
        "Mixtral": {"intermediate_size": 256, "num_local_experts": num_experts},
        "Qwen3Moe": {"moe_intermediate_size": 256, "num_experts": num_experts, "head_dim": 64},
        "DeepseekV3": {"moe_intermediate_size": 256, "n_routed_experts": num_experts, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 0, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16}
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 256},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **of_kind[kind])
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
    rules = {"**.experts.gate_up_proj": P("model"), "**.experts.down_proj": P("model")}
    step = ts.make_train_step(
        model,
        lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        optax.sgd(0.1),
        mesh=ts.make_mesh(topology="v5e:2x2", batch=2, model=2),
        plan=ts.ShardingPlan(rules, default=P()),
    )
    return step.preview(torch.empty(8, 512, dtype=torch.int64, device="meta"))


@pytest.mark.slow  # two compilations for TPUs of half a minute
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_arithmetic_on_a_tpu_does_not_grow_with_the_number_of_experts(kind: str) -> None:
    flops = [sum(m.flops for m in tpu_preview(kind, n).modules if m.path.endswith("mlp.experts")) for n in (4, 16)]
    slots_here, products = 4 * 512 * 2 / 2, 3 + 2 + 6  # forward, again the first, gradients; of D by F each
    needed = 2 * slots_here * products * 128 * 256
    assert needed <= flops[0] <= 1.3 * needed  # half a block more of each expert
    assert flops[1] <= 1.3 * needed


@pytest.mark.parametrize("product", ["experts", "grouped_mm"])
def test_autocast_takes_them_as_products(product: str) -> None:
    experts, ids = make_experts(), ROUTES["spread"]()
    x, weights, ends = torch.randn(TOKENS, WIDTH), torch.rand(ids.shape), torch.tensor([TOKENS] * EXPERTS).int()

    def loss_fn(experts: MixtralExperts, x: torch.Tensor) -> torch.Tensor:
        by_group = torch.nn.functional.grouped_mm
        out = experts(x, ids, weights) if product == "experts" else by_group(x, experts.gate_up_proj.mT, offs=ends)
        return out.float().square().mean()

    options: dict[str, Any] = {"mesh": ts.make_mesh(batch=1), "plan": ts.plans.replicated()}
    step = ts.make_train_step(experts, loss_fn, optax.sgd(0.1), compute_dtype=torch.bfloat16, **options)
    state = step.init()
    text = step.lower(state, x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
    assert products
    assert not [line for line in products if "xf32>, tensor" in line]
    exact = (
        experts(x, ids, weights).square().mean()
        if product == "experts"
        else (x @ experts.gate_up_proj[0].T).square().mean()
    )
    assert float(step(state, x)[1]["loss"]) == pytest.approx(exact.item(), rel=2**-6)  # bfloat16


def test_a_loop_gathers_the_experts_of_one_layer_and_not_the_stack() -> None:
    """Under TPU's compiler, which took the whole stack to every device, in each iteration."""

    def received(layers: int) -> int:
        config = transformers.Qwen3MoeConfig(
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=128,
            num_experts=16,
            num_experts_per_tok=2,
        )
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(config)
        mesh = ts.make_mesh(topology="v5e:2x4", batch=4, model=2)
        step = ts.make_train_step(
            model,
            lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
            optax.sgd(0.1),
            mesh=mesh,
            plan=ts.plans.fsdp_tp(model, mesh),
            compute_dtype=torch.bfloat16,
            scan_layers=True,
        )
        return step.preview(torch.empty(8, 16, dtype=torch.int64, device="meta")).collective_bytes

    assert received(6) <= 3 * received(2)  # it was 5.8 times as much
