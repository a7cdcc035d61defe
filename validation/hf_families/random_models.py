"""`python -m validation.hf_families.random_models --seeds 0:300`: small models of transformers.

A seed draws a family, its sizes and settings, a mesh, a recipe and options; two steps of SGD are compared with eager
torch.
"""

import copy
import random
import sys
import warnings
from typing import Any

import jax
import numpy as np
import torch
import transformers

import torch_shard as ts
from tests.oracles.experts import any_grouped_mm
from validation.judging import Verdict, ended_by, is_ours, judge_all, parser, seeds_of

NEAR = 1e-5
"""Of the largest entry: float64, but for norms and rotations, which transformers computes in float32."""

RATE, ROWS, TOKENS, VOCAB = 0.1, 8, 12, 64

DECODERS = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "GPTNeoX", "StableLm", "Cohere", "Olmo"),
    *(
        "Olmo2",
        "Granite",
        "Starcoder2",
        "Mixtral",
        "Qwen2Moe",
        "Qwen3Moe",
        "GPTJ",
        "Falcon",
        "Glm",
        "Nemotron",
        "Helium",
    ),
    *("Ernie4_5", "SmolLM3", "SeedOss", "Apertus", "Arcee", "Cohere2", "Exaone4"),
)
OLDER = ("GPT2", "OPT", "CodeGen", "GPTNeo", "Bloom", "GPTBigCode", "XGLM")
ENCODERS = ("Bert", "Roberta", "Electra", "DistilBert", "Albert", "MPNet", "ModernBert", "Camembert")


def draw(seed: int) -> tuple[str, Any, Any, dict[str, Any]]:
    """A family, its configuration, the class of its model, and how it is trained."""
    pick = random.Random(seed).choice
    family, heads = pick((*DECODERS, *DECODERS, *OLDER, *ENCODERS)), pick((2, 4))
    width, layers = heads * pick((4, 8)), pick((1, 2, 3))
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"intermediate_size": 2 * width, "max_position_embeddings": 32, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2},
    }
    if family in DECODERS:
        sizes |= {"num_key_value_heads": pick([n for n in (1, 2, heads) if heads % n == 0])}
        sizes |= {"head_dim": width // heads, "tie_word_embeddings": pick((False, True))}
        sizes |= {"attention_bias": pick((False, True)), "sliding_window": pick((None, 4))}
        sizes |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
        sizes |= {"shared_expert_intermediate_size": width, "rotary_dim": 2}
    if family in OLDER:
        sizes |= {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 32, "n_ctx": 32, "rotary_dim": 2}
        sizes |= {"attention_types": [[["global", "local"], layers]], "num_layers": layers, "num_heads": heads}
        sizes |= {"d_model": width, "ffn_dim": 2 * width, "word_embed_proj_dim": width, "attention_heads": heads}
    if family in ENCODERS:
        sizes |= {"embedding_size": pick((width, 8)), "dim": width, "n_layers": layers, "n_heads": heads}
        sizes |= {"hidden_dim": 2 * width, "hidden_act": pick(("gelu", "relu", "silu"))}
    config_class = getattr(transformers, f"{family}Config")
    known = {name for cls in config_class.__mro__ for name in getattr(cls, "__annotations__", {})}
    sizes = {
        name: value for name, value in sizes.items() if not known or name in known | set(config_class.attribute_map)
    }
    config = config_class(**sizes)
    for name in vars(config):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    head = "ForMaskedLM" if family in ENCODERS else "ForCausalLM"
    kind = getattr(transformers, family + head, None) or transformers.GPT2LMHeadModel
    how = {
        "mesh": pick(((1, 1), (4, 1), (2, 2), (4, 2), (1, 2))),
        "recipe": pick(("fsdp_tp", "fsdp", "tp", "replicated", "from_hf")),
        "attention": pick(("eager", "sdpa")),
        "padded": pick((False, True)),
        "options": pick(({}, {}, {"accumulate_steps": 2}, {"clip_grad_norm": 0.1}, {"remat": "block"})),
    }
    return family, config, kind, how


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own."""
    return model(**batch).loss


def make_batch(seed: int, *, padded: bool) -> dict[str, torch.Tensor]:
    """Tokens with labels; where padded, rows that end early."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        lengths = torch.randint(4, TOKENS + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(TOKENS) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens}


def judge(seed: int) -> Verdict:
    """Train what a seed draws in this process."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    about = ""
    try:
        family, config, kind, how = draw(seed)
        about = f"{family} {how}: "
        model = kind._from_config(config, attn_implementation=how["attention"]).double().train()
        batches = [make_batch(seed + number, padded=how["padded"]) for number in range(2)]
        with any_grouped_mm():
            wanted = _eager(copy.deepcopy(model), batches, how["options"])
    except Exception as error:  # what eager torch does not run is no model
        return Verdict("no model", f"{about}{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if not all(np.isfinite(value).all() for value in wanted.values()):
        return Verdict("no model", f"{about}eager torch gives what is not finite")
    with jax.enable_x64(True), any_grouped_mm():
        try:
            found = _ours(model, batches, how)
        except Exception as error:
            return ended_by(error, ours=is_ours(error), about=about)
    for name, value in wanted.items():
        apart = np.abs(found[name] - value).max(initial=0) / max(1.0, np.abs(value).max(initial=0))
        if not apart <= NEAR:
            return Verdict("wrong", f"{about}{name} apart by {apart:.1e}")
    return Verdict("right")


def _eager(model: Any, batches: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> dict[str, np.ndarray]:
    found = dict[str, np.ndarray]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        if limit := options.get("clip_grad_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        found[f"loss {number}"] = loss.detach().numpy()
    return found | {name: p.detach().numpy() for name, p in model.named_parameters()}


def _ours(model: Any, batches: list[dict[str, torch.Tensor]], how: dict[str, Any]) -> dict[str, np.ndarray]:
    sizes, options = how["mesh"], dict(how["options"])
    if how["padded"]:
        options.pop("accumulate_steps", None)  # means of parts with other numbers of tokens are another loss
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
    has_plan = how["recipe"] != "from_hf" or getattr(model, "tp_plan", None)
    plan = getattr(ts.plans, how["recipe"] if has_plan else "fsdp_tp")(
        *(() if how["recipe"] == "replicated" else (model, mesh))
    )
    step = ts.make_train_step(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=RATE), mesh=mesh, plan=plan, **options
    )
    state, found = step.init(seed=0), dict[str, np.ndarray]()
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        found[f"loss {number}"] = np.asarray(metrics["loss"])
    return found | {name: np.asarray(array) for name, array in state.params.items()}


def main() -> int:
    """Judge what the command line asks for; 0 if there is nothing to mend."""
    args = parser("validation.hf_families.random_models", __doc__).parse_args()
    return judge_all(judge, seeds_of(args), args)


if __name__ == "__main__":
    sys.exit(main())
