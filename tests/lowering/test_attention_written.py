"""Attention that HF's models write out, with soft caps and sinks, against itself in eager torch."""

import functools
from typing import Any

import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import torch_shard as ts
from tests.oracles.derivatives import both, second
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._lowering.ops import attention_kernels
from torch_shard._lowering.ops.attention import SHORTEST

CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums of some hundred terms in another order
LONG = SHORTEST + 44
WRITTEN = {"gemma2": modeling_gemma2, "gpt_oss": modeling_gpt_oss}
SQUARE = f"{LONG}x{LONG}x"


def band(window: int = LONG, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    places = torch.arange(LONG)
    near = (places[None, :] <= places[:, None]) & (places[:, None] - places[None, :] < window)
    return torch.zeros(1, 1, LONG, LONG, dtype=dtype).masked_fill(~near, torch.finfo(dtype).min)


class Attention(nn.Module):
    """Queries of four heads, keys and values of two, in what it is given."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.head_dim, self.num_key_value_groups = 4, 2
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, qkv: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (x.transpose(1, 2) for x in qkv.unflatten(-1, (8, 4)).split([4, 2, 2], 2))
        own = {"softcap": 1.5} if self.kind == "gemma2" else {}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", WRITTEN[self.kind].eager_attention_forward)
        return attend(self, q, k, v, mask, **{"dropout": 0.0, "scaling": 0.6, **own, **self.options})


MASKS = {"causal": band, "window": lambda: band(30), "none": lambda: None}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", WRITTEN)
def test_value_and_gradients_equal_eager_torch(kind: str, mask: str) -> None:
    torch.manual_seed(0)
    model, given = Attention(kind), MASKS[mask]()

    def attend(x: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"sinks": sinks}, (x, given))[0]

    for ours, theirs in both(attend, [2 * torch.randn(2, LONG, 32), model.sinks.detach()]):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5 * max(1, theirs.abs().max().item()))


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_gradient_of_a_gradient_equals_eager_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = Attention(kind)
    found, wanted = second(lambda x: model(x, band())[0], torch.randn(1, LONG, 32))
    torch.testing.assert_close(
        found, wanted, rtol=CLOSE["rtol"], atol=5e-5
    )  # twice the sums of float32 in another order


def loss_of(model: Attention, batch: Any) -> torch.Tensor:
    x, keys = batch
    x = x * model.sinks[0]  # some models have no other parameter
    mask = band(dtype=x.dtype)
    if model.training and "padded" in model.options:
        mask = mask.masked_fill(~keys[:, None, None, :], torch.finfo(x.dtype).min)
    out, weights = model(x, mask)
    return out.square().mean() + (weights.amax() if "weights" in model.options and weights is not None else 0)


@pytest.mark.parametrize(
    ("kind", "options", "kernels", "says"),
    [
        ("gemma2", {}, 3, ""),  # forward, and both of the backward pass
        ("gpt_oss", {}, 3, ""),
        ("gpt_oss", {"weights": True}, 3, "it is written out"),  # the weights alone
        ("gemma2", {"padded": True}, 0, "its mask is no constant triangle or window, but depends on the batch"),
        ("gpt_oss", {"dropout": 0.1}, 0, "it drops weights (dropout=0.1) and is written out"),
        ("gemma2", {"scaling": torch.tensor(0.5)}, 0, "are not as kernels take them"),
    ],
)
def test_what_is_known_has_the_kernel_and_what_stays_says_why(kind: str, options: Any, kernels: int, says: str) -> None:
    step = step_of(
        Attention(kind, **options),
        loss_of,
        mesh=ts.make_mesh(topology="v5e:2x2", batch=2, model=2),
        compute_dtype=torch.bfloat16,
        mixed_precision="autocast",  # the model has no products but attention's
    )
    batch = torch.empty(4, LONG, 32, device="meta"), torch.empty(4, LONG, dtype=torch.bool, device="meta")
    text = step.lower(step.structs, batch).as_text()
    assert text.count("@tpu_custom_call") == kernels
    assert (SQUARE in text) == bool(options)
    assert says in step.report()
    assert ("attention" in step.report()) == bool(says)


def test_a_model_follows_eager_torch() -> None:
    """Unmodified, with the window of every other layer; three of them are captured each by itself."""
    config = transformers.Gemma2Config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        vocab_size=32,
        sliding_window=100,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
    )
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM._from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    tokens = torch.randint(0, 32, (2, LONG))

    def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    step = agrees_with_torch(model, loss_fn, [tokens], (1, 1), atol=1e-4)  # gradients of up to a hundred
    assert SQUARE not in step.lower(step.structs, tokens).as_text()


def test_a_kernel_on_a_mesh_sums_the_gradient_of_its_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splash attention, interpreted: each device has two rows of four and two heads of four."""
    kernel = functools.partial(attention_kernels.splash, interpret=True)
    monkeypatch.setitem(attention_kernels.KERNELS, "cpu", kernel)
    monkeypatch.setattr(attention_kernels, "why_no_kernel", lambda *_, **__: "")
    torch.manual_seed(0)
    model, x = Attention("gpt_oss"), torch.randn(4, LONG, 32)

    def loss_fn(model: Attention, x: torch.Tensor) -> torch.Tensor:
        return (model(x, band(40))[0] * torch.linspace(-1, 2, 16).view(4, 4)).mean(1).sum()

    step = step_of(model, loss_fn, mesh=make_mesh((2, 2)), plan=ts.ShardingPlan({"sinks": P("model")}, default=P()))
    step.prove(step.init(), x).raise_if_different()
