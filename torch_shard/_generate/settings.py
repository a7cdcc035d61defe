"""The fields of a `GenerationConfig` of transformers: which are followed, which change no token, which are refused."""

from collections.abc import Mapping
from typing import Any

from torch_shard._common.caller import caller

FOLLOWED = frozenset({"do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id"})
"""Fields that stand for arguments which are not given."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha", "min_p"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "force_words_ids"), ([],)),
    **dict.fromkeys(("sequence_bias", "constraints", "stop_strings"), ([], {})),
    **dict.fromkeys(("token_healing", "use_mtp"), (False,)),
    "top_h": (1,),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "dola_layers", "max_time"), ()),
}
"""Fields that change tokens, with the values beside None that change nothing."""

WITHOUT_EFFECT = frozenset(
    [
        "max_length",
        "max_new_tokens",
        "early_stopping",
        "length_penalty",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "renormalize_logits",
        "remove_invalid_values",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "bos_token_id",
        "decoder_start_token_id",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "low_memory",
        "prefill_chunk_size",
        "transformers_version",
    ]
)
"""Fields that say how tokens are computed, or what is given back beside them, or are for beams and encoders alone."""


def check_settings(config: object) -> None:
    """Refuse a config that asks for other tokens than ours."""
    found: Mapping[str, Any] = {} if config is None else vars(config)
    known = FOLLOWED | WITHOUT_EFFECT
    asked = {n: v for n, v in found.items() if n not in known and v is not None and not n.startswith("_")}
    if changed := [f"{name}={value!r}" for name, value in asked.items() if value not in NEUTRAL.get(name, ())]:
        raise NotImplementedError(
            f"{caller()}: model.generation_config has {', '.join(changed)}, which only model.generate has. Unset it, "
            "or use model.generate."
        )


def setting(config: object, name: str, given: Any) -> Any:
    """An argument, or what the config has in its place."""
    return getattr(config, name, None) if given is None else given
