"""Models of the hub, unmodified and on the meta device, how TPUs split them, and their hand-written rivals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh
from torch import nn

import torch_shard as ts
from benchmarks.handwritten import HandwrittenStep, Rival, Values
from benchmarks.tpu_context import LongLlama
from benchmarks.tpu_gpt import Gpt
from benchmarks.tpu_gpt_oss import GptOss
from benchmarks.tpu_layers import EPS
from benchmarks.tpu_llama import Llama
from benchmarks.tpu_mixtral import TILES, Mixtral, share_of_rows
from benchmarks.tpu_qwen import TILES as SMALL_TILES
from benchmarks.tpu_qwen import Qwen
from benchmarks.tpu_resnet import BASIC, ResNet
from benchmarks.tpu_vit import Vit

PRECISION: dict[str, Any] = {"compute_dtype": torch.bfloat16}
"""Of our step: float32 parameters, activations in bfloat16, as the rivals have them."""

SCANNED, UNROLLED = "layers in a loop", "layers one by one"
"""How a rival runs them."""

OURS, AUTOCAST, IN_LOOPS = "ours", 'mixed_precision="autocast"', "scan_layers=True"
"""Our sides: by default, and with options that a user may set."""

OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {},
    AUTOCAST: {"mixed_precision": "autocast"},
    IN_LOOPS: {"scan_layers": True},
}

ByHand = Callable[[Mesh], tuple[Rival, Values]]

Recipe = Callable[[nn.Module, Mesh], ts.ShardingPlan]
"""How a model is split."""


@dataclasses.dataclass(frozen=True)
class TpuCase:
    """A model, its machine, and its rival.

    Attributes:
        name: For the table.
        topology: Of `make_mesh`, with `axes`.
        axes: Sizes by name.
        model: On the meta device.
        loss_fn: In torch.
        batch: On the meta device.
        recipe: How it is split.
        rivals: By hand in JAX, for a mesh, and where they start; the first is the one that targets are about.
        rival_batch: Where they take another one.
        optimizer: Of both sides.
        options: Of our step.
        targets: Of our counts over the first rival's, by their names.
        used: Of the arithmetic that the rival's grouped products would do for all rows that a device may get, what they
            do where all experts have as many rows.
    """

    name: str
    topology: str
    axes: dict[str, int]
    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batch: Any
    recipe: Recipe
    rivals: dict[str, ByHand] = dataclasses.field(default_factory=dict[str, ByHand])
    rival_batch: Any = None
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-4))
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    targets: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    used: float = 1.0

    @property
    def others(self) -> tuple[str, ...]:
        """Our sides that are not the default's, where they are other programs."""
        return (AUTOCAST,) if self.options.get("remat") == "block" else (AUTOCAST, IN_LOOPS)

    @property
    def mesh(self) -> Mesh:
        """Its devices only compile."""
        return ts.make_mesh(topology=self.topology, **self.axes)

    def step(self, side: str = OURS) -> ts.TrainStep:
        """One of ours."""
        model, mesh = self.model(), self.mesh
        options = PRECISION | self.options | OPTIONS[side]
        plan = self.recipe(model, mesh)
        return ts.make_train_step(model, self.loss_fn, self.optimizer, mesh=mesh, plan=plan, **options)

    def rival_lowered(self, name: str) -> jax.stages.Lowered:
        """The step of one of the rivals."""
        mesh = self.mesh
        rival, start = self.rivals[name](mesh)
        batch = self.batch if self.rival_batch is None else self.rival_batch
        batch = batch if isinstance(batch, tuple) else (batch,)
        return HandwrittenStep(rival, self.optimizer, mesh, start).lower(batch)


def by_hand(sizes: Gpt | Llama | ResNet | Vit) -> ByHand:
    """A rival of these sizes."""
    return lambda mesh: (sizes.rival(mesh), sizes.start)


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """As HF's own, without its padding."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def over_both(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """FSDP and tensor parallel, experts over `model`; the residual stream over time where there are none."""
    if hasattr(model.config, "num_local_experts"):
        return ts.plans.expert(model, mesh, tp="model")
    return ts.plans.fsdp_tp(model, mesh, sequence=True)


def replicated(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """Data parallel alone."""
    return ts.plans.replicated()


def tokens(rows: int, length: int) -> torch.Tensor:
    """A batch on the meta device."""
    return torch.empty(rows, length, dtype=torch.int64, device="meta")


def hf_llama(sizes: Llama) -> nn.Module:
    """`LlamaForCausalLM`, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**_sizes(sizes)))


def _sizes(sizes: Llama) -> dict[str, Any]:
    """In HF's words."""
    return {
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 8192,
        "rope_theta": sizes.base,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
    }


def llama(quick: bool, remat: str) -> TpuCase:
    """Four layers of Llama 3 8B."""
    sizes = Llama(layers=2, width=512, hidden=1024, heads=4, kv_heads=4, vocab=2048) if quick else Llama()
    scanned = dataclasses.replace(sizes, remat=remat == "block")
    unrolled = dataclasses.replace(scanned, unroll=True)
    rivals = {SCANNED: scanned} if remat == "block" else {UNROLLED: unrolled}  # the faster one
    targets = {"cycles": 1.05, "wire": 1.05, "temporaries": 1.15, "traffic": 1.15}
    return TpuCase(
        f"Llama 3 8B, 4 layers, remat={remat}",
        "v5e:4x4",
        {"batch": 4, "model": 4},
        lambda: hf_llama(sizes),
        next_token_loss,
        tokens(16, 256 if quick else 2048),
        over_both,
        {name: by_hand(own) for name, own in rivals.items()},
        options={"remat": remat},
        targets=targets if remat == "block" else targets | {"traffic": 1.25},
    )


def hf_gpt(sizes: Gpt) -> nn.Module:
    """`GPT2LMHeadModel` without dropout, on the meta device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        vocab_size=sizes.vocab,
        n_positions=sizes.length,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def gpt(quick: bool) -> TpuCase:
    """GPT-2, data parallel."""
    sizes = Gpt(layers=2, width=128, heads=2, vocab=512, length=128) if quick else Gpt()
    return TpuCase(
        "GPT-2 124M",
        "v5e:2x4",
        {"batch": 8},
        lambda: hf_gpt(sizes),
        next_token_loss,
        tokens(16 if quick else 64, sizes.length),
        replicated,
        {UNROLLED: by_hand(sizes)},
        targets={"cycles": 1.05, "wire": 1.00, "temporaries": 1.10, "traffic": 1.10},
    )


def hf_resnet(sizes: ResNet) -> nn.Module:
    """`ResNetForImageClassification`, on the meta device."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths, depths = list(sizes.widths), list(sizes.depths)
    kind = "basic" if sizes.basic else "bottleneck"
    config = ResNetConfig(
        embedding_size=sizes.stem, hidden_sizes=widths, depths=depths, num_labels=sizes.classes, layer_type=kind
    )
    with torch.device("meta"):
        return ResNetForImageClassification(config)


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """As HF's own."""
    pixels, classes = batch
    return nn.functional.cross_entropy(model(pixel_values=pixels).logits, classes)


def resnet(quick: bool) -> TpuCase:
    """ResNet-50, data parallel."""
    sizes = ResNet(16, (32, 64), (1, 2), 10) if quick else ResNet()
    rows, size = (16, 32) if quick else (512, 224)
    pixels = torch.empty(rows, 3, size, size, device="meta")
    classes = torch.empty(rows, dtype=torch.int64, device="meta")
    return TpuCase(
        "ResNet-50",
        "v5e:2x2",
        {"batch": 4},
        lambda: hf_resnet(sizes),
        class_loss,
        (pixels, classes),
        replicated,
        {UNROLLED: by_hand(sizes)},
        rival_batch=(pixels.permute(0, 2, 3, 1), classes),
        optimizer=optax.sgd(0.1, momentum=0.9),
        targets={"cycles": 1.10, "wire": 1.00, "temporaries": 1.25, "traffic": 1.20},
    )


def hf_mixtral(sizes: Mixtral) -> nn.Module:
    """`MixtralForCausalLM`, on the meta device."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_sizes(sizes), num_local_experts=sizes.experts)
    with torch.device("meta"):
        return MixtralForCausalLM(config)


def mixtral(quick: bool) -> TpuCase:
    """Two layers with eight experts."""
    small = {"width": 512, "hidden": 256, "heads": 4, "vocab": 512}
    sizes = Mixtral(**(small if quick else {}))
    return TpuCase(
        "Mixtral, 2 layers, remat=block",
        "v5e:4x4",
        {"batch": 4, "model": 4},
        lambda: hf_mixtral(sizes),
        next_token_loss,
        tokens(16, 256 if quick else 2048),
        over_both,
        {SCANNED: by_hand(sizes)},
        options={"remat": "block"},
        targets={"cycles": 1.10, "wire": 1.10},
        used=share_of_rows(sizes.chosen, 4 * (256 if quick else 2048), (sizes.experts, sizes.experts // 4), TILES[0]),
    )


def hf_vit(sizes: Vit) -> nn.Module:
    """`ViTForImageClassification`, on the meta device."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_labels=sizes.classes,
        layer_norm_eps=EPS,
    )
    with torch.device("meta"):
        return ViTForImageClassification(config)


def fsdp_tp(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """FSDP and tensor parallel."""
    return ts.plans.fsdp_tp(model, mesh)


def vit(quick: bool, layers: int) -> TpuCase:
    """ViT-B/16."""
    small = {"layers": 2, "width": 128, "hidden": 256, "heads": 2, "image": 64, "classes": 16}
    sizes = Vit(**small if quick else {"layers": layers})
    pixels = torch.empty(16 if quick else 256, 3, sizes.image, sizes.image, device="meta")
    classes = torch.empty(len(pixels), dtype=torch.int64, device="meta")
    return TpuCase(
        f"ViT-B/16, {layers} layers",
        "v5e:2x4",
        {"batch": 4, "model": 2},
        lambda: hf_vit(sizes),
        class_loss,
        (pixels, classes),
        fsdp_tp,
        {UNROLLED: by_hand(sizes)},
        targets=WITHIN_A_TENTH,
    )


WITHIN_A_TENTH = {"cycles": 1.10, "time": 1.10, "wire": 1.10}


def hf_qwen(sizes: Qwen) -> nn.Module:
    """`Qwen3MoeForCausalLM`, on the meta device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {"moe_intermediate_size": sizes.hidden, "num_experts": sizes.experts, "num_experts_per_tok": sizes.chosen}
    config = Qwen3MoeConfig(**_sizes(sizes) | own, head_dim=sizes.head)
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def hf_gpt_oss(sizes: GptOss) -> nn.Module:
    """`GptOssForCausalLM` without the stretched positions of its long contexts, on the meta device."""
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.chosen, "sliding_window": sizes.window}
    rope = {"rope_type": "default", "rope_theta": sizes.base}
    config = GptOssConfig(**_sizes(sizes) | own, head_dim=sizes.head, rope_parameters=rope)
    with torch.device("meta"):
        return GptOssForCausalLM(config)


def _small_experts(heads: int) -> dict[str, Any]:
    return {"layers": 2, "width": 256, "hidden": 256, "heads": heads, "kv_heads": 2, "vocab": 512, "experts": 8}


def with_many_experts(name: str, make: Callable[[Any], nn.Module], sizes: Qwen, batch: torch.Tensor) -> TpuCase:
    """Three layers on eight chips."""
    num_tokens, num_here = batch.numel() // 4, sizes.experts // 2
    return TpuCase(
        name,
        "v5e:2x4",
        {"batch": 4, "model": 2},
        lambda: make(sizes),
        next_token_loss,
        batch,
        over_both,
        {UNROLLED: by_hand(sizes)},
        targets=WITHIN_A_TENTH,
        used=share_of_rows(sizes.chosen, num_tokens, (sizes.experts, num_here), SMALL_TILES[0]),
    )


def over_context(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """FSDP, the sequence over `context`."""
    return ts.plans.fsdp_tp(model, mesh, tp=None, context="context")


def long_llama(quick: bool) -> TpuCase:
    """Two layers of Llama 3 8B, and one row of 131,072 tokens."""
    small = {"width": 512, "hidden": 1024, "heads": 4, "kv_heads": 2, "vocab": 2048, "length": 16384}
    sizes = LongLlama(layers=2, **(small if quick else {}))
    return TpuCase(
        f"Llama 3 8B, 2 layers, 1 x {sizes.length} tokens, remat=block",
        "v5p:2x2x4",
        {"batch": 1, "context": 16},
        lambda: hf_llama(sizes),
        next_token_loss,
        tokens(1, sizes.length),
        over_context,
        {SCANNED: by_hand(sizes)},
        options={"remat": "block"},
        targets=WITHIN_A_TENTH,
    )


def qwen(quick: bool) -> TpuCase:
    """Qwen3-MoE, half of the experts of its 30B."""
    sizes = Qwen(**_small_experts(heads=4) if quick else {})
    return with_many_experts("Qwen3-MoE, 3 layers, 64 experts", hf_qwen, sizes, tokens(8, 256 if quick else 2048))


def gpt_oss(quick: bool) -> TpuCase:
    """gpt-oss, half of the experts of its 20B."""
    sizes = GptOss(**_small_experts(heads=4) if quick else {})
    return with_many_experts("gpt-oss, 3 layers, 16 experts", hf_gpt_oss, sizes, tokens(4, 256 if quick else 2048))


CASES: dict[str, Callable[[bool], TpuCase]] = {
    "llama block": lambda quick: llama(quick, "block"),
    "llama long": long_llama,
    "llama none": lambda quick: llama(quick, "none"),
    "gpt": gpt,
    "resnet": resnet,
    "mixtral": mixtral,
    "vit": lambda quick: vit(quick, 4),
    "vit deep": lambda quick: vit(quick, 12),
    "qwen": qwen,
    "gpt-oss": gpt_oss,
}


def _held_out_llama() -> TpuCase:
    """The width of Llama 3.2 3B, rows of 4096."""
    sizes = Llama(width=3072, hidden=8192, heads=24, remat=False)
    return dataclasses.replace(
        llama(quick=False, remat="none"),
        name="Llama 3.2 3B, 4 layers, 8 x 4096 tokens, remat=none",
        model=lambda: hf_llama(sizes),
        batch=tokens(8, 4096),
        rivals={UNROLLED: by_hand(dataclasses.replace(sizes, unroll=True))},
    )


def _held_out_gpt() -> TpuCase:
    sizes = Gpt(layers=24, width=1024, heads=16)
    return dataclasses.replace(
        gpt(quick=False),
        name="GPT-2 medium, 32 x 1024 tokens",
        model=lambda: hf_gpt(sizes),
        batch=tokens(32, sizes.length),
        rivals={SCANNED: by_hand(dataclasses.replace(sizes, unroll=False))},
    )


def _held_out_resnet(name: str, sizes: ResNet, rows: int, pixels_of_side: int) -> TpuCase:
    pixels = torch.empty(rows, 3, pixels_of_side, pixels_of_side, device="meta")
    classes = torch.empty(rows, dtype=torch.int64, device="meta")
    return dataclasses.replace(
        resnet(quick=False),
        name=f"{name}, {rows} images of {pixels_of_side} x {pixels_of_side}",
        model=lambda: hf_resnet(sizes),
        batch=(pixels, classes),
        rivals={UNROLLED: by_hand(sizes)},
        rival_batch=(pixels.permute(0, 2, 3, 1), classes),
    )


def _held_out_qwen() -> TpuCase:
    """Wider experts, and fewer."""
    sizes = Qwen(layers=4, experts=32, hidden=1536, width=1536, heads=16, chosen=4)
    return with_many_experts("Qwen3-MoE, 4 layers, 32 experts, 16 x 1024 tokens", hf_qwen, sizes, tokens(16, 1024))


def _held_out_gpt_oss() -> TpuCase:
    """All experts of its 20B, and rows of 4096."""
    sizes = GptOss(layers=2, experts=32)
    return with_many_experts("gpt-oss, 2 layers, 32 experts, 4 x 4096 tokens", hf_gpt_oss, sizes, tokens(4, 4096))


HELD_OUT: dict[str, Callable[[], TpuCase]] = {
    "llama held out": _held_out_llama,
    "gpt held out": _held_out_gpt,
    "resnet held out": lambda: _held_out_resnet("ResNet-101", ResNet(depths=(3, 4, 23, 3)), 256, 192),
    "resnet small": lambda: _held_out_resnet("ResNet-18", BASIC, 512, 160),
    "resnet large": lambda: _held_out_resnet("ResNet-152", ResNet(depths=(3, 8, 36, 3)), 128, 288),
    "qwen held out": _held_out_qwen,
    "gpt-oss held out": _held_out_gpt_oss,
}
"""Of other sizes than those that we look at when we choose defaults."""


def find(name: str, quick: bool) -> TpuCase:
    """A case by its short name."""
    return HELD_OUT[name]() if name in HELD_OUT else CASES[name](quick)
