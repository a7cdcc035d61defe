"""What people do with a Hugging Face model: adapters, checkpoints, frozen and tied parts, evaluation with a cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_close, assert_follows, eager_trajectory, optimizer
from tests.tables.cases import Case, make_mesh
from tests.tables.hf_models import HF_MODELS

# transformers renames checkpointing; peft and most users still say it the old way.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LLAMA = next(model for model in HF_MODELS if model.name == "Llama")


def checkpointed() -> nn.Module:
    model: Any = LLAMA.build("sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def lora(**options: Any) -> nn.Module:
    """Adapters as peft makes them, moved away from their start, where half of the gradients are zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    model = peft.get_peft_model(LLAMA.build("sdpa"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


LORA_RULES: dict[str, P] = {
    "**.q_proj.base_layer.weight": P("model", None),
    "**.q_proj.lora_B.*.weight": P("model", None),
    "**.down_proj.base_layer.weight": P(None, "model"),
    "**.down_proj.lora_A.*.weight": P(None, "model"),
    "**.gate_proj.weight": P("model", None),
}


def of_llama(name: str, build: Callable[[], nn.Module], rules: dict[str, P]) -> Case:
    return dataclasses.replace(LLAMA.cases()[0], name=name, build=build, rules=rules)


def test_checkpointed_layers_equal_eager_torch() -> None:
    case = of_llama("checkpointed", checkpointed, LLAMA.rules)
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))


def test_lora_trains_adapters_alone_and_merges() -> None:
    case = of_llama("lora", lora, LORA_RULES)
    step = assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
    state = step.init()
    assert state.params
    assert all("lora_" in name for name in state.params)
    batch = case.batches(1)[0]
    state, _ = step(state, batch)
    trained: Any = step.export(state)
    wanted = trained(**batch).logits
    torch.testing.assert_close(trained.merge_and_unload()(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


def with_logits(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(**batch)
    return out.loss, {"logits": out.logits}


def test_logits_of_an_evaluation() -> None:
    """In eval mode, with the cache that the configuration asks for."""
    case = LLAMA.cases()[0]
    model, batch = case.model(), case.batches(1)[0]
    on_mesh: dict[str, Any] = {"mesh": make_mesh((4, 2)), "plan": case.plan}
    state = ts.make_train_step(model, case.loss_fn, optimizer(), **on_mesh).init()
    metrics = ts.make_eval_step(model, with_logits, **on_mesh)(state, batch)
    with torch.no_grad():
        loss, wanted = with_logits(case.model().eval(), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_close(metrics["logits"], wanted["logits"].numpy(), 1e-4, 1e-6, "logits")


def with_hidden_states(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(**batch, output_hidden_states=True)
    return out.loss + out.hidden_states[1].square().mean(), {"num": torch.tensor(len(out.hidden_states))}


def test_hidden_states_are_collected_as_in_torch() -> None:
    """transformers hooks its modules when it first needs to, and notes in an attribute that it has."""
    case = dataclasses.replace(LLAMA, fields={**LLAMA.fields, "num_hidden_layers": 1}).cases()[0]
    model, batch = case.model(), case.batches(1)[0]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    on_mesh: dict[str, Any] = {"mesh": make_mesh((4, 2)), "plan": case.plan}
    step = ts.make_train_step(model, with_hidden_states, optimizer(), **on_mesh)
    state = step.init()
    evaluated = ts.make_eval_step(model, with_hidden_states, **on_mesh)(state, batch)
    _, metrics = step(state, batch)
    assert metrics["num"] == 2
    np.testing.assert_allclose(evaluated["loss"], metrics["loss"], rtol=1e-5)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    loss, eager = with_hidden_states(case.model(), batch)
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    assert eager["num"] == 2
