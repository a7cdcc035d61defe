"""`generate` against `model.generate(do_sample=False)` of transformers."""

import numpy as np
import optax
import pytest
import torch
import transformers as hf
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.tables.cases import make_mesh
from torch_shard._generate.sample import allowed

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
NEOX = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
FAMILIES = {
    "llama": hf.LlamaConfig(**LLAMA),
    "gpt2": hf.GPT2Config(**GPT2),
    "qwen2": hf.Qwen2Config(**LLAMA),
    "gemma2": hf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=4),
    "mistral": hf.MistralConfig(**LLAMA, sliding_window=4),
    "phi": hf.PhiConfig(**LLAMA),
    "opt": hf.OPTConfig(**SMALL, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32),
    "gpt_neox": hf.GPTNeoXConfig(**NEOX),
    "qwen3": hf.Qwen3Config(**LLAMA, head_dim=8),
    "gemma": hf.GemmaConfig(**LLAMA, head_dim=8),
    "olmo2": hf.Olmo2Config(**LLAMA),
    "stablelm": hf.StableLmConfig(**LLAMA),
}
IDS = torch.tensor([[0, 0, 5, 9, 33], [7, 21, 4, 40, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def decoder(name="llama"):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # so that the most probable token is far from the next
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def of_hf(model, ids=IDS, mask=MASK, **options):
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name):
    model = decoder(name)
    found = ts.generate(model, IDS, attention_mask=MASK, max_new_tokens=9, pad_token_id=0)
    assert found.tolist() == of_hf(model, max_new_tokens=9).tolist()


def test_a_trained_state_generates_on_its_mesh_and_compiles_once():
    model, mesh = decoder(), make_mesh((2, 2))
    attention = "model.layers.*.self_attn"
    rules = {f"{attention}.{name}_proj.weight": P("model") for name in "qk"} | {
        f"{attention}.o_proj.weight": P(None, "model")
    }
    step = ts.make_train_step(
        model,
        lambda model, ids: model(input_ids=ids, labels=ids).loss,
        optax.sgd(0.1),
        mesh=mesh,
        plan=ts.ShardingPlan(rules, default=P()),
    )
    state, _ = step(step.init(), IDS)
    found = ts.generate(step, IDS, state, attention_mask=MASK, max_new_tokens=7, pad_token_id=0)
    assert found.tolist() == of_hf(step.export(state).eval(), max_new_tokens=7).tolist()
    from torch_shard._generate.generate import _OF_STEPS

    again = ts.generate(step, IDS[1:].repeat(2, 1), state, max_new_tokens=6, pad_token_id=0)
    assert again[0].tolist() == found[1, :11].tolist()
    assert [part.num_compiles for part in _OF_STEPS[step]] == [1, 1]
    step(state, IDS)  # the state was only read


@pytest.mark.parametrize("spec", [P("model"), P()], ids=["split", "whole"])
def test_keys_and_values_are_split_as_the_batch_and_the_heads_are(spec):
    model = decoder()
    rules = {f"model.layers.*.self_attn.{name}_proj.weight": spec for name in "qkv"}
    options = {"mesh": make_mesh((2, 2)), "plan": ts.ShardingPlan(rules, default=P())}
    found = ts.generate(model, IDS, attention_mask=MASK, max_new_tokens=3, pad_token_id=0, **options)
    assert found.tolist() == of_hf(model, max_new_tokens=3).tolist()
    from torch_shard._generate.generate import _of_model, _Same

    prefill, _ = _of_model(model, options["mesh"], _Same(options["plan"]))
    first = prefill.run(prefill.init(), IDS[:, :4], torch.ones(2, 6, dtype=torch.int64), torch.arange(4).expand(2, 4))
    heads = 1 if spec else 2
    assert {array.sharding.shard_shape(array.shape) for array in first["keys"]} == {(1, heads, 6, 8)}
    assert {array.sharding.shard_shape(array.shape) for array in first["values"]} == {(1, heads, 6, 8)}


def test_a_model_in_bfloat16():
    model = decoder().bfloat16()
    found = ts.generate(model, IDS, attention_mask=MASK, max_new_tokens=9, pad_token_id=0)
    assert found.tolist() == of_hf(model, max_new_tokens=9).tolist()


def test_a_model_that_asks_for_the_length_is_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, rope_parameters=scaling)).eval()
    with pytest.raises(NotImplementedError, match=r"generate: .*Use model\.generate"):
        ts.generate(model, IDS, max_new_tokens=4, pad_token_id=0)


def test_a_row_ends_with_eos_and_is_padded():
    model = decoder()
    plain = of_hf(model, max_new_tokens=8)
    eos = int(plain[0, 7])
    found = ts.generate(model, IDS, attention_mask=MASK, max_new_tokens=8, eos_token_id=eos, pad_token_id=3)
    with torch.no_grad():
        expected = model.generate(
            IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8, eos_token_id=eos, pad_token_id=3
        )
    assert found.tolist() == expected.tolist()


def test_draws_are_repeatable_and_top_k_of_one_is_greedy():
    model, options = decoder(), {"attention_mask": MASK, "max_new_tokens": 8, "pad_token_id": 0}
    greedy = ts.generate(model, IDS, **options)
    assert torch.equal(ts.generate(model, IDS, do_sample=True, top_k=1, **options), greedy)
    hot = [ts.generate(model, IDS, do_sample=True, temperature=50.0, seed=seed, **options) for seed in (0, 0, 1)]
    assert torch.equal(hot[0], hot[1])
    assert not torch.equal(hot[0], hot[2])


def test_the_allowed_set_is_that_of_transformers():
    logits = torch.randn(4, 50) * 3
    for top_k, top_p in [(50, 1.0), (5, 1.0), (50, 0.7), (8, 0.5), (50, 1e-6)]:
        expected = hf.TopKLogitsWarper(top_k)(None, logits)
        expected = hf.TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        found = np.asarray(allowed(logits.numpy(), np.int32(top_k), np.float32(top_p)))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected.numpy()))


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"max_new_tokens": 0}, ValueError, "generate: max_new_tokens"),
        ({"temperature": 0.0}, ValueError, "generate: temperature must be above 0, got 0.0"),
        ({"top_p": 1.5}, ValueError, "generate: top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": 0}, ValueError, "generate: top_k"),
        ({"input_ids": torch.ones(2, 3)}, TypeError, "generate: input_ids must be an int64 tensor"),
        ({"input_ids": torch.tensor([[64]])}, ValueError, "generate: input_ids must be from 0 to 63, got 64 to 64"),
        ({"attention_mask": MASK.flip(1)}, ValueError, "generate: attention_mask must be 0 where a row begins"),
        ({"attention_mask": MASK[:1]}, ValueError, r"generate: attention_mask must be \(2, 5\) as input_ids is"),
        ({"max_new_tokens": 64}, ValueError, "generate: the longest prompt and max_new_tokens are 69 tokens"),
        ({"model_or_step": torch.nn.Linear(2, 2)}, TypeError, "generate: expected a decoder of transformers"),
    ],
)
def test_bad_input_is_refused_by_name(changed, error, said):
    given = {"model_or_step": decoder(), "input_ids": IDS, "max_new_tokens": 4, **changed}
    with pytest.raises(error, match=said):
        ts.generate(**given)


def test_a_setting_that_only_transformers_has_is_refused():
    model = decoder()
    model.generation_config.repetition_penalty = 1.3
    with pytest.raises(NotImplementedError, match=r"model\.generation_config has repetition_penalty=1\.3"):
        ts.generate(model, IDS, max_new_tokens=2)
