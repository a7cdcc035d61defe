"""`generate` against `model.generate(do_sample=False)` of transformers."""

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import chosen
from torch_shard._generate.decode import allowed
from torch_shard._generate.generate import _OF_STEPS

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
NEOX = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
FAMILIES = {
    "llama": hf.LlamaConfig(**LLAMA),
    "gpt2": hf.GPT2Config(**GPT2),
    "gemma2": hf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=4),
    "gpt_neox": hf.GPTNeoXConfig(**NEOX),
}
IDS = torch.tensor([[0, 0, 5, 9, 33], [7, 21, 4, 40, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def decoder(config=FAMILIES["llama"]):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # so that the most probable token is far from the next
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@pytest.fixture(scope="module")
def llama():
    """Only read, so that all tests use its two programs: of prompts of up to 8 tokens, and up to 16 new ones."""
    return decoder()


def of_hf(model, **options):
    options = {"max_new_tokens": 9, "pad_token_id": 0, **options}
    with torch.no_grad():
        return model.generate(IDS, attention_mask=MASK, do_sample=False, **options)


def of_ours(model, *state, **options):
    return ts.generate(
        model, IDS, *state, **{"attention_mask": MASK, "max_new_tokens": 9, "pad_token_id": 0, **options}
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name):
    model = decoder(FAMILIES[name])
    assert of_ours(model).tolist() == of_hf(model).tolist()


def test_max_length_counts_the_prompt_and_its_padding(llama):
    options = {"attention_mask": MASK, "max_length": 12, "pad_token_id": 0}
    assert ts.generate(llama, IDS, **options).tolist() == llama.generate(IDS, do_sample=False, **options).tolist()


def test_a_trained_state_generates_on_its_mesh_and_compiles_once():
    """Keys and values are split as the batch is and, where their weights are, by their heads."""
    model = decoder(hf.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
    attention = "model.layers.*.self_attn"
    rules = {f"{attention}.{name}_proj.weight": P("model") for name in "qkv"}
    plan = ts.ShardingPlan({**rules, f"{attention}.o_proj.weight": P(None, "model")}, default=P())
    step = step_of(model, lambda model, ids: model(input_ids=ids, labels=ids).loss, mesh=(2, 2), plan=plan)
    state, _ = step(step.init(), IDS)
    found = of_ours(step, state, max_new_tokens=7)
    assert found.tolist() == of_hf(step.export(state).eval(), max_new_tokens=7).tolist()
    again = ts.generate(step, IDS[1:].repeat(2, 1), state, max_new_tokens=6, pad_token_id=0)
    assert again[0].tolist() == found[1, :11].tolist()
    prefill, decode = _OF_STEPS[step]
    assert [prefill.num_compiles, decode.num_compiles] == [1, 1]
    mask, places = torch.ones(2, 16, dtype=torch.int64), torch.arange(8).expand(2, 8)
    first = prefill.run(state, IDS.repeat(1, 2)[:, :8], mask, places)
    for name in ("keys", "values"):
        assert {array.sharding.shard_shape(array.shape) for array in first[name]} == {(1, 1, 16, 8)}
    step(state, IDS)  # the state was only read


SPLIT = {
    "context": {"context": ts.Context("model")},
    "pipeline": {"pipeline": ts.Pipeline("model")},
    "activations": {"activations": {"model.layers.*": P("batch", "model", None)}},
}


@pytest.mark.parametrize("kind", chosen(SPLIT, ["context"]))
def test_a_plan_may_split_what_one_token_has_not(kind):
    model = decoder()
    plan = ts.ShardingPlan({"**.up_proj.weight": P("batch")}, default=P(), **SPLIT[kind])
    num = 2 if kind == "pipeline" else 1
    step = step_of(model, lambda m, x: m(input_ids=x, labels=x).loss, plan=plan, accumulate_steps=num)
    state = step.init(seed=0)
    assert torch.equal(of_ours(step, state), of_hf(model))


def test_a_model_in_bfloat16():
    """Its most probable tokens by eager torch in float32, up to the rounding of logits."""
    model = decoder(FAMILIES["gpt2"]).bfloat16()
    found = of_ours(model)
    mask = torch.cat([MASK, torch.ones(2, 9, dtype=torch.int64)], 1)
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model.float()(input_ids=found, attention_mask=mask, position_ids=places).logits[:, 4:-1]
    taken = logits.gather(-1, found[:, 5:, None])
    assert (taken >= logits.amax(-1, keepdim=True) - 0.05 * logits.abs().max()).all()  # some roundings of 2**-8 each


def test_a_model_that_asks_for_the_length_is_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, rope_parameters=scaling)).eval()
    with pytest.raises(NotImplementedError, match=r"generate: .*Use model\.generate"):
        ts.generate(model, IDS, max_new_tokens=4, pad_token_id=0)


def test_a_row_ends_with_eos_and_is_padded(llama):
    plain = of_hf(llama)
    assert of_ours(llama).tolist() == plain.tolist()
    options = {"eos_token_id": int(plain[0, 7]), "pad_token_id": 3}
    assert of_ours(llama, **options).tolist() == of_hf(llama, **options).tolist()


def test_tokens_of_a_model_with_other_tensors_are_its_own():
    model = decoder(hf.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
    before = of_ours(model)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    assert of_ours(model).tolist() == of_hf(model).tolist() != before.tolist()


def test_what_nothing_says_is_as_in_transformers(llama):
    found = of_ours(llama, attention_mask=None)
    assert found.tolist() == of_ours(llama).tolist()
    hot = {"do_sample": True, "temperature": 1e6}
    assert torch.equal(of_ours(llama, **hot), of_ours(llama, **hot, top_k=50))
    assert not torch.equal(of_ours(llama, **hot), of_ours(llama, **hot, top_k=64))
    with pytest.raises(ValueError, match=r"it is 0 where pad_token_id is"):
        of_ours(llama, attention_mask=None, pad_token_id=33)


def test_draws_are_repeatable_and_top_k_of_one_is_greedy(llama):
    assert torch.equal(of_ours(llama, do_sample=True, top_k=1), of_ours(llama))
    hot = [of_ours(llama, do_sample=True, temperature=50.0, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(hot[0], hot[1])
    assert not torch.equal(hot[0], hot[2])


def test_the_allowed_set_is_that_of_transformers():
    logits, ours = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3, jax.jit(allowed)
    for top_k, top_p in [(50, 1.0), (5, 1.0), (50, 0.7), (8, 0.5), (50, 1e-6)]:
        expected = hf.TopKLogitsWarper(top_k)(None, logits)
        expected = hf.TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        found = np.asarray(ours(logits.numpy(), np.int32(top_k), np.float32(top_p)))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected.numpy()))


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"max_new_tokens": 0}, ValueError, "generate: max_new_tokens"),
        ({"max_length": 9}, TypeError, "generate: one of max_new_tokens= and max_length= is needed, got both"),
        (
            {"max_new_tokens": None},
            TypeError,
            "generate: one of max_new_tokens= and max_length= is needed, got neither",
        ),
        (
            {"max_new_tokens": None, "max_length": 5},
            ValueError,
            "generate: max_length=5 counts the prompts, which have 5",
        ),
        ({"max_new_tokens": None, "max_length": True}, ValueError, "generate: max_length must be a positive integer"),
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
def test_bad_input_is_refused_by_name(llama, changed, error, said):
    given = {"model_or_step": llama, "input_ids": IDS, "max_new_tokens": 4, **changed}
    with pytest.raises(error, match=said):
        ts.generate(**given)


def test_a_setting_that_only_transformers_has_is_refused():
    model = decoder()
    model.generation_config.repetition_penalty = 1.3
    with pytest.raises(NotImplementedError, match=r"model\.generation_config has repetition_penalty=1\.3"):
        ts.generate(model, IDS, max_new_tokens=2)
