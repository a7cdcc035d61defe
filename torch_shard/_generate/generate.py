"""`generate`: checks, padding on the left up to a bucket, and the two programs one after the other."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import caller, near_misses, public
from torch_shard._common.validate import check_count, check_kind, check_number, check_seed
from torch_shard._device import put
from torch_shard._entries import holdings
from torch_shard._generate.decode import Decode, Loop, Prefill
from torch_shard._sharding import ShardingPlan, make_mesh
from torch_shard._state import TrainState, check_state, present_state
from torch_shard._train import Step, StepOptions

_OF_STEPS = weakref.WeakKeyDictionary[Step, tuple[Prefill, Decode]]()

_LAYERS = ("full_attention", "sliding_attention")

_TOP_K = 50  # of transformers, where neither the call nor the config says one


@near_misses
@public
def generate(
    model_or_step: Any,
    input_ids: torch.Tensor,
    state: TrainState | None = None,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    attention_mask: torch.Tensor | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    plan: ShardingPlan | None = None,
) -> torch.Tensor:
    """Continue prompts with a decoder of transformers, on the mesh, by two compiled programs.

    The keys and values of the tokens so far are kept in arrays of fixed length, split as the model is. Lengths of
    prompts and `max_new_tokens` are rounded up to powers of two, for each of which is compiled once; numbers of the
    sampling need no other program. Greedy tokens are those of `model.generate(do_sample=False)`.

    Args:
        model_or_step: A step of such a model (of `make_train_step`, `make_eval_step` or `make_apply`), whose mesh and
            plan are used, but for what it says of activations, a sequence and stages; or the model itself, whose
            programs are kept for the last two models.
        input_ids: int64 tokens (batch, time) on the CPU, padded on the left.
        state: A state of the step, which is only read; by default the present values of the model, which are then put
            on the mesh at each call.
        max_new_tokens: At most so many tokens follow the prompts.
        max_length: Instead, at most so many tokens are in a row, prompt and padding included, as in transformers.
        attention_mask: (batch, time), 0 where a prompt is padded. By default where it has the padding token, as in
            transformers, if there is one that does not end a row.
        do_sample: Draw tokens by their probabilities, instead of taking the most probable. This and the following
            numbers are by default those of the model's `generation_config`.
        temperature: Logits are divided by it before tokens are drawn; 1 where nothing says otherwise.
        top_k: Draw from so many most probable tokens; from 50 where nothing says otherwise, as in transformers, and
            from all where the config has 0.
        top_p: Draw from the fewest most probable tokens that have this probability together; from all likewise.
        eos_token_id: Token, or tokens, that end a row; by default that of the model's `generation_config`.
        pad_token_id: Token that follows in rows that have ended; by default that of the model's `generation_config`,
            or else the first token that ends a row.
        seed: Of the draws: the same seed draws the same tokens.
        mesh: For a model: devices with Auto axes, from `make_mesh`; by default one device.
        plan: For a model: how each parameter is split; by default not at all.

    Returns:
        The prompts and what follows them, int64 (batch, time + new) on the CPU; as long as the longest row.

    Raises:
        TypeError: The model is not a decoder of transformers, or an argument is of the wrong kind.
        ValueError: An argument has no such value, or the tokens are more than the model has positions.
        NotImplementedError: The model or its `generation_config` needs what is only in `model.generate`.

    Example:
        >>> import torch, torch_shard as ts
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32))
        >>> ts.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=5, eos_token_id=31).shape[0]
        1
    """
    model = model_or_step.model if isinstance(model_or_step, Step) else model_or_step
    _check_model(model)
    stops, pad, is_padded = _ends(model, eos_token_id, pad_token_id)
    mask = _check_prompt(model, input_ids, attention_mask, pad if is_padded else None)
    max_new_tokens = _num_new(max_new_tokens, max_length, input_ids.shape[1])
    check_kind("do_sample", do_sample, bool | None)
    config = getattr(model, "generation_config", None)
    do_sample = bool(setting(config, "do_sample", do_sample))
    asked_k = top_k
    if do_sample:
        temperature, top_k, top_p = (
            setting(config, name, given)
            for name, given in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
        )
        top_k = _TOP_K if top_k is None else None if asked_k is None and not top_k else top_k  # of a config, 0 is all
    temperature = 1.0 if temperature is None else temperature
    _check_sampling(temperature, top_k, top_p)
    check_seed(seed)
    _check_length(model, int(mask.sum(1).max()) + max_new_tokens)
    prefill, decode = _programs(model_or_step, mesh, plan)
    if state is None:
        state = prefill.of_model()
    check_state(state)
    state = present_state(state)

    ids, mask, num_new = _in_buckets(input_ids, mask, max_new_tokens, pad)
    num_slots = ids.shape[1]
    positions = (mask[:, :num_slots].cumsum(1) - 1).clamp(min=0)
    first = prefill.run(state, ids, mask, positions)

    def number(value: float, dtype: Any) -> jax.Array:
        return put(np.asarray(value, dtype), prefill.replicated)

    vocabulary = first["logits"].shape[-1]
    words = np.asarray(jax.random.key_data(jax.random.key(seed)))
    loop = Loop(
        logits=first["logits"],
        limit=number(max_new_tokens, np.int32),
        stops=put(np.asarray(stops, np.int32), prefill.replicated),
        pad=number(pad, np.int32),
        key=jax.random.wrap_key_data(put(words, prefill.replicated)),
        temperature=number(temperature, np.float32),
        top_k=number(vocabulary if top_k is None else min(top_k, vocabulary), np.int32),
        top_p=number(1.0 if top_p is None else top_p, np.float32),
        greedy=not do_sample,
        num_new=num_new,
    )
    following = np.asarray(positions[:, -1:] + 1, np.int32)
    host_mask = np.asarray(mask, np.int32)
    tokens, made = decode.run(state, first, host_mask, following, filled=num_slots, loop=loop)
    return torch.cat([input_ids, torch.from_numpy(np.array(tokens))[:, : int(made)].long()], 1)


def _num_new(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """How many tokens may follow prompts of this length, by the one of the two arguments that is given."""
    if max_length is None and max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)
        return int(max_new_tokens)
    if max_length is None or max_new_tokens is not None:
        number = "neither" if max_length is None else "both"
        raise TypeError(
            f"{caller()}: one of max_new_tokens= and max_length= is needed, got {number}. max_new_tokens=20 is without "
            "the prompt, max_length=20 with it."
        )
    check_count("max_length", max_length)
    if max_length <= prompt_length:
        raise ValueError(
            f"{caller()}: max_length={max_length} counts the prompts, which have {prompt_length} tokens, so that no "
            "other can follow. Raise it, or give max_new_tokens=."
        )
    return int(max_length) - prompt_length


def _in_buckets(
    ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts padded on the left to a power of two, the mask of all slots, and the number of slots for new tokens."""
    width = _power_of_two(ids.shape[1]) - ids.shape[1]
    num_new = _power_of_two(max_new_tokens)
    ids = torch.nn.functional.pad(ids, (width, 0), value=pad)
    mask = torch.nn.functional.pad(mask, (width, 0))
    return ids, torch.nn.functional.pad(mask, (0, num_new), value=1), num_new


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _programs(model_or_step: Any, mesh: Mesh | None, plan: ShardingPlan | None) -> tuple[Prefill, Decode]:
    if not isinstance(model_or_step, Step):
        return _of_model(model_or_step, mesh, _Same(plan), _tensors_of(model_or_step))
    if mesh is not None or plan is not None:
        raise ValueError(f"{caller()}: a step has its own mesh and plan; give mesh= and plan= with a model alone.")
    found = _OF_STEPS.get(model_or_step)
    if found is None:
        options = model_or_step.options.for_evaluation()
        how = _of_entries(options.plan)
        options = dataclasses.replace(options, plan=how, scan_layers=False, local_batches=False, batch_spec=None)
        found = _OF_STEPS[model_or_step] = _made(model_or_step.model, options)
    return found


class _Same:
    """A plan that is equal to itself alone."""

    def __init__(self, plan: ShardingPlan | None) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


def _tensors_of(model: torch.nn.Module) -> tuple[object, ...]:
    """Which parameters and buffers a model has: with others it needs other programs."""
    return tuple((name, id(t), t.shape, t.dtype, t.requires_grad) for name, t in holdings(model).all.items())


@functools.lru_cache(maxsize=2)
def _of_model(model: Any, mesh: Mesh | None, plan: _Same, tensors: tuple[object, ...]) -> tuple[Prefill, Decode]:
    where = make_mesh(jax.devices()[:1], batch=1) if mesh is None else mesh
    how = ShardingPlan({}, default=PartitionSpec()) if plan.plan is None else plan.plan
    return _made(model, StepOptions(mesh=where, plan=_of_entries(how), scan_layers=False))


def _of_entries(plan: ShardingPlan) -> ShardingPlan:
    """What a plan says of parameters and buffers; a token at a time has no sequence to split, and passes all stages."""
    return dataclasses.replace(plan, context=None, pipeline=None, activations={})


def _made(model: Any, options: StepOptions) -> tuple[Prefill, Decode]:
    config = model.config.get_text_config(decoder=True)
    return Prefill(model, config.num_hidden_layers, options), Decode(model, options)


def _check_model(model: Any) -> None:
    config, can = getattr(model, "config", None), getattr(model, "can_generate", None)
    if not isinstance(model, torch.nn.Module) or config is None or not callable(can) or not can():
        raise TypeError(
            f"{caller()}: expected a decoder of transformers with a language-model head (such as LlamaForCausalLM), or "
            f"a step of one, got {type(model).__name__}."
        )
    kinds = set(getattr(config, "layer_types", None) or _LAYERS) - set(_LAYERS)
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "_is_stateful", False) or kinds:
        found = ", ".join(sorted(map(str, kinds))) or "an encoder, or a state that is not keys and values"
        raise NotImplementedError(
            f"{caller()}: {type(model).__name__} has {found}; decoders with full and sliding attention are generated "
            "from. Use model.generate for this one."
        )
    check_settings(getattr(model, "generation_config", None))


def _check_prompt(model: Any, ids: object, mask: object, padding: int | None) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 2:
        found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"{caller()}: input_ids must be an int64 tensor (batch, time), got {found}.")
    if not ids.numel():
        raise ValueError(f"{caller()}: input_ids must have a row and a token at least, got {tuple(ids.shape)}.")
    size = model.get_input_embeddings().weight.shape[0]
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(
            f"{caller()}: input_ids must be from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}."
        )
    if mask is None:
        mask = torch.ones_like(ids) if padding is None else ids != padding
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"{caller()}: attention_mask must be {tuple(ids.shape)} as input_ids is, got {found}.")
    counts = mask.to(torch.int64)
    if (
        not bool(((counts == 0) | (counts == 1)).all())
        or bool((counts.diff(dim=1) < 0).any())
        or not counts[:, -1].all()
    ):
        raise ValueError(
            f"{caller()}: attention_mask must be 0 where a row begins with padding and then 1 to its end (without one, "
            "it is 0 where pad_token_id is). Pad on the left: tokenizer(..., padding=True) with "
            'tokenizer.padding_side = "left".'
        )
    return counts


def _check_sampling(temperature: object, top_k: object, top_p: object) -> None:
    check_number("temperature", temperature)
    if not float(temperature) > 0:  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"{caller()}: temperature must be above 0, got {temperature}. For the most probable token: do_sample=False."
        )
    if top_k is not None:
        check_count("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p)
        if not 0 < float(top_p) <= 1:  # pyright: ignore[reportArgumentType]
            raise ValueError(f"{caller()}: top_p must be above 0 and at most 1, got {top_p}.")


def _check_length(model: Any, length: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"{caller()}: the longest prompt and max_new_tokens are {length} tokens, and the model has {limit} "
            "positions (config.max_position_embeddings)."
        )


def _ends(model: Any, eos: Any, pad: Any) -> tuple[list[int], int, bool]:
    """Tokens that end a row, the one that follows, and whether that one stands for padding in prompts, too."""
    settings = getattr(model, "generation_config", None)
    eos = setting(settings, "eos_token_id", eos)
    stops = [] if eos is None else [int(token) for token in (eos if isinstance(eos, list | tuple) else [eos])]
    pad = setting(settings, "pad_token_id", pad)
    is_padded = pad is not None and int(pad) not in stops
    return stops, int(pad if pad is not None else (stops[0] if stops else 0)), is_padded


# The fields of a `GenerationConfig` of transformers: which are followed, which change no token, which are refused.


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
