"""Models for text, speech and series: transformers, peft, x-transformers, efficient attentions, quantizers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from validation.zoo.rows import BATCH, Row, cross_entropy, pairs, regression, rows, tokens

LENGTH, VOCAB = 8, 32


def _output_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _hf(
    kind: str, config: str, batch: Callable[[], Any], loss: Any = _output_loss, *, train: bool = True, **fields: Any
) -> Row:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, config)(**fields))

    return Row(kind, build, batch, loss_fn=loss, train=train)


_WIDTHS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_CERTAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT = {**_WIDTHS, **_CERTAIN, "vocab_size": VOCAB, "max_position_embeddings": 64}
_PATCHES = {**_WIDTHS, **_CERTAIN, "image_size": 16, "patch_size": 8}
_SPEECH = {
    **_WIDTHS,
    "vocab_size": VOCAB,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


def _words(*, labels: bool = True) -> Any:
    drawn = torch.randint(3, VOCAB, (BATCH, LENGTH))
    return {"input_ids": drawn, **({"labels": drawn} if labels else {})}


def _speech() -> Any:
    lengths = 256 - 16 * (torch.arange(BATCH) % 3)
    mask = (torch.arange(256) < lengths[:, None]).long()
    return {
        "input_values": torch.randn(BATCH, 256),
        "attention_mask": mask,
        "labels": torch.randint(1, VOCAB, (BATCH, 4)),
    }


def _contrast() -> Any:
    masked = torch.rand(BATCH, 16) < 0.4
    masked[:, 0] = True
    return {
        "input_values": torch.randn(BATCH, 256),
        "mask_time_indices": masked,
        "sampled_negative_indices": torch.randint(0, BATCH * 16, (BATCH, 16, 3)),
    }


def _video() -> Any:
    hidden = torch.zeros(BATCH, 8, dtype=torch.bool)
    for row in hidden:
        row[torch.randperm(8)[:4]] = True
    return {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16), "bool_masked_pos": hidden}


def _beit() -> Any:
    hidden = torch.rand(BATCH, 4) < 0.5
    hidden[:, 0] = True
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "bool_masked_pos": hidden,
        "labels": torch.randint(0, 16, (BATCH, 4)),
    }


def _of_hidden(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model wants the labels of what is hidden alone."""
    labels = batch["labels"][batch["bool_masked_pos"]]
    return model(**{**batch, "labels": labels}).loss


def _series() -> Any:
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


def _autoformer() -> Any:
    return {
        "past_values": torch.randn(BATCH, 11),
        "past_time_features": torch.randn(BATCH, 11, 1),
        "past_observed_mask": torch.ones(BATCH, 11),
        "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 1),
    }


_SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


def _segment() -> Any:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 3, (BATCH, 32, 32))}


def _seen() -> Any:
    """A picture of four patches in each row of words."""
    words = torch.randint(10, VOCAB, (BATCH, 4))
    placeholder = torch.tensor([3, 2, 4]).expand(BATCH, 3)
    ids = torch.cat([placeholder, words], 1)
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == 2).int(),
        "pixel_values": torch.randn(BATCH, 4, 3 * 2 * 8 * 8),
    }


def _looks(model: nn.Module, batch: Any) -> torch.Tensor:
    """Qwen2-VL with the grids of pictures as constants."""
    grid = torch.tensor([[1, 2, 2]] * BATCH)
    pixels = batch["pixel_values"].flatten(0, 1)
    return model(**{**batch, "pixel_values": pixels}, image_grid_thw=grid).loss


def _qwen_vl() -> nn.Module:
    import transformers

    text = {
        **_WIDTHS,
        "vocab_size": VOCAB,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
        video_token_id=5,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


TRANSFORMERS = rows(
    "transformers",
    _hf("EsmForMaskedLM", "EsmConfig", _words, pad_token_id=1, mask_token_id=2, token_dropout=True, **_TEXT),
    _hf("LongformerForMaskedLM", "LongformerConfig", _words, attention_window=4, pad_token_id=1, **_TEXT),
    _hf("BigBirdForMaskedLM", "BigBirdConfig", _words, attention_type="original_full", **_TEXT),
    _hf(
        "XLNetLMHeadModel",
        "XLNetConfig",
        _words,
        vocab_size=VOCAB,
        d_model=32,
        n_layer=2,
        n_head=2,
        d_inner=32,
        dropout=0.0,
    ),
    _hf(
        "FunnelForMaskedLM",
        "FunnelConfig",
        _words,
        vocab_size=VOCAB,
        d_model=32,
        n_head=2,
        d_head=16,
        d_inner=32,
        block_sizes=[1, 1],
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    _hf(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        _words,
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=2,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
    ),
    _hf("Wav2Vec2ForCTC", "Wav2Vec2Config", _speech, ctc_loss_reduction="mean", **_SPEECH),
    _hf("HubertForCTC", "HubertConfig", _speech, ctc_loss_reduction="mean", **_SPEECH),
    _hf(
        "Wav2Vec2ForPreTraining",
        "Wav2Vec2Config",
        _contrast,
        train=False,  # where it draws Gumbel noise
        num_negatives=3,
        num_codevectors_per_group=8,
        codevector_dim=8,
        proj_codevector_dim=8,
        **{**_SPEECH, "mask_time_prob": 0.05},
    ),
    _hf(
        "VideoMAEForPreTraining",
        "VideoMAEConfig",
        _video,
        num_frames=4,
        tubelet_size=2,
        decoder_hidden_size=16,
        decoder_intermediate_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        **_PATCHES,
    ),
    _hf(
        "BeitForMaskedImageModeling",
        "BeitConfig",
        _beit,
        _of_hidden,
        vocab_size=16,
        use_mask_token=True,
        drop_path_rate=0.0,
        layer_norm_eps=1e-5,  # the tokens begin as zeros, and 1e-12 makes gradients of 1e14 of them
        **_PATCHES,
    ),
    _hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _segment,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        sr_ratios=[4, 2, 1, 1],
        decoder_hidden_size=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    _hf(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        _series,
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        d_model=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        head_dropout=0.0,
    ),
    _hf("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", _autoformer, **_SERIES),
    _hf("AutoformerForPrediction", "AutoformerConfig", _autoformer, label_length=2, moving_average=3, **_SERIES),
    Row("Qwen2VLForConditionalGeneration", _qwen_vl, _seen, loss_fn=_looks),
)


def _adapted(kind: str, **options: Any) -> Row:
    def build() -> nn.Module:
        import peft
        import transformers

        fields = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
        certain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**fields, **certain, bos_token_id=0, eos_token_id=0)
        )
        return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))

    return Row(kind, build, _words, loss_fn=_output_loss)


_TARGETS: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}

PEFT = rows(
    "peft",
    _adapted("LoraConfig", r=4, lora_alpha=8, **_TARGETS),
    _adapted("AdaLoraConfig", init_r=4, target_r=2, total_step=10, **_TARGETS),
    _adapted(
        "IA3Config", feedforward_modules=["mlp.c_proj"], target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True
    ),
    _adapted("PrefixTuningConfig", num_virtual_tokens=4),
    _adapted("PromptTuningConfig", num_virtual_tokens=4),
    _adapted("VeraConfig", r=4, **_TARGETS),
    _adapted("LNTuningConfig", target_modules=["ln_1", "ln_2"]),
)


def _x(name: str, kind: str = "Decoder", outer: dict[str, Any] | None = None, **options: Any) -> Row:
    def build() -> nn.Module:
        import x_transformers as x

        layers = getattr(x, kind)(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
        return x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers, **(outer or {}))

    return Row(name, build, tokens(LENGTH, VOCAB), loss_fn=cross_entropy)


def _autoregressive() -> nn.Module:
    import x_transformers as x

    layers = x.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16)
    return x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers))


def _continuous() -> nn.Module:
    import x_transformers as x

    layers = x.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16)
    return x.ContinuousTransformerWrapper(dim_in=6, dim_out=4, max_seq_len=16, attn_layers=layers)


def _sequence_to_sequence() -> nn.Module:
    import x_transformers as x

    part = {"num_tokens": VOCAB, "depth": 1, "heads": 2, "max_seq_len": 16, "attn_dim_head": 16}
    return x.XTransformer(
        dim=32, **{f"enc_{k}": v for k, v in part.items()}, **{f"dec_{k}": v for k, v in part.items()}
    )


def _from_pair(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch)


def _whole(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch)


def _words_alone() -> Any:
    return torch.randint(1, VOCAB, (BATCH, LENGTH + 1))


X_TRANSFORMERS = rows(
    "x_transformers",
    _x("Decoder"),
    _x("Decoder, rotary, RMSNorm, SwiGLU", rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True),
    _x("Decoder, ALiBi", alibi_pos_bias=True),
    _x("Decoder, T5 bias, sandwich", rel_pos_bias=True, sandwich_coef=1),
    _x("Encoder, memory tokens, gates", "Encoder", {"num_memory_tokens": 2}, attn_gate_values=True, attn_num_mem_kv=2),
    _x("Decoder, hybrid residuals", residual_attn=True, scale_residual=True, shift_tokens=1),
    Row("AutoregressiveWrapper", _autoregressive, _words_alone, loss_fn=_whole),
    Row("ContinuousTransformerWrapper", _continuous, pairs(LENGTH, 6, out=(LENGTH, 4))),
    Row("XTransformer", _sequence_to_sequence, tokens(LENGTH, VOCAB), loss_fn=_from_pair),
)


def _language_model(package: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        return getattr(importlib.import_module(package), kind)(**options)

    return build


_LM: dict[str, Any] = {"num_tokens": VOCAB, "dim": 32, "depth": 2, "heads": 2}

EFFICIENT = [
    *rows(
        "performer_pytorch",
        Row(
            "PerformerLM",
            _language_model(
                "performer_pytorch",
                "PerformerLM",
                max_seq_len=16,
                dim_head=16,
                nb_features=16,
                feature_redraw_interval=None,
                **_LM,
            ),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
        Row(
            "PerformerLM, reversible",
            _language_model(
                "performer_pytorch",
                "PerformerLM",
                max_seq_len=16,
                dim_head=16,
                nb_features=16,
                feature_redraw_interval=None,
                reversible=True,
                **_LM,
            ),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
    ),
    *rows(
        "linformer",
        Row(
            "LinformerLM",
            _language_model("linformer", "LinformerLM", seq_len=LENGTH, k=4, **_LM),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
        Row(
            "LinformerLM, reversible",
            _language_model("linformer", "LinformerLM", seq_len=LENGTH, k=4, reversible=True, **_LM),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
    ),
    *rows(
        "reformer_pytorch",
        Row(
            "ReformerLM, full attention",
            _language_model("reformer_pytorch", "ReformerLM", max_seq_len=16, bucket_size=4, use_full_attn=True, **_LM),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
    ),
    *rows(
        "linear_attention_transformer",
        Row(
            "LinearAttentionTransformerLM",
            _language_model(
                "linear_attention_transformer", "LinearAttentionTransformerLM", max_seq_len=16, dim_head=16, **_LM
            ),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
        Row(
            "LinearAttentionTransformerLM, causal, reversible",
            _language_model(
                "linear_attention_transformer",
                "LinearAttentionTransformerLM",
                max_seq_len=16,
                dim_head=16,
                causal=True,
                reversible=True,
                blindspot_size=1,
                **_LM,
            ),
            tokens(LENGTH, VOCAB),
            loss_fn=cross_entropy,
        ),
    ),
    *rows(
        "perceiver_pytorch",
        Row(
            "Perceiver",
            _language_model(
                "perceiver_pytorch",
                "Perceiver",
                input_channels=3,
                input_axis=2,
                num_freq_bands=2,
                max_freq=4.0,
                depth=2,
                num_latents=4,
                latent_dim=16,
                cross_heads=1,
                latent_heads=2,
                cross_dim_head=8,
                latent_dim_head=8,
                num_classes=4,
            ),
            regression(8, 8, 3, out=4),
        ),
    ),
    *rows(
        "conformer",
        Row(
            "Conformer",
            _language_model(
                "conformer", "Conformer", dim=16, depth=1, dim_head=8, heads=2, ff_mult=2, conv_kernel_size=3
            ),
            pairs(LENGTH, 16),
        ),
    ),
    *rows(
        "pytorch_tcn",
        Row(
            "TCN",
            _language_model("pytorch_tcn", "TCN", num_inputs=4, num_channels=[8, 8], kernel_size=3, dropout=0.0),
            pairs(4, 16, out=(8, 16)),
        ),
    ),
]


class _Rotary(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        from rotary_embedding_torch import RotaryEmbedding

        self.qkv, self.rotary = nn.Linear(16, 48), RotaryEmbedding(dim=8, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.rotary.use_xpos:
            q, k = self.rotary.rotate_queries_and_keys(q, k)
        else:
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


ROTARY = rows(
    "rotary_embedding_torch",
    Row("RotaryEmbedding", _Rotary, pairs(LENGTH, 16)),
    Row("RotaryEmbedding, xpos", lambda: _Rotary(use_xpos=True), pairs(LENGTH, 16)),
    Row("RotaryEmbedding, learnt", lambda: _Rotary(learned_freq=True), pairs(LENGTH, 16)),
)


def _mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4))


MAMBA = rows("mambapy", Row("Mamba", _mamba, pairs(LENGTH, 16)))


class _Quantized(nn.Module):
    """A quantizer between two layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        import vector_quantize_pytorch as vq

        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 4)
        self.quantizer = getattr(vq, kind)(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.quantizer(self.before(x))
        return self.after(out[0])


def _vq(name: str, kind: str, **options: Any) -> Row:
    return Row(name, lambda: _Quantized(kind, **options), pairs(LENGTH, 6, out=(LENGTH, 4)))


VQ = rows(
    "vector_quantize_pytorch",
    _vq("VectorQuantize", "VectorQuantize", dim=8, codebook_size=16),
    _vq(
        "VectorQuantize, cosine, orthogonal",
        "VectorQuantize",
        dim=8,
        codebook_size=16,
        use_cosine_sim=True,
        orthogonal_reg_weight=1.0,
    ),
    _vq(
        "VectorQuantize, learnable codebook",
        "VectorQuantize",
        dim=8,
        codebook_size=16,
        learnable_codebook=True,
        ema_update=False,
    ),
    _vq("ResidualVQ", "ResidualVQ", dim=8, num_quantizers=2, codebook_size=16),
    _vq("FSQ", "FSQ", levels=[4, 3, 3], dim=8),
    _vq("LFQ", "LFQ", codebook_size=16, dim=8, entropy_loss_weight=0.0),
)


SEQUENCE = [*TRANSFORMERS, *PEFT, *X_TRANSFORMERS, *EFFICIENT, *ROTARY, *MAMBA, *VQ]
