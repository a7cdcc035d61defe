"""What a compiled step communicates: as little as by hand."""

import re

import optax
import pytest

from benchmarks import communication
from benchmarks.tpu_counts import received_by
from tests.oracles.collectives import collectives_of, count_collectives
from tests.oracles.steps import step_of
from tests.tables.cases import CASE, make_step


def test_tensor_parallel_blocks_communicate_as_the_textbook_says() -> None:
    """Megatron's count: two all-reduces over `model` per block forward and two backward, and nothing is gathered."""
    case = CASE["gpt"]
    step = make_step(case)
    found = collectives_of(step.lower(step.init(), case.batches(1)[0]).compile())
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.groups == "{{0,1},{2,3},{4,5},{6,7}}" for one in found) == 4 * 2  # two blocks
    assert len(found) <= 4 * 2 + 3  # the loss, all gradients in one, the gradient norm


@pytest.mark.slow
def test_no_communication_is_added() -> None:
    case, found = CASE["gpt"], []
    for scan_layers in (False, "auto"):
        step = step_of(
            case.model(),
            case.loss_fn,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            plan=case.plan,
            scan_layers=scan_layers,
        )
        found.append(count_collectives(step.lower(step.init(), case.batches(1)[0]).compile()))
    assert set(found[1]) == {"all-reduce"}
    assert found[1]["all-reduce"] <= found[0]["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_tp, sequence"])  # `python -m benchmarks --only communication` has all
def test_a_recipe_sends_what_the_textbook_has(name: str) -> None:
    """Under TPU's compiler: at most a tenth more, for norms, the loss and what a split vocabulary takes.

    And where matrices are split over both axes, no device has a whole one or a whole gradient of one: what it gathers
    and what it makes, forward and backward, within the loop over layers and outside, is split over `model` at least.
    """
    sizes = communication.Sizes(vocab=1664, rows=40)  # no number of tokens is the width of a layer
    compiled = communication.compiled(name, sizes)
    assert received_by(compiled.as_text() or "") <= communication.TARGET * communication.RECIPES[name].textbook(sizes)
    if name.startswith("fsdp_tp"):
        model = sizes.model(communication.RECIPES[name].fused)
        matrices = {tuple(sorted(p.shape)) for key, p in model.named_parameters() if p.ndim == 2 and "pos" not in key}
        arrays = re.findall(r"\w\[(?:\d+,)*(\d+),(\d+)\]", compiled.as_text() or "")
        assert not matrices & {tuple(sorted(int(size) for size in dims)) for dims in arrays}
