"""Python that asks for a value, or a size, that depends on the batch: computed on the host before each call."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.steps import step_of
from torch_shard._train.program_cache import PAID_OFF, Causes

Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(*labels: int) -> Batch:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(sum(labels))), torch.tensor(labels)


A, B, C = batch_of(0, 1, 2, 0, 1, 2, 2, 1), batch_of(3, 1, 2, 0, 1, 3, 2, 1), batch_of(0, 0, 1, 0, 1, 1, 0, 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def number_of_groups(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, place = batch
    size = int(place.max()) + 1
    return (torch.zeros(size, 4).index_add(0, place, model(x)) / size).square().sum()


def pairs(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    y = model(x)
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    first, second = torch.where(same)
    if len(first) == 0:
        return y.sum() * 0
    return (y[first] - y[second]).square().sum(1).mean()


def sorted_selection(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    chosen = model(x)[labels > 0]
    return (chosen.sort(0)[0] * torch.arange(1, len(chosen) + 1)[:, None]).mean()


def one_after_another(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each question depends on what came out of the one before."""
    x, labels = batch
    where = torch.nonzero(labels)[:, 0]
    half = where[: len(where) // 2]
    kept = half[labels[half] > 1]
    return model(x)[kept].sum() * (1 if kept.numel() > 1 else 2) + model(x).square().mean()


def written(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What is asked for is written in place, before and after."""
    x, labels = batch
    counts = torch.zeros(4)
    counts.index_add_(0, labels, torch.ones(8))
    most = int(counts[:2].max())
    counts.zero_()
    return model(x)[:, :most].square().mean() + counts.sum()


def like_what_is_computed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mask that is made like a result of the model, whose values do not matter to it."""
    x, labels = batch
    y = model(x)
    mask = torch.zeros_like(y)
    mask[torch.arange(8), labels] = 1
    if mask.bool().any() and (mask[:, 3] > 0).any():
        return y.square().mean()
    return (y * mask).sum()


def signed(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, _ = batch
    return model(x).square().mean() * math.copysign(1.0, x[0, 0].item())


def test_zeros_of_either_sign_are_two_values() -> None:
    x, labels = A
    batches = [(torch.cat([torch.full_like(x[:1], zero), x[1:]]), labels) for zero in (0.0, -0.0)]
    agrees_with_torch(net(), signed, batches)


@pytest.mark.parametrize("loss_fn", [sorted_selection, one_after_another, written, like_what_is_computed])
def test_equals_eager_torch(loss_fn: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
    agrees_with_torch(net(), loss_fn, [A, B, A])


def test_indices_of_one_length_are_inputs_of_one_program() -> None:
    step = step_of(net(), pairs)
    state, _ = step(step.init(seed=0), A)
    x, labels = A
    model = step.export(state)
    state, metrics = step(state, (x, labels.flip(0)))
    assert step.num_compiles == 1
    assert float(metrics["loss"]) == pytest.approx(pairs(model, (x, labels.flip(0))).item(), rel=1e-5)


def with_groups(number: int) -> Batch:
    return A[0], torch.arange(8).clamp(max=number - 1)


def test_the_fourth_new_value_is_a_warning_and_the_eighth_an_error(caplog: Any) -> None:
    step = step_of(net(), number_of_groups, mesh=(1, 1))
    state = step.init(seed=0)
    for number in range(1, 9):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            state, _ = step(state, with_groups(number % 8 or 8))
        warned = [record.getMessage() for record in caplog.records if "This is program" in record.getMessage()]
        assert len(warned) == (number == 5)
        if warned:
            assert "int(place.max()) + 1" in warned[0]
            assert "a value of batch[1]: it was 3 and is 4 (so far 0, 1, 2, 3, 4)" in warned[0]
            assert "Pad what differs in size" in warned[0]
    state, _ = step(state, with_groups(3))  # an old one is no new program
    wanted = (
        r"make_train_step: File .*int\(place\.max\(\)\) \+ 1\nHere Python asks for a value of batch\[1\]: .* is 11 "
        r"\(so far 0, 1, 2, 3, 4, 5, 6, 7, 11\), which would be program 9\. .*pass it as data"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        step(state, (A[0], torch.full((8,), 11)))
    assert step.num_compiles == 8


def test_microbatches_that_agree() -> None:
    """In turn, each microbatch has the rows of each shard: these are of all classes in both halves."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 0, 1] * 4)
    step = step_of(net(), pairs, accumulate_steps=2)
    state = step.init(seed=0)
    step.prove(state, (x, labels)).raise_if_different()
    state, _ = step(state, (x, labels))
    step.prove(state, (x, 1 - labels)).raise_if_different()
    state, _ = step(state, (x, 1 - labels))
    assert step.num_compiles == 1


def test_microbatches_that_need_two_programs_are_refused() -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 0, 2] * 4)
    step = step_of(net(), number_of_groups, accumulate_steps=2)
    wanted = r"make_train_step: .*int\(place.max\(\)\).*\n.* in microbatch 1 of the same batch.*accumulate_steps=1"
    with pytest.raises(NotImplementedError, match=wanted):
        step(step.init(seed=0), (x, torch.where(torch.arange(16) % 4 < 2, 0, labels)))


def caught(model: nn.Module, batch: Batch) -> torch.Tensor:
    try:
        size = int(batch[1].max())
    except Exception:
        size = 1
    return model(batch[0])[:, :size].sum()


@pytest.mark.parametrize(("loss_fn", "line"), [(number_of_groups, "place"), (caught, r"batch\[1\]")])
def test_rows_of_one_process_are_refused_though_the_loss_catches_it(loss_fn: Any, line: str) -> None:
    step = step_of(net(), loss_fn, local_batches=True)
    wanted = rf"int\({line}\.max\(\)\).*\n.*local_batches=True.*pass it as data"
    with pytest.raises(NotImplementedError, match=wanted):
        step(step.init(seed=0), A)


def test_shapes_alone_are_refused() -> None:
    step = step_of(net(), number_of_groups)
    shapes = torch.empty(8, 6, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"of which only shapes were given. Give a batch with values"):
            step.lower(step.structs, shapes)
        step(step.init(seed=0), A)
    assert step.lower(step.structs, A).as_text()


def test_a_proof_an_evaluation_and_a_batch_that_was_put_ahead() -> None:
    step = step_of(net(), pairs)
    state = step.init(seed=0)
    evaluate = step.evaluation()
    step.prove(state, A).raise_if_different()
    for batch in (A, C):
        wanted = pairs(step.export(state), batch).item()
        assert float(evaluate(state, batch)["loss"]) == pytest.approx(wanted, rel=1e-5)
        labels = batch[1].clone()
        ahead = step.put((batch[0], labels))
        if step.programs:  # from then on the step has its own copy
            labels.fill_(0)
        state, metrics = step(state, ahead)
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_a_program_that_comes_later_asks_a_batch_that_was_put_ahead() -> None:
    asks = {"now": False}
    step = step_of(net(), lambda model, x: model(x).square().mean() * (float(x.max()) if asks["now"] else 1.0))
    x = torch.ones(8, 6)
    state, first = step(step.init(), x)
    buffer = torch.ones(8, 6)
    ahead, asks["now"] = step.put(buffer), True
    buffer.fill_(9.0)
    wanted = float(step.evaluation()(state, x)["loss"])
    assert float(step(state, ahead)[1]["loss"]) == pytest.approx(wanted, rel=1e-5) != float(first["loss"])


def test_a_value_may_come_as_an_array_or_a_number() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])[:, : int(batch["kept"])].square().sum() / batch["sizes"].sum().item()

    step = step_of(net(), loss_fn)
    state = step.init(seed=0)
    for kept in (2, 3):
        batch = {"x": A[0].numpy(), "kept": kept, "sizes": ts.jax_view(torch.ones(8).to("jax"))}
        wanted = loss_fn(step.export(state), {"x": A[0], "kept": torch.tensor(kept), "sizes": torch.ones(8)}).item()
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)


def of_a_draw(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0])[:, : int((torch.rand(8) + batch[1]).max())].sum()


def of_a_parameter(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0])[:, : int(model.weight[batch[1]].argmax())].sum()


def of_a_result(model: nn.Module, batch: Batch) -> torch.Tensor:
    y = model(batch[0])
    return y[y.argmax(1) == batch[1]].sort(0)[0].sum()


@pytest.mark.parametrize("loss_fn", [of_a_draw, of_a_parameter, of_a_result])
def test_what_depends_on_more_than_the_batch_is_refused(loss_fn: Any) -> None:
    step = step_of(net(), loss_fn)
    with pytest.raises(NotImplementedError, match=rf"in {loss_fn.__name__}: .*\n.*torch\.where"):
        step(step.init(seed=0), A)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, kept: int | None = None) -> torch.Tensor:
        kept = int(lengths.max()) if kept is None else kept
        return x + torch.tanh(self.linear(x)) * (torch.arange(6) < kept)


class Layers(nn.Module):
    def __init__(self, outside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.outside = nn.ModuleList([Layer() for _ in range(4)]), outside

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        kept = int(lengths.max()) if self.outside else None
        for layer in self.layers:
            x = layer(x, lengths, kept)
        return x


@pytest.mark.parametrize("outside", [True, False])
def test_repeated_layers(outside: bool) -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(*batch).square().mean()

    step = agrees_with_torch(Layers(outside), loss_fn, [A, B])
    assert len(step.programs[0].loops) == (2 if outside else 0)


TABLE = torch.zeros(4)


def test_a_tensor_that_is_assigned_anew_in_each_step_is_told_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - TABLE).square().mean()

    step = step_of(net(), loss_fn, mesh=(1, 1))
    state = step.init(seed=0)
    with caplog.at_level(logging.WARNING):
        for number in range(8):
            monkeypatch.setattr("tests.train.test_asked_batch.TABLE", torch.full((4,), float(number)))
            state, _ = step(state, A[0])
    (said,) = [r.getMessage() for r in caplog.records if "This is program" in r.getMessage()]
    assert "TABLE, which the loss reads, has another value" in said
    assert "x.copy_(new)" in said
    monkeypatch.setattr("tests.train.test_asked_batch.TABLE", torch.full((4,), 9.0))
    with pytest.raises(
        NotImplementedError, match=r"make_train_step: TABLE.*program 9\. Pass what changes.*register_buf"
    ):
        step(state, A[0])


def test_a_program_that_ran_often_does_not_count() -> None:
    causes = Causes("make_train_step")
    for _ in range(20):
        causes.note("self.temperature has another value", PAID_OFF + 1)


class Alternates(nn.Module):
    """Selects by another label in each call, of which there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.label = nn.Linear(6, 4), 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.label += 1
        (chosen,) = torch.where(labels == self.label % 2)
        return self.layer(x)[chosen].square().mean()


def test_another_question_in_each_call_is_another_program() -> None:
    step = step_of(Alternates(), lambda model, batch: model(*batch))
    with pytest.raises(NotImplementedError, match=r"changes the plain attribute label on each call and depends on it"):
        step(step.init(), batch_of(0, 1, 0, 1, 0, 1, 1, 0))
