"""Steps whose plan splits the sequence, of models that know nothing of it; the oracle is eager torch."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import torch_shard as ts
from torch_shard._sharding import ContextMode

WORDS, ROWS, LENGTH, WIDTH = 96, 4, 32, 64
Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, heads: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.n1(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, dropout_p=self.dropout)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Written(nn.Module):
    """Attention as softmax and products."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x + (x @ x.mT).softmax(-1) @ x


class Net(nn.Module):
    """A decoder of learned positions, in float64."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(blocks or (Block(),))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def of_net(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Labels are shifted here, so that rows lose a place."""
    words, mask = batch["input_ids"], None
    if (kept := batch.get("attention_mask")) is not None:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & kept.bool()[:, None, None]
    if (documents := batch.get("documents")) is not None:
        same = documents[:, None, :, None] == documents[:, None, None]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & same
    logits = model(words, mask)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()), {"logits": logits}


def of_hf(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    out = model(**batch, labels=batch["input_ids"])
    return out.loss, {"logits": out.logits}


HF: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1}
HF |= {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "net": Net,
    "deep": lambda: Net(Block(), Block(), Block()),
    "written": lambda: Net(Written()),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**HF)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**HF, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**HF, num_local_experts=4)),
}


DOUBLE = ("net", "deep", "written")


@dataclasses.dataclass(frozen=True)
class Case:
    model: str = "net"
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 2, "context": 4})
    mode: Any = "gather"
    kind: str = ""
    """Of mask: padding, documents, or causal."""
    plan: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


THREE, ALONE = {"batch": 2, "context": 2, "model": 2}, {"context": 8}
CASES = {
    "gather, padding, three axes, loop, microbatches": Case(
        "deep", THREE, kind="padding", options={"remat": "block", "scan_layers": True, "accumulate_steps": 2}
    ),
    "heads, causal, alone": Case(sizes=ALONE, mode="heads"),
    "llama": Case("llama", THREE, kind="padding"),
    "written": Case("written", THREE),
    "gather, documents": Case(kind="documents"),
    "ring, documents": Case(mode="ring", kind="documents"),
    "ring, causal, three axes": Case(sizes=THREE, mode="ring"),
    "heads, documents": Case(mode="heads", kind="documents"),
    "net, sequence": Case(sizes=THREE, plan={"sequence": True}),
    "net, loop, ring": Case(
        "deep", mode="ring", options={"remat": "block", "scan_layers": True, "accumulate_steps": 2}
    ),
    **{
        f"{name}, {mode}, {kind or 'causal'}": Case(name, THREE, mode, kind)
        for name, mode, kind in (("gemma2", "ring", ""), ("mixtral", "gather", "padding"))
    },
}


def make_batch(kind: str) -> Batch:
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=draw)
    ends, places = torch.tensor([[LENGTH], [20], [28], [9]]), torch.arange(LENGTH)
    more = {"padding": {"attention_mask": (places < ends).long()}, "documents": {"documents": (places // 10 + ends)}}
    return {"input_ids": words, **more.get(kind, {})}


def make_step(case: Case, model: nn.Module) -> ts.TrainStep:
    axes: dict[str, Any] = {
        "fsdp": "batch" if "batch" in case.sizes else None,
        "tp": "model" if "model" in case.sizes else None,
    }
    sizes: dict[str, Any] = {**case.sizes}
    mesh = ts.make_mesh(**sizes)
    plan = ts.plans.fsdp_tp(model, mesh, **axes, context="context", context_mode=case.mode, **case.plan)
    loss_fn = of_net if case.model in DOUBLE else of_hf
    return ts.make_train_step(model, loss_fn, optax.sgd(1.0), mesh=mesh, plan=plan, **case.options)


def check(case: Case) -> None:
    """Loss, logits and every gradient, as a step of SGD shows it, against eager torch."""
    torch.manual_seed(0)
    model = MODELS[case.model]()
    if case.model != "mixtral":  # whose grouped products PyTorch has in float32 alone
        model = model.double()
    # In float64; Hugging Face's norms, rotations and losses are float32 there too, and parameters that are read off
    # after a step of SGD round at 1, where gradients of norms are a thousandth.
    rtol = 1e-10 if case.model in DOUBLE else 2e-4 if case.model == "mixtral" else 2e-6
    step, batch = make_step(case, model), make_batch(case.kind)
    alone = copy.deepcopy(model)
    state, metrics = step(step.init(seed=0), batch)
    loss, outputs = (of_net if case.model in DOUBLE else of_hf)(alone, batch)
    loss.backward()
    np.testing.assert_allclose(float(metrics["loss"]), float(loss.detach()), rtol=rtol)
    logits, wanted = np.asarray(metrics["logits"]), outputs["logits"].detach()
    num = case.options.get("accumulate_steps", 1)  # microbatches take the rows of each shard in turn
    order = np.arange(ROWS).reshape(-1, num, 1).swapaxes(0, 1).reshape(-1) if num > 1 else np.arange(ROWS)
    np.testing.assert_allclose(logits.reshape(wanted.shape), wanted[order], rtol=rtol, atol=rtol)
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        found = parameter.detach() - torch.tensor(np.asarray(state.params[name]))
        size = float(parameter.grad.abs().max().clamp(min=1e-6))  # those of biases of keys are rounding
        error = float((found - parameter.grad).abs().max()) / size
        assert error < rtol, (name, error)


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_eager_torch(case: Case) -> None:
    check(case)


def test_batches_and_parameters_are_split_over_the_context() -> None:
    step = make_step(Case(), Net())
    placed = step.put({**make_batch("padding"), "row": torch.ones(ROWS), "other": torch.ones(ROWS, 5, 3)})
    specs = dict(zip(sorted(["attention_mask", "input_ids", "row", "other"]), placed.arrays, strict=True))
    assert {name: tuple(array.sharding.shard_shape(array.shape)) for name, array in specs.items()} == {
        "attention_mask": (2, 8),
        "input_ids": (2, 8),
        "row": (2,),
        "other": (2, 5, 3),
    }
    state = step.init(seed=0)
    shard = state.params["layers.0.up.weight"].addressable_shards[0].data
    assert shard.size * 8 == 2 * WIDTH * WIDTH


def test_the_report_says_how_keys_are_found() -> None:
    step = make_step(Case("net", mode="ring"), Net())
    step.lower(step.structs, make_batch(""))
    assert "The sequence is split over context=4, in order" in step.report()
    assert "context_mode='ring'" in step.report()
    assert "under its causal mask devices exchange half of their queries, keys and values, and so" in step.report()

    step = make_step(Case("net"), Net())
    step.lower(step.structs, make_batch(""))
    assert "devices keep the queries that they have: without a kernel they compute what a mask hides" in step.report()


BAD: Mapping[str, tuple[Callable[[], object], str]] = {
    "an axis twice": (
        lambda: ts.plans.fsdp_tp(Net(), ts.make_mesh(batch=8), tp=None, context="batch"),
        'plans.fsdp_tp: on the mesh .batch=8.: axis "batch" is given twice',
    ),
    "no such axis": (
        lambda: ts.plans.fsdp_tp(Net(), ts.make_mesh(batch=8), tp=None, context="contxt"),
        'plans.fsdp_tp: on the mesh .batch=8.: context="contxt" names no axis of it',
    ),
    "no such mode": (
        lambda: make_step(Case(mode="rings"), Net()),
        'plans.fsdp_tp: mode of the context must be one of "gather", "heads", "ring", got \'rings\'',
    ),
    "heads that do not divide": (
        lambda: make_step(Case(mode="heads", sizes=ALONE), Net(Block(heads=4), Block(heads=4))),
        'context_mode="heads" gives each device whole heads, and 4 heads of .* are not a multiple of context=8',
    ),
    "a plan for another mesh": (
        lambda: ts.make_train_step(
            Net(),
            of_net,
            optax.sgd(1.0),
            mesh=ts.make_mesh(batch=8),
            plan=ts.ShardingPlan({}, default=P(), context=ts.Context("context")),
        ),
        'context: the mesh .batch=8. has no axis "context"',
    ),
    "rows over the axis of the sequence": (
        lambda: make_step(Case(options={"batch_spec": P(("batch", "context"))}), Net()),
        r"batch_spec P\(\('batch', 'context'\)\) splits rows over 'context', over which the plan",
    ),
    "a sequence that does not divide": (
        lambda: step_on({"input_ids": torch.ones(ROWS, 30, dtype=torch.int64)}),
        "dim 1 = 30 is not a multiple of context=4.*Pad sequences",
    ),
    "lengths that differ": (
        lambda: step_on({"input_ids": torch.ones(ROWS, 32).long(), "labels": torch.ones(ROWS, 16).long()}),
        r"do not say with one voice how long it is, .*\(4, 16\), \(4, 32\).*batch_spec=",
    ),
    "attention that is written out": (
        lambda: step_on(make_batch(""), Net(Written(), Written()), mode="ring"),
        "context_mode='ring' is .* not for what is written out .*layers.0.*attn_implementation=\"sdpa\"",
    ),
}


def step_on(batch: Batch, model: nn.Module | None = None, mode: ContextMode = "gather") -> object:
    step = make_step(Case(mode=mode), model or Net())
    return step.lower(step.structs, batch)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_our_words(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        make()
