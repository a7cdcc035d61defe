"""Every model of transformers with a `tp_plan`, on the meta device, and what its plan comes to.

`python -m validation.hf_families.report --write` writes its section of the page.
"""

import argparse
import collections
import importlib
import importlib.util
import itertools
import logging
import os
import pathlib
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal

from docs.pages import beside, put

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proof.md"
TP = 4
CUT = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "depth", "encoder_layers", "decoder_layers"), 4),
    "first_k_dense_replace": 1,
}
"""How many layers: a period of those whose kinds alternate."""


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LACKING: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "DeepseekOcr2TextConfig": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "DiffusionGemmaTextConfig": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 2304},
    "Dots1Config": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "HunYuanMoEV1Config": {"head_dim": 128, "num_experts": 16},
    "Lfm2MoeConfig": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "MinistralConfig": {"head_dim": 128},
    "NemotronConfig": {"head_dim": 128, "num_key_value_heads": 8},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 768},
    "Qwen4ExpTextConfig": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256},
        **{"indexer_budget": 2048, "indexer_compress_ratio": 4},
    },
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
}
"""What configurations lack by default to make a model."""

WITHIN = {"T5GemmaModuleConfig": "T5GemmaConfig"}
"""Configurations of parts, that no model takes by itself."""


@dataclass(frozen=True)
class Outcome:
    """What the plan of one family comes to.

    Attributes:
        family: Its folder in transformers, and the configuration where it has several.
        model: The class; empty where none can be made.
        styles: How many tensors each style has.
        split: Tensors that are split, of how many.
        num_bytes: Of the whole.
        held: The part of them on each device.
        unsplit: What does not divide, by reason, with one of the names.
        error: Why there is no plan.
    """

    family: str
    model: str = ""
    styles: tuple[tuple[str, int], ...] = ()
    split: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    held: float = 1.0
    unsplit: tuple[str, ...] = ()
    error: str = ""


def configurations(families: Collection[str] = ()) -> dict[str, Any]:
    """The classes of configurations with a plan, by family: of some, or of all."""
    import transformers

    found: dict[str, Any] = {}
    root = pathlib.Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/configuration_*.py")):
        is_asked = not families or path.parent.name in families
        if not is_asked or "base_model_tp_plan" not in path.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        own = list(dict.fromkeys(c for c in own if getattr(c, "base_model_tp_plan", None)))
        own = [c for c in own if not set(c.__bases__) & set(own)]  # else an older name
        for config in own:
            family = path.parent.name if len(own) == 1 else f"{path.parent.name} ({config.__name__})"
            found[family] = getattr(module, WITHIN.get(config.__name__, config.__name__))
    return found


def models_of(config: Any) -> Iterator[Any]:
    """Classes of models with this configuration: those with a head for language first, then the plainest names."""
    import transformers
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = config.__module__.replace("configuration_", "modeling_")
    if importlib.util.find_spec(path) is None:
        yield getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])  # another family's
        return
    module = importlib.import_module(path)
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    fitting = [c for c in own if c.config_class is config and not c.__name__.endswith("PreTrainedModel")]
    yield from sorted(
        fitting, key=lambda c: ("CausalLM" not in c.__name__, "Conditional" not in c.__name__, c.__name__)
    )


def build(config: Any) -> torch.nn.Module:
    """The first of its models that can be made and has a plan, on the meta device; with few layers, if it can be."""
    errors: dict[str, None] = {}
    for model, fields in itertools.product(models_of(config), _fields(config)):
        try:
            with torch.device("meta"):
                made = model(config(**fields))
        except Exception as error:  # of any kind: they are the models' own
            errors[f"{model.__name__}: {type(error).__name__}: {error}"] = None
            continue
        if made.tp_plan:
            return made
        errors[f"{model.__name__} has no tp_plan"] = None
    raise LookupError("; ".join(errors) or "no model takes this configuration by itself")


def _fields(config: Any) -> Iterator[dict[str, Any]]:
    """What to ask of a configuration: few layers, if it can do with them."""
    more = LACKING.get(config.__name__, {})
    plain = config(**more)
    cut = {name: min(number, getattr(plain, name)) for name, number in CUT.items() if _is_number(plain, name)}
    try:
        config(**more | cut)
        yield more | cut
    except Exception:  # it has lists as long as all layers
        pass
    yield more


def _is_number(config: Any, name: str) -> bool:
    return isinstance(getattr(config, name, None), int)


def outcome(family: str, config: Any) -> Outcome:
    """What the plan of a family comes to over `TP` devices."""
    import torch_shard as ts

    try:
        model = build(config)
    except LookupError as error:
        return Outcome(family, error=str(error))
    mesh = ts.make_mesh(batch=8 // TP, model=TP)
    plan = ts.plans.from_hf(model, mesh, fsdp=None)
    resolved = plan.resolve(model, mesh)
    own = {name: resolved.entries[name] for name, _ in model.named_parameters()}
    styles = collections.Counter(re.split(r"[,; ]", entry.reason)[0] for entry in own.values())
    del styles["no"]
    reasons = collections.defaultdict[str, list[str]](list)
    for name, entry in own.items():
        for fault in (part for part in entry.reason.split("; ") if "not a multiple of" in part):
            reasons[fault].append(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
    return Outcome(
        family,
        type(model).__name__,
        tuple(styles.most_common()),
        (sum(not e.sharding.is_fully_replicated for e in own.values()), len(own)),
        resolved.num_bytes or 0,
        (resolved.num_bytes_per_device or 0) / max(resolved.num_bytes or 0, 1),
        tuple(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()),
    )


HEAD = """[`from_hf`][torch_shard.plans.from_hf] reads the plan of every model in transformers {version} whose
configuration has a `tp_plan`: here over `model={tp}` with `fsdp=None`, each built from its configuration's defaults,
with at most {layers} layers where it can be, on the meta device. {counts}

{link}: styles, tensors split, the size, what one device holds of it, and what does not divide. What a model's plan
does not name is whole on each device, as in transformers, and so is what does not divide: `from_hf` lists it, and
refuses it with `strict=True`. `python -m validation.hf_families.report --write` makes this table, and `pytest
validation/hf_families` checks it; that each device's part is the one that transformers gives a process is checked for
{checked} of them.
"""
COLUMNS = ("family", "model", "styles", "tensors split", "whole", "held", "what does not divide")


def page(outcomes: list[Outcome]) -> str:
    """The section of the documentation; all rows go into a file beside it."""
    import transformers

    from validation.hf_families.test_hf_parallel import CHECKED

    made = [o for o in outcomes if not o.error]
    counts = (
        f"{len(made)} of {len(outcomes)} configurations resolve; in {sum(not o.unsplit for o in made)} all divides."
    )
    return HEAD.format(
        counts=counts,
        link=beside(PAGE, "hf_plans", COLUMNS, list(map(_line, outcomes))),
        version=transformers.__version__,
        tp=TP,
        layers=CUT["num_layers"],
        checked=len(CHECKED),
    )


def _line(of: Outcome) -> tuple[str, ...]:
    if of.error:
        return of.family, f"not made: {of.error.splitlines()[0][:200].replace('|', '/')}", *[""] * 5
    styles = ", ".join(f"`{style}` {count}" for style, count in of.styles)
    unsplit = "; ".join(f"`{line.partition(': ')[0]}`: {line.partition(': ')[2]}" for line in of.unsplit)
    split = f"{of.split[0]} of {of.split[1]}"
    return of.family, of.model, styles, split, decimal(of.num_bytes), f"{of.held:.0%}", unsplit


def all_outcomes() -> list[Outcome]:
    """Of every family."""
    logging.disable(logging.WARNING)  # of parameters that do not divide: the page has them
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [outcome(family, config) for family, config in configurations().items()]
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    """Write the section of the page."""
    import jax

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page of the documentation")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    outcomes = all_outcomes()
    if options.write:
        put(PAGE, "hf_plans", page(outcomes))


if __name__ == "__main__":
    main()
