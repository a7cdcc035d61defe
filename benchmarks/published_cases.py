"""Steps on TPUs whose times others have published, built as their sources ran them.

Sources: torchprime's nightly runs (`e2e_testing/step_time_bounds.yaml` of June 2025, its `.github/workflows` and
configs), torchax's example, Google's tpu-recipes, and the tables of MaxText's `configs/v5e` and `configs/v5p`, whose
published figure is flops per second: seconds are the flops of their own formula over it.

torchprime: parameters and arithmetic in bfloat16, Adafactor, gradients clipped, each layer computed again.
torchax: by the example in its repository, in bfloat16 with SGD; the settings of its two figures are not said.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from benchmarks import published_kernels as kernels
from benchmarks.published_models import Default, Dropping, Sizes
from benchmarks.tpu_cases import Recipe, TpuCase, hf_llama, next_token_loss, tokens
from benchmarks.tpu_llama import Llama

V6E, V5E, V5P = "TPU v6 lite", "TPU v5 lite", "TPU v5"

ASYNC = (
    "--xla_enable_async_all_gather=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true "
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
)
"""Flags of the compiler that all sources set."""
VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304 "
"""And those for v6e."""

OF_2023 = "sizes are MaxText's defaults of then"
TORCHPRIME = "https://github.com/AI-Hypercomputer/torchprime/blob/main/e2e_testing/step_time_bounds.yaml"
TORCHAX = "https://github.com/pytorch/xla/tree/master/torchax"
TORCHAX_MODELS = "https://github.com/AI-Hypercomputer/torchprime/tree/main/torchprime/experimental/torchax_models"
RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium/Llama3.1-8B-MaxText/v6e-8"
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/0ed7bd529b9d690570473c3525d1efeda6b6c944/MaxText/configs"


@dataclasses.dataclass(frozen=True)
class Published:
    """A step that others timed.

    Attributes:
        title: For the table.
        chip: The kind of its devices.
        seconds: That the source publishes.
        source: Where.
        build: The step; `quick` makes it tiny.
        flags: Of the compiler, in the source.
        unlike: What is not as in the source.
        is_known: Whether the source says with which settings.
    """

    title: str
    chip: str
    seconds: float
    source: str
    build: Callable[[bool], TpuCase]
    flags: str = ASYNC
    unlike: str = ""
    is_known: bool = True


Rules = dict[str, P]

OUT, IN = P("batch", None), P(None, "batch")
"""How torchprime splits matrices (out, in) over `fsdp`: by their rows, or by their columns."""

NORMS: Rules = dict.fromkeys(("model.norm.weight", "model.layers.*.*_layernorm.weight"), P("batch"))
FSDP: Rules = {
    "model.embed_tokens.weight": OUT,
    "lm_head.weight": OUT,
    **{f"model.layers.*.{name}.weight": OUT for name in ("self_attn.q_proj", "self_attn.o_proj")},
    **{f"model.layers.*.{name}.weight": IN for name in ("self_attn.k_proj", "self_attn.v_proj")},
    **{f"model.layers.*.mlp.{name}_proj.weight": OUT for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj.weight": IN,
    **NORMS,
}
FSDP_TP: Rules = {
    "model.embed_tokens.weight": P("batch", "model"),
    "lm_head.weight": P("model", "batch"),
    **{f"model.layers.*.self_attn.{name}_proj.weight": P("model", "batch") for name in "qkv"},
    "model.layers.*.self_attn.o_proj.weight": P("batch", "model"),
    **{f"model.layers.*.mlp.{name}_proj.weight": P("model", "batch") for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj.weight": P("batch", "model"),
    **NORMS,
}
BY_WIDTH = {
    name: P("batch", None, "model")
    for name in (
        "model.layers.*",
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.layers.*.mlp",
        *(f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"),
    )
}
"""What modules return there, with tensor parallelism: the residual stream split by its width, too."""
DROPPING: Rules = {name: spec for name, spec in FSDP.items() if ".mlp." not in name} | {
    "model.layers.*.mlp.gate.weight": IN,
    **{f"model.layers.*.mlp.{name}": P(None, None, "batch") for name in ("w1", "w3")},
    "model.layers.*.mlp.w2": P(None, "batch", None),
}


def rules(given: Rules, activations: Rules | None = None) -> Recipe:
    """A recipe."""
    return lambda model, mesh: ts.ShardingPlan(given, default=P(), activations=activations or {})


def narrow_llama(sizes: Llama, kernel: kernels.Attend, axes: P) -> nn.Module:
    """`LlamaForCausalLM` in bfloat16, with a kernel for its attention."""
    kernels.use(kernel, axes)
    model: Any = hf_llama(sizes).to(torch.bfloat16)
    model.config._attn_implementation = kernels.NAME
    return model


SMALL = Llama(layers=2, width=512, hidden=1024, heads=4, kv_heads=4, vocab=2048)
LLAMA = Llama(layers=32)


def torchprime(
    title: str,
    *,
    axes: dict[str, int] | None = None,
    kernel: kernels.Attend = kernels.flash,
    recipe: Recipe | None = None,
    model: Callable[[Llama, kernels.Attend, P], nn.Module] = narrow_llama,
    sizes: Llama = LLAMA,
) -> Callable[[bool], TpuCase]:
    """Eight rows of 8192 tokens on four chips."""
    split = axes or {"batch": 4}
    return lambda quick: TpuCase(
        title,
        "v6e:2x2",
        split,
        lambda: model(SMALL if quick else sizes, kernel, P(*split)),
        next_token_loss,
        tokens(8, 512 if quick else 8192),
        recipe or rules(FSDP),
        optimizer=optax.adafactor(5e-5, multiply_by_parameter_scale=False),
        options={"remat": "block", "clip_grad_norm": 1.0, "compute_dtype": None},
    )


def dropping_mixtral(sizes: Llama, kernel: kernels.Attend, axes: P) -> nn.Module:
    """The same with experts that drop tokens, as torchprime's Mixtral has them."""
    model: Any = narrow_llama(sizes, kernel, axes)
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.mlp = Dropping(sizes.width, sizes.hidden).to(torch.bfloat16)
    return model


def rows_of(sizes: Llama, topology: str, rows: int, length: int, **options: Any) -> Callable[[bool], TpuCase]:
    """A Llama with float32 parameters and AdamW, fully sharded, so many rows."""
    chips = {"batch": 8 if topology == "v6e:2x4" else 4}
    return lambda quick: TpuCase(
        topology,
        topology,
        chips,
        lambda: hf_llama(SMALL if quick else sizes),
        next_token_loss,
        tokens(rows, 512 if quick else length),
        lambda model, mesh: ts.plans.fsdp(model, mesh),
        options={"remat": "block"} | options,
    )


def torchax(
    topology: str, chips: int, rows: int, length: int, kernel: kernels.Attend, **options: Any
) -> Callable[[bool], TpuCase]:
    """Llama 3 8B as torchax's example trains it: all in bfloat16, fully sharded, SGD."""
    return lambda quick: TpuCase(
        "torchax",
        topology,
        {"batch": chips},
        lambda: narrow_llama(SMALL if quick else LLAMA, kernel, P("batch")),
        next_token_loss,
        tokens(rows, 512 if quick else length),
        lambda model, mesh: ts.plans.fsdp(model, mesh),
        optimizer=optax.sgd(0.01),
        options={"compute_dtype": None} | options,
    )


def default_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of MaxText's default model."""
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def maxtext_v5e(sizes: Sizes, rows: int) -> Callable[[bool], TpuCase]:
    """MaxText's default model of 2023 on 256 chips, so many rows of 2048 tokens on each."""

    def model(quick: bool) -> nn.Module:
        small = Sizes(layers=2, width=1024, hidden=2048, heads=2, vocab=2048)
        with torch.device("meta"):
            return Default(small if quick else sizes)

    return lambda quick: TpuCase(
        "MaxText",
        "v5e:16x16",
        {"batch": 256},
        lambda: model(quick),
        default_loss,
        tokens(256 * rows, 2048),
        lambda model, mesh: ts.plans.fsdp(model, mesh),
        options={"remat": "block"},
    )


SIZES_16, SIZES_32 = Sizes(), Sizes(width=10240)
LLAMA_32 = Llama(layers=32, width=8192, hidden=28672, heads=64, kv_heads=64, vocab=32000, base=10000.0)


def maxtext_v5p(quick: bool) -> TpuCase:
    """MaxText's default model of 2024, a Llama, at a scale of 32: 6 rows of 2048 tokens a chip."""
    return TpuCase(
        "MaxText",
        "v5p:4x4x4",
        {"batch": 16, "model": 4},
        lambda: hf_llama(SMALL if quick else LLAMA_32),
        next_token_loss,
        tokens(64 * 6, 512 if quick else 2048),
        lambda model, mesh: ts.plans.fsdp_tp(model, mesh, sequence=True),
        options={"remat": "dots"},
    )


def _flops_of_llama(sizes: Llama, rows: int, length: int) -> float:
    """By MaxText's formula, for as many heads of keys as of queries."""
    layer = 4 * sizes.width**2 + 3 * sizes.width * sizes.hidden
    params = sizes.layers * layer + 2 * sizes.vocab * sizes.width
    return rows * (6 * params * length + 12 * sizes.layers * sizes.width * length**2 / 2)


PUBLISHED = {
    "llama fsdp": Published(
        "Llama 3 8B, flash attention, fsdp=4, 8 x 8192",
        V6E,
        2.7352,
        TORCHPRIME,
        torchprime("Llama 3 8B"),
        VMEM + ASYNC,
    ),
    "llama splash": Published(
        "the same, splash attention",
        V6E,
        2.4068,
        TORCHPRIME,
        torchprime("Llama 3 8B", kernel=kernels.fused_splash),
        VMEM + ASYNC,
    ),
    "llama 2d": Published(
        "the first, fsdp=2, tensor=2",
        V6E,
        3.3384,
        TORCHPRIME,
        torchprime("Llama 3 8B", axes={"batch": 2, "model": 2}, recipe=rules(FSDP_TP, BY_WIDTH)),
        VMEM + ASYNC,
    ),
    "mixtral": Published(
        "Mixtral, 16 layers, experts drop tokens, fsdp=4, 8 x 8192",
        V6E,
        3.1462,
        TORCHPRIME,
        torchprime(
            "Mixtral",
            model=dropping_mixtral,
            recipe=rules(DROPPING),
            sizes=dataclasses.replace(LLAMA, layers=16, vocab=32000, base=1e6),
        ),
        VMEM + ASYNC,
    ),
    "maxtext 8B": Published(
        "Llama 3.1 8B, v6e-8, 24 x 8192",
        V6E,
        3.443,
        RECIPES,
        rows_of(LLAMA, "v6e:2x4", 24, 8192),
        VMEM + ASYNC,
        "layers are computed again, where the source keeps five values of each by the host",
    ),
    "torchax v6e-8": Published(
        "Llama 3 8B, v6e-8, 8 x 8192",
        V6E,
        1.7,
        TORCHAX_MODELS,
        torchax("v6e:2x4", 8, 8, 8192, kernels.fused_splash, remat="dots", offload="activations"),
        VMEM + ASYNC,
        "a guess: all products are kept by the host; today's source keeps five values of a layer there, which is less "
        "to send: not in the free number",
        is_known=False,
    ),
    "torchax v6e-4": Published(
        "Llama 3 8B, v6e-4, 24 x 4096",
        V6E,
        24 * 4096 / 4 / 7000,
        TORCHAX,
        torchax("v6e:2x2", 4, 24, 4096, kernels.flash, remat="block"),
        VMEM + ASYNC,
        "attention and remat are a guess, as its settings are not known: not in the free number",
        is_known=False,
    ),
    "16B": Published(
        "16B, v5e-256, 6 x 2048 a chip",
        V5E,
        SIZES_16.flops(6, 2048) / 0.6110 / 197e12,
        f"{MAXTEXT}/v5e",
        maxtext_v5e(SIZES_16, 6),
        unlike=OF_2023,
    ),
    "32B": Published(
        "32B, v5e-256, 4 x 2048 a chip",
        V5E,
        SIZES_32.flops(4, 2048) / 0.6686 / 197e12,
        f"{MAXTEXT}/v5e",
        maxtext_v5e(SIZES_32, 4),
        unlike=OF_2023,
    ),
    "32B v5p": Published(
        "32B, v5p-128, fsdp=16, tensor=4, 6 x 2048 a chip",
        V5P,
        _flops_of_llama(LLAMA_32, 6, 2048) / 0.7147 / 459e12,
        f"{MAXTEXT}/v5p",
        maxtext_v5p,
        unlike="sizes and 6 rows are those of early 2024; the sequence is split where the source splits the width",
    ),
}
"""By a short name, for `--models`."""
