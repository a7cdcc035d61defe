"""What a compiled step communicates: as little as by hand."""

import collections
import re

import optax

import torch_shard as ts
from tests.tables.cases import CASE, CASES, make_mesh, make_step


def test_tensor_parallel_blocks_communicate_as_the_textbook_says() -> None:
    """Megatron's count: two all-reduces over `model` per block forward and two backward, and nothing is gathered."""
    case = CASE["gpt"]
    step = make_step(case)
    program = step.lower(step.init(), case.batches(1)[0]).compile().as_text()
    found = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(.*?replica_groups=(\S+),", program)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(groups == "{{0,1},{2,3},{4,5},{6,7}}" for _, groups in found) == 4 * 2  # two blocks
    assert len(found) <= 4 * 2 + 3  # the loss, all gradients in one, the gradient norm


GPT = next(case for case in CASES if case.name == "gpt")


def test_no_communication_is_added() -> None:
    found = []
    for scan_layers in (False, "auto"):
        step = ts.make_train_step(
            GPT.model(),
            GPT.loss_fn,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            mesh=make_mesh((4, 2)),
            plan=GPT.plan,
            scan_layers=scan_layers,
        )
        text = step.lower(step.init(), GPT.batches(1)[0]).compile().as_text()
        kinds = r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\("
        found.append(collections.Counter(re.findall(kinds, text)))
    assert set(found[1]) == {"all-reduce"}
    assert found[1]["all-reduce"] <= found[0]["all-reduce"]
