"""Rows of the page of proofs: families of transformers, diffusers and timm as they are installed, made small."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from validation.zoo.rows import declare_operators_of_torchvision

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[nn.Module, Any], Any]

ROWS, LENGTH, WORDS = 8, 16, 64

SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "d_kv"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 2 * LENGTH),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4, "use_cache": False},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1},
    **{"image_size": 16, "patch_size": 4, "num_labels": 4, "state_size": 8, "query_pre_attn_scalar": 8},
}
"""Fields of configurations by the names that they have in most families; a configuration takes those that it has."""


@dataclasses.dataclass(frozen=True)
class ProofRow:
    """A model of the page.

    Attributes:
        name: Of the row.
        build: Makes the model, its loss and a batch.
        group: Under which heading it stands.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Loss, Any]]
    group: str

    def __call__(self) -> tuple[nn.Module, Loss, Any]:
        """Make it, whether or not torchvision's compiled operators load."""
        declare_operators_of_torchvision()
        return self.build()


def _configured(config: str, changes: Mapping[str, Any]) -> Any:
    import transformers

    kind: Any = getattr(transformers, config)
    known = {**{name: getattr(kind(), name, None) for name in SMALL}, **kind().to_dict()}
    of_class = {name for name in SMALL if getattr(getattr(kind, name, None), "fset", name) is None}  # cannot be set
    given = {kind.attribute_map.get(name, name) for name in changes}
    fields = {
        name: value
        for name, value in SMALL.items()
        if known.get(name) is not None and name not in of_class and kind.attribute_map.get(name, name) not in given
    }
    dropped = {name: 0.0 for name in known if "drop" in name and isinstance(known[name], float)}
    return kind(**{**fields, **dropped, **changes})


def _loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(**batch)
    return out.loss, {"logits": out.logits}


def _varied(model: nn.Module) -> nn.Module:
    """No bias is zero and no scale is one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def _text(name: str, group: str, *, config: str = "", model: str = "", **changes: Any) -> ProofRow:
    def build() -> tuple[nn.Module, Loss, Any]:
        import transformers

        made = getattr(transformers, model or f"{name}ForCausalLM")(_configured(config or f"{name}Config", changes))
        tokens = torch.randint(3, WORDS, (ROWS, LENGTH))
        return _varied(made), _loss, {"input_ids": tokens, "labels": tokens}

    return ProofRow(name, build, group)


def _image(name: str, *, model: str = "", **changes: Any) -> ProofRow:
    def build() -> tuple[nn.Module, Loss, Any]:
        import transformers

        made = getattr(transformers, model or f"{name}ForImageClassification")(_configured(f"{name}Config", changes))
        batch = {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, 4, (ROWS,))}
        return _varied(made), _loss, batch

    return ProofRow(name, build, "images")


def _timm(name: str, **fields: Any) -> ProofRow:
    def build() -> tuple[nn.Module, Loss, Any]:
        import timm

        made = timm.create_model(name, num_classes=4, **fields)
        return _varied(made), _classifying, (torch.randn(ROWS, 3, 16, 16), torch.randint(0, 4, (ROWS,)))

    return ProofRow(f"timm {name}", build, "images")


def _classifying(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"logits": logits}


def _denoiser(name: str, inputs: Callable[[], Batch], **fields: Any) -> ProofRow:
    def build() -> tuple[nn.Module, Loss, Any]:
        import diffusers

        made = getattr(diffusers, name)(**fields)
        return _varied(made), _denoising, {**inputs(), "noise": torch.randn(ROWS, 3, 8, 8)}

    return ProofRow(name, build, "images")


def _denoising(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    given = {key: value for key, value in batch.items() if key != "noise"}
    found = model(**given).sample[:, :3]
    return F.mse_loss(found, batch["noise"]), {"sample": found}


def _noisy() -> Batch:
    return {"sample": torch.randn(ROWS, 3, 8, 8), "timestep": torch.randint(0, 1000, (ROWS,))}


def _classed() -> Batch:
    noisy = _noisy()
    return {"hidden_states": noisy["sample"], "timestep": noisy["timestep"], "class_labels": torch.arange(ROWS) % 4}


def _prompted(*, is_pooled: bool = False) -> Batch:
    noisy, words = _noisy(), torch.randn(ROWS, 4, 32)
    pooled = {"pooled_projections": torch.randn(ROWS, 32)} if is_pooled else {}
    return {
        "hidden_states": noisy["sample"],
        "timestep": noisy["timestep"] % 10,  # sines of more differ in float32: DiT has them
        "encoder_hidden_states": words,
        **pooled,
    }


_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}

_HEADS = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 3,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
}
_TRANSFORMER = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 4}

EXPERTS = [
    _text("Mixtral", "experts"),
    _text("Qwen3Moe", "experts", num_experts=8),
    _text("DeepseekV3", "experts"),
    _text("GptOss", "experts"),
    _text("Olmoe", "experts"),
    _text("Llama4", "experts", config="Llama4TextConfig", intermediate_size_mlp=64, attention_chunk_size=8),
    _text("GraniteMoe", "experts"),
    _text("Ernie4_5_Moe", "experts", moe_layer_start_index=0, moe_layer_end_index=1),
]
"""The usual families with experts in one tensor."""

DENSE = [
    *(_text(name, "dense") for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3")),
    *(_text(name, "dense", head_dim=8, num_key_value_heads=4) for name in ("Nemotron", "Ministral")),
    _text("Gemma3", "dense", config="Gemma3TextConfig"),
    _text("GPT2", "dense", model="GPT2LMHeadModel"),
    *(_text(name, "dense") for name in ("GPTNeoX", "GPTJ", "OPT", "Bloom", "Falcon", "Mpt", "StableLm", "Starcoder2")),
    _text("GPTNeo", "dense", attention_types=[[["global", "local"], 1]], window_size=4),
    *(_text(name, "dense") for name in ("Olmo", "Olmo2", "Olmo3", "Cohere", "Cohere2", "Glm", "Glm4", "Granite")),
    *(_text(name, "dense") for name in ("Helium", "Persimmon", "SmolLM3", "Arcee", "Apertus", "Exaone4")),
    *(_text(name, "dense") for name in ("Ernie4_5", "SeedOss", "NanoChat", "DiffLlama", "BioGpt")),
    *(_text(name, "dense") for name in ("CodeGen", "XGLM", "ModernBertDecoder", "Electra")),
    _text("Bert", "dense", model="BertForMaskedLM"),
    _text("Roberta", "dense", model="RobertaForMaskedLM", max_position_embeddings=2 * LENGTH + 2),
]

IMAGES = [
    *(_image(name) for name in ("ViT", "DeiT", "Beit", "Dinov2")),
    _image("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _image("Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=2),
    _image("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    _denoiser(
        "UNet2DModel",
        _noisy,
        **_BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    _denoiser(
        "DiTTransformer2DModel",
        _classed,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=8,
    ),
    _denoiser(
        "PixArtTransformer2DModel",
        _prompted,
        **_HEADS,
        out_channels=3,
        norm_num_groups=4,
        cross_attention_dim=32,
        caption_channels=32,
    ),
    _denoiser(
        "SD3Transformer2DModel",
        functools.partial(_prompted, is_pooled=True),
        **_HEADS,
        out_channels=3,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    ),
    *(_timm(name, **_TRANSFORMER) for name in ("vit_tiny_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224")),
    _timm("eva02_tiny_patch14_224", **_TRANSFORMER),
    _timm(
        "swin_tiny_patch4_window7_224",
        img_size=16,
        patch_size=2,
        embed_dim=16,
        window_size=2,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _timm("resnet10t", channels=(8, 16, 32, 64), stem_width=8),
]

TABLE = {row.name: row for row in (*EXPERTS, *DENSE, *IMAGES)}
