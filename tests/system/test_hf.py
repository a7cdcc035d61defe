"""Hugging Face models as their users have them: loss, every gradient, every new value, against eager torch."""

import dataclasses
from typing import Any

import pytest

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import Case
from tests.tables.hf_models import HF_MODELS

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def _deep(name: str, depth: int = 3, **changes: Any) -> Case:
    """A case with more layers; a cache is made and filled in each forward pass, as is the default."""
    model = next(model for model in HF_MODELS if model.name == name)
    fields = {**model.fields, **{field: depth for field in DEPTHS if field in model.fields}}
    case = dataclasses.replace(model, fields=fields, **changes).cases()[0]
    return dataclasses.replace(case, rtol=1e-4)  # up to twice as deep as the others


# Each of these has parts that none of the others has; Llama, T5 and Mixtral are below, with more layers, and further
# families and implementations of attention are rows of docs/proof.md.
CASES = {name: _deep(name, 1) for name in ("ViT", "Mamba", "Whisper", "CLIP")}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_torch(name: str) -> None:
    case = CASES[name]
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))


def _assert_loops(case: Case, *lines: str) -> None:
    step = assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    assert [line for line in step.report().splitlines() if "loop" in line] == list(lines)


def _both_ways(path: str, depth: int = 3, what: str = "3 iterations") -> list[str]:
    first, last = f"{path}.0", f"{path}.{depth - 1}"
    return [f"{first} to {last}: one loop, {what}", f"{last} to {first}, backward: one loop, {what}"]


def test_layers_are_loops() -> None:
    _assert_loops(_deep("Llama"), *_both_ways("model.layers"))


@pytest.mark.slow
def test_layers_whose_kinds_alternate_are_loops_of_pairs() -> None:
    _assert_loops(_deep("Gemma2", 4), *_both_ways("model.layers", 4, "2 iterations of 2 layers"))


@pytest.mark.slow
def test_routers_that_leave_their_logits_to_a_hook_are_in_loops() -> None:
    _assert_loops(_deep("Mixtral"), *_both_ways("model.layers"))


@pytest.mark.slow
def test_encoders_and_decoders_are_loops_without_their_first_blocks() -> None:
    """Which hold the relative positions; gradients of these are summed from the second block on."""
    case = _deep("T5", 4)
    step = assert_follows(case, case.model(), eager_trajectory(case, 2), (4, 2))
    first = "not in a loop: its classes, tensors or their splits differ from its siblings'"
    for stack in ("encoder", "decoder"):
        assert f"{stack}.block.1 to {stack}.block.3: one loop, 3 iterations" in step.report()
        assert f"{stack}.block.0: {first}" in step.report()
