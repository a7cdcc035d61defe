"""Wrong numbers that other libraries have had of attention, experts and pipelines: each is a case here, by its issue.

Every gradient is compared with that of eager torch, and not the loss alone: most of these left the loss as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import torch_shard as ts
from tests.oracles.eager import record_grads
from tests.oracles.experts import any_grouped_mm
from tests.train import test_pipeline
from torch_shard._lowering.ops import expert_dispatch

EXACT = 1e-10  # of the largest entry: float64 sums in another order
ROWS, LENGTH, HEADS, WIDTH = 2, 32, 8, 8
Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.manual_seed(0)
    with jax.enable_x64(True), any_grouped_mm():
        yield


def step_of(model: nn.Module, loss_fn: Any, mesh: Any, plan: ts.ShardingPlan, **options: Any) -> ts.TrainStep:
    """A step that keeps the gradients, and leaves the parameters as they are."""
    optimizer = optax.chain(record_grads(), optax.scale(0.0))
    return ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan, **options)


def run(step: ts.TrainStep, batch: Batch) -> dict[str, np.ndarray]:
    """Loss, metrics and gradients of a step."""
    state, metrics = step(step.init(seed=0), batch)
    found = {name: np.asarray(metrics[name], np.float64) for name in metrics}
    return found | {f"gradient of {name}": np.asarray(grad, np.float64) for name, grad in state.opt_state[0].items()}


def eager(model: nn.Module, loss_fn: Any, batch: Batch) -> dict[str, np.ndarray]:
    """The same of eager torch."""
    model.zero_grad()
    loss, metrics = loss_fn(model, batch)
    loss.backward()
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {name: value.detach().numpy().copy() for name, value in {"loss": loss, **metrics, **grads}.items()}  # pyright: ignore


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error, of the largest entry; NaN where there is one."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def check(step: ts.TrainStep, batch: Batch, rtol: float = EXACT) -> None:
    """All that a step gives is what eager torch gives."""
    found, wanted = run(step, batch), eager(step.model, step.loss_fn, batch)
    for name, value in wanted.items():
        assert far(found[name], value) < rtol, (name, far(found[name], value))


# Attention over a sequence that is split


class Attention(nn.Module):
    """Queries, keys and values are rows of tables, so that the gradients of these are dQ, dK and dV."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Embedding(ROWS * LENGTH, HEADS * WIDTH) for _ in range(3))

    def forward(self, places: torch.Tensor, mask: Any = None, causal: bool = True) -> torch.Tensor:
        q, k, v = (table(places).unflatten(-1, (HEADS, -1)).transpose(1, 2) for table in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None)
        return out.transpose(1, 2).flatten(2)


def places() -> torch.Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)


def weighted(model: nn.Module, batch: Batch, **how: Any) -> tuple[torch.Tensor, Batch]:
    out = model(batch["places"], **how)
    return (out.to(batch["grad"].dtype) * batch["grad"]).sum(), {"out": out}


def split(model: nn.Module, loss_fn: Any, mode: Any, num: int = 8, **options: Any) -> ts.TrainStep:
    mesh = ts.make_mesh(jax.devices()[:num], context=num)
    plan = ts.plans.fsdp_tp(model, mesh, fsdp=None, tp=None, context="context", context_mode=mode)
    return step_of(model, loss_fn, mesh, plan, **options)


def numbers(dtype: torch.dtype = torch.float64) -> Batch:
    return {"places": places(), "grad": torch.randn(ROWS, LENGTH, HEADS * WIDTH, dtype=torch.float64).to(dtype)}


def test_ring_flash_attention_42_errors_do_not_grow_with_the_ring() -> None:
    """And flash-attention#2723: sums are of float32, so that dQ, too, is rounded to bfloat16 once, at the end."""
    model, batch = Attention(), numbers()
    batch["grad"] = batch["grad"].bfloat16().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    short, long = (run(split(model, weighted, "ring", num, compute_dtype=torch.bfloat16), batch) for num in (2, 8))
    wanted = eager(model.double(), weighted, {**batch, "grad": batch["grad"].double()})
    norm = np.linalg.norm
    for name in ("out", *(f"gradient of {table}.weight" for table in "qkv")):
        errors = [norm(found[name] - wanted[name]) / norm(wanted[name]) for found in (short, long)]
        assert errors[1] < 1.1 * errors[0]
        assert max(errors) < 2**-8  # one step of bfloat16: weights are rounded, then results


@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
def test_transformer_engine_1557_gradients_of_q_k_and_v_and_easy_context_14_large_logits(mode: str) -> None:
    """Of about 1e4, and apart by about one, so that their exponentials overflow and their softmax is smooth."""
    model = Attention().double()
    step = split(model, weighted, mode)
    check(step, numbers())
    with torch.no_grad():
        for table, size in ((model.q, 100), (model.k, 300)):
            table.weight.view(-1, HEADS, WIDTH)[..., 0] = size
    check(step, numbers(), rtol=1e-8)  # of 1e4, float64 keeps 1e-12; times 300


AT = torch.arange(LENGTH)
MASKS: Mapping[str, torch.Tensor] = {
    "window": (AT[:, None] - AT).abs() < 5,
    "prefix": (AT < 12) | (AT[:, None] >= AT),
    "any": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) + torch.eye(LENGTH) > 0.5,
    "of numbers": -0.1 * (AT[:, None] - AT).abs().double(),
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [("gather", "window"), ("ring", "prefix"), ("heads", "of numbers"), ("ring", "any"), ("ring", "none")],
)
def test_accelerate_masks_other_than_causal(mode: str, name: str) -> None:
    """And without a mask: pytorch#141429."""

    def masked(model: nn.Module, batch: Batch) -> Any:
        return weighted(model, batch, mask=MASKS.get(name), causal=False)

    check(split(Attention().double(), masked, mode), numbers())


# Experts over devices

TOKENS, EXPERTS = 32, 8


class Mixture(nn.Module):
    """Experts of transformers behind a router, whose choice the batch may push, as that of DeepSeek is."""

    def __init__(self, kind: Any = MixtralExperts, implementation: str = "grouped_mm", choices: int = 3) -> None:
        super().__init__()
        config = GptOssConfig(
            hidden_size=WIDTH,
            intermediate_size=12,
            num_local_experts=EXPERTS,
            experts_implementation=implementation,
        )
        self.choices = choices
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 4)
        self.experts = kind(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.double()

    def forward(self, x: torch.Tensor, push: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scores = self.router(x).softmax(-1)
        chosen = (scores.detach() + push).topk(self.choices).indices
        return self.last(x + self.experts(x, chosen, scores.gather(1, chosen)))


def mixed(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    out = model(batch["x"], batch["push"])
    return (out * batch["grad"]).sum() / len(out), {"out": out}


def tokens(push: torch.Tensor | None = None, num: int = TOKENS) -> Batch:
    draw: dict[str, Any] = {"dtype": torch.float64}
    push = torch.zeros(num, EXPERTS, **draw) if push is None else push.double()
    return {"x": torch.randn(num, WIDTH, **draw), "push": push, "grad": torch.randn(num, 4, **draw)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are sent to experts over axes of the batch, though these are small; what nobody writes is NaN."""
    monkeypatch.setattr(expert_dispatch.Exchange, "moves_tokens", lambda *_: True)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


FEATURES = {"experts.gate_up_proj": P(None, None, "model"), "experts.gate_up_proj_bias": P(None, "model")}
FEATURES |= {"experts.down_proj": P(None, "model", None)}
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, int], Callable[[Any, Any], ts.ShardingPlan]]] = {
    "transformers#45473, scores paired with other experts": (
        {"kind": GptOssExperts},
        {"batch": 2, "model": 4},
        lambda model, mesh: ts.plans.expert(model, mesh),
    ),
    "transformers#48687, the gradient of the router": (
        {"implementation": "batched_mm"},
        {"batch": 4, "model": 2},
        lambda model, mesh: ts.plans.expert(model, mesh),
    ),
    "torchtitan#1878, a sum is missing where features are split too": (
        {},
        {"batch": 4, "model": 2},
        lambda model, mesh: ts.plans.expert(model, mesh, ep="batch", tp="model"),
    ),
    "two axes of the batch in the other order, the first of them beside": (
        {"kind": GptOssExperts},
        {"model": 2, "batch": 4},
        lambda model, mesh: ts.plans.expert(model, mesh, ep=("model", "batch")),
    ),
    "torchtitan#4245, as many biases as parts of features": (
        {"kind": GptOssExperts},
        {"batch": 2, "model": 4},
        lambda model, mesh: ts.ShardingPlan(FEATURES, default=P()),
    ),
}


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize("issue", LAYOUTS)
def test_gradients_of_experts_and_of_all_else(issue: str) -> None:
    fields, sizes, plan = LAYOUTS[issue]
    model, mesh = Mixture(**fields), ts.make_mesh(**sizes)  # pyright: ignore
    check(step_of(model, mixed, mesh, plan(model, mesh)), tokens())


ONE = torch.eye(EXPERTS)
ROUTES = {
    "as they come": torch.zeros(TOKENS, EXPERTS),
    "all to one, and others": 9 * ONE[5].expand(TOKENS, -1),
    "all to three": 9 * ONE[:3].sum(0).expand(TOKENS, -1),
    "those of a device to each device": 9 * ONE[torch.arange(TOKENS) // 4],
    "none to the last": -9 * ONE[7].expand(TOKENS, -1),
}


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize("kind", [MixtralExperts, GptOssExperts])
def test_rows_that_nobody_writes_are_not_read(kind: Any) -> None:
    """maxtext#4905, marin#8578 and marin#8077: such rows hold NaN here. One program is for all routes."""
    model, mesh = Mixture(kind), ts.make_mesh(batch=4, model=2)
    step = step_of(model, mixed, mesh, ts.plans.expert(model, mesh, ep=("batch", "model")))
    assert "all_to_all" in step.lower(step.structs, tokens()).as_text()
    for push in ROUTES.values():
        check(step, tokens(push))
    assert step.num_compiles == 1
    check(step, tokens(num=4))  # fewer tokens than experts, one on each device
    assert step.num_compiles == 2


def test_maxtext_1039_and_971_what_is_kept_and_computed_again() -> None:
    """`"dots"` keeps what backward needs of products, the wide one of two; `"block"` nothing but inputs of layers."""
    num, layers, width, length = 8, 4, 64, 32
    runs, wide = (num + 1) * layers, 2 * width * length  # of layers on a device, in nine ticks; entries
    batch = {name: ids[:, :1].expand(num, length) for name, ids in test_pipeline.batch_of(1).items()}
    found = {}
    for remat in ("none", "dots", "block"):
        step = test_pipeline.step_of(
            test_pipeline.Tower(2 * layers, width),
            test_pipeline.staged(schedule="gpipe"),
            num,
            lambda model, batch: test_pipeline.loss_fn(model, batch)[0],
            mesh=ts.make_mesh(jax.devices()[:2], stage=2),
            batch_spec=P(),
            remat=remat,
        )
        step(step.init(seed=0), batch)
        found[remat] = step.programs[0]
    none, dots, block = ((program.memory.temporaries, program.num_flops) for program in found.values())
    assert dots[0] - block[0] == pytest.approx(4 * runs * wide, rel=0.05)  # but for what is alive beside them
    assert none[0] - block[0] > 1.4 * (dots[0] - block[0])  # and the values between products
    assert dots[1] == none[1] == block[1] - 2 * runs * wide * width
