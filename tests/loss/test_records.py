"""Batches that are records: opened into arrays, and filled for the loss with those of the program."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    scale: int = 2

    def __post_init__(self) -> None:
        self.double = self.x * 2

    def inputs(self) -> torch.Tensor:
        return self.x * self.scale + self.double


@dataclasses.dataclass(frozen=True)
class Frozen:
    """It has a hash, and Python's `==`: no constant for that."""

    x: torch.Tensor
    y: torch.Tensor

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sub(dict[str, torch.Tensor]):
    """A dict with attributes for its keys."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Output(BaseModelOutput):
    x = property(lambda self: self.last_hidden_state)
    y = property(lambda self: self.hidden_states[0])


KINDS: dict[str, Callable[..., Any]] = {
    "dataclass": Record,
    "frozen with a hash": Frozen,
    "named tuple": Pair,
    "subclass of dict": lambda x, y: Sub(x=x, y=y),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "ModelOutput": lambda x, y: Output(last_hidden_state=x, hidden_states=(y,)),
    "in containers": lambda x, y: {"of": [Record(x, y)], "scale": 2.0},
}


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    scale = 1.0
    if type(batch) is dict:
        batch, scale = batch["of"][0], batch["scale"]
    assert isinstance(batch, (Record, Frozen, Pair, Sub, Output, BatchEncoding))
    x = batch.inputs() if isinstance(batch, Record) else batch["x"] if isinstance(batch, BatchEncoding) else batch.x
    return F.mse_loss(model(x), batch["y"] if isinstance(batch, BatchEncoding) else batch.y) * scale


def test_each_kind_of_batch_counts_in_one_program() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)

    def of_each(model: nn.Module, batch: Any) -> Any:
        losses = {kind: loss_fn(model, part) for kind, part in batch.items()}
        return torch.stack(list(losses.values())).sum(), losses

    step = sgd_step(model, of_each, (4, 2), rate=0.0)
    state = step.init()
    for put in (lambda batch: batch, lambda batch: batch, step.put):
        batch = {kind: make(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for kind, make in KINDS.items()}
        state, metrics = step(state, put(batch))
        for kind, wanted in of_each(eager, batch)[1].items():
            torch.testing.assert_close(torch.tensor(float(metrics[kind])), wanted.detach(), msg=kind)
    assert step.num_compiles == 1


def test_plain_values_of_a_record_are_a_part_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    step = sgd_step(model, loss_fn, rate=0.0)
    state, batch = step.init(), Record(torch.randn(BATCH, 8), torch.randn(BATCH, 4))
    with caplog.at_level(logging.INFO):
        for batch.scale in (2, 3):
            state, metrics = step(state, batch)
            torch.testing.assert_close(torch.tensor(float(metrics["loss"])), loss_fn(eager, batch).detach())
    assert "compiles again: in the batch, 2 is now 3" in caplog.text


def test_what_is_no_array_may_stand_beside_a_mapping_and_is_refused_where_it_is_read() -> None:
    """Batches of fast tokenizers have the encodings beside the tensors."""
    model, batch = nn.Linear(8, 4), BatchEncoding({"x": torch.randn(BATCH, 8), "y": torch.randn(BATCH, 4)})
    batch._encodings = [object()]
    wanted = loss_fn(model, batch).detach()
    step = sgd_step(model, loss_fn, rate=0.0)
    state, metrics = step(step.init(), batch)
    torch.testing.assert_close(torch.tensor(float(metrics["loss"])), wanted)
    batch._encodings = [object()]
    step(state, batch)
    assert step.num_compiles == 1
    reads = sgd_step(model, lambda m, b: loss_fn(m, b) * len(b._encodings), rate=0.0)
    with refuses(r"reads batch\._encodings, of type list, which is neither an array nor", NotImplementedError):
        reads(reads.init(), batch)


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": iter([1])}, r"batch\['x'\] is of type list_iterator"),
        (Plain(torch.ones(8, 8)), "batch is of type Plain"),
        (Record(torch.ones(8, 8), torch.ones(8, 4), Plain(torch.ones(1))), r"batch\.scale is of type Plain"),  # pyright: ignore
    ],
)
def test_other_objects_are_refused_by_name(batch: Any, words: str) -> None:
    step = sgd_step(nn.Linear(8, 4), loss_fn, rate=0.0)
    with refuses(rf"{words}, which is neither an array nor a dict, a tuple or a dataclass\. Pass its", TypeError):
        step(step.init(), batch)
