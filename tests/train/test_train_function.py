"""`ts.train_step`: what a step of the user's own may do, as in eager torch, and what it may not, by its line."""

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import torch_shard as ts
from tests.loss.test_effects import assert_same

Step = Callable[..., Any]
Make = Callable[[nn.Module, torch.optim.Optimizer], Step]
STEPS: dict[str, Make] = {}
REFUSED: dict[str, tuple[Make, str]] = {}


def step(make: Make) -> Make:
    STEPS[make.__name__] = make
    return make


def refused(match: str) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        REFUSED[make.__name__] = make, match
        return make

    return note


@step
def clipped_by_an_imported_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.item(), norm.item()

    return train


@step
def clipped_by_value(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    parameters = list(model.parameters())

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        for parameter in parameters:
            parameter.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(parameters, 0.01)
        optimizer.step()
        return loss.item()

    return train


@step
def microbatches(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for part in range(2):
            rows = slice(8 * part, 8 * part + 8)
            loss = F.cross_entropy(model(x[rows]), y[rows]) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return train


@step
def with_a_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autograd.profiler.record_function("step"):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return train


@step
def within_an_if(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    clips = True

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        if clips:
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found = norm * 2
        else:
            optimizer.step()
            found = loss
        right = (out.argmax(-1) == y).float().mean()
        return found.item(), right.item()

    return train


@step
def written_to_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    averaged, calls = torch.optim.swa_utils.AveragedModel(model), 0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    history = []

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal calls
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        history.append(loss.item())
        loss.backward()
        optimizer.step()
        scheduler.step()
        calls += 1
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        averaged.update_parameters(model)
        model.eval()
        with torch.no_grad():
            after = F.cross_entropy(model(x), y).item()
        history.append(after)
        return [sum(p.sum().item() for p in averaged.parameters()), calls, scheduler.get_last_lr(), list(history)]

    return train


@step
def a_penalty_on_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        model.zero_grad()
        at = x.clone().requires_grad_(True)
        slope = torch.autograd.grad(model(at).sum(), at, create_graph=True)[0]
        loss = F.cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


@step
def flags_of_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        model.eval()
        optimizer.step()
        found = model.training
        model.train()
        return loss.item(), found

    return train


@step
def names_across_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        first = loss.detach().clone()
        second, kept = first, [1]
        other, last = {"kept": kept}, collections.deque([loss.detach()], maxlen=2)
        loss.backward()
        optimizer.step()
        first.add_(1)
        kept.append(2)
        import math as later

        last.extend([1.0, 2.0])
        return first.item(), second.item(), other["kept"], later.pi, list(last)

    return train


class Log:
    def __init__(self) -> None:
        self.all: list[int] = []


@step
def its_own_containers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    log = Log()

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        kept, of_this_call = log, {"rows": len(x)}
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        of_this_call["loss"] = loss
        loss.backward()
        optimizer.step()
        kept.all.append(of_this_call["rows"])
        of_this_call["loss"] = of_this_call["loss"].item()
        return of_this_call, list(log.all)

    return train


@step
def learning_rates_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return loss.item(), optimizer.param_groups[0]["lr"]

    return train


def only_backward(model: nn.Module, optimizer: torch.optim.Optimizer, around: Callable[..., Any]) -> Step:
    """A step of which `around` does what comes after the loss."""

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        around(loss)
        optimizer.step()
        return loss.item()

    return train


@refused("does not call zero_grad")
def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


@refused(r"test_train_function.*\ntrain_step: backward\(\) is given retain_graph")
def a_graph_that_stays(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: loss.backward(retain_graph=True))


@refused(r"test_train_function.*\ntrain_step: optimizer\.step\(\) comes before backward")
def no_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: None)


@refused(r"test_train_function.*\ntrain_step: a gradient is read between")
def a_gradient_that_is_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (loss.backward(), [p.grad for p in model.parameters()]))


@refused(r"test_train_function.*\ntrain_step: a gradient is written")
def a_gradient_that_is_written(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def around(loss: torch.Tensor) -> None:
        loss.backward()
        next(model.parameters()).grad = torch.zeros(16, 8)

    return only_backward(model, optimizer, around)


@refused(r"test_train_function.*\ntrain_step: zero_grad\(\) comes between")
def gradients_taken_away(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (loss.backward(), optimizer.zero_grad()))


@refused(r"test_train_function.*\ntrain_step: only some of the gradients are clipped")
def a_part_that_is_clipped(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (loss.backward(), clip_grad_norm_(model[0].parameters(), 1.0)))


@refused(r"test_train_function.*\ntrain_step: the gradients are clipped before backward")
def clipped_too_early(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (clip_grad_norm_(model.parameters(), 1.0), loss.backward()))


@refused(r"test_train_function.*\ntrain_step: the norm that clip_grad_norm_ returns is read before")
def a_norm_that_decides(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def around(loss: torch.Tensor) -> None:
        loss.backward()
        if clip_grad_norm_(model.parameters(), 1.0) > 100:
            raise RuntimeError

    return only_backward(model, optimizer, around)


@refused(r"test_train_function.*\ntrain_step: the function steps another optimizer, SGD")
def two_optimizers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    return only_backward(model, optimizer, lambda loss: (loss.backward(), other.step()))


@refused(r"test_train_function.*\ntrain_step: GradScaler is for float16")
def a_scaler_for_float16(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu")
    return only_backward(model, optimizer, lambda loss: scaler.scale(loss).backward())


@refused(r"test_train_function.*\ntrain_step: optimizer\.step\(\) is called by update")
def a_step_in_a_helper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    calls = []

    def update() -> None:
        optimizer.step()
        calls.append(1)

    return only_backward(model, optimizer, lambda loss: (loss.backward(), update()))


@refused(r"test_train_function.*\ntrain_step: optimizer\.step is given a closure")
def a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (loss.backward(), optimizer.step(lambda: loss.item())))


@refused("Here Python needs the value of a tensor")
def a_backward_that_depends(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: loss.backward() if loss > 0 else None)


@refused("returns without optimizer.step")
def no_step_at_this_call(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return train


@refused("writes to optimizer.param_groups before")
def a_learning_rate_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def around(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.25

    return only_backward(model, optimizer, around)


@refused("cannot be cut behind optimizer.step.*a `try`")
def a_step_within_a_try(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        finally:
            model.eval()

    return train


@refused("log, of class function, is made before optimizer.step")
def a_function_of_the_first_part(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        kept: list[str] = []

        def log(text: str) -> None:
            kept.append(text)

        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        log("a step")
        return kept

    return train


@pytest.mark.parametrize("view", [torch.Tensor.detach, torch.Tensor.t, lambda p: p.data, lambda p: p[0]])
def test_a_view_of_a_parameter_from_before_the_step_is_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        def train(x: torch.Tensor, y: torch.Tensor) -> Any:
            weight = view(model[0].weight)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            return weight.sum().item()

        return train

    with pytest.raises(NotImplementedError, match="weight is a view of a parameter or a buffer"):
        run(make, ours=True)


@refused("the attribute tag of the model is set before optimizer.step")
def an_attribute_of_the_model(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    model.tag = "before"

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        model.tag = "now"
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return model.tag

    return train


@refused("does not call zero_grad")
def zeroed_in_part(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        for parameter in model[0].parameters():
            parameter.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


@refused("does not call zero_grad")
def zeroed_at_times(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    calls = []

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        calls.append(1)
        if len(calls) % 2 == 0:
            optimizer.zero_grad()
        return loss.item()

    return train


@refused(r"zero_grad\(\) comes between")
def a_part_taken_away(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    return only_backward(model, optimizer, lambda loss: (loss.backward(), model[2].zero_grad()))


@refused("is written between backward")
def weights_written_after_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def around(loss: torch.Tensor) -> None:
        loss.backward()
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    return only_backward(model, optimizer, around)


@refused("is written between backward")
def results_written_after_backward(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        loss = F.cross_entropy(model[2](hidden), y)
        loss.backward()
        hidden.data.zero_()
        optimizer.step()
        return loss.item()

    return train


@refused("the function steps another optimizer")
def another_optimizer_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scale = torch.ones((), requires_grad=True)
    other = torch.optim.SGD([scale], lr=1.0)

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) * scale, y)
        loss.backward()
        optimizer.step()
        other.step()
        return loss.item()

    return train


@refused("is read between backward")
def a_gradient_of_an_input(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        at = x.clone().requires_grad_()
        F.cross_entropy(model(at), y).backward()
        found = 0 if at.grad is None else 1
        optimizer.step()
        return found

    return train


@refused("at may have a gradient")
def a_gradient_of_an_input_later(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        at = x.clone().requires_grad_()
        F.cross_entropy(model(at), y).backward()
        optimizer.step()
        return at.grad is None

    return train


@refused("comes to optimizer.step.* in line")
def two_places(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    big = [True, False, True, False]

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if big[0]:
            optimizer.step()
            kind = "big"
        else:
            optimizer.step()
            kind = "small"
        del big[0]
        return kind

    return train


@refused("it is a part of another statement")
def more_in_the_statement(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    calls = []

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step() or calls.append(1)
        return calls

    return train


@refused("a `with` is around it")
def within_a_context(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autograd.profiler.record_function("step"):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return train


@refused(r"locals\(\) is used")
def all_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return sorted(locals())

    return train


@refused("an argument is written before")
def an_argument_that_is_written(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return train


@refused("an argument is written after")
def an_argument_that_is_written_later(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        x.mul_(2)

    return train


@refused("row?, which is a view of another tensor,")
def a_view_that_is_written(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        rows = model(x)
        F.cross_entropy(rows, y).backward()
        ro = rows.detach()
        row = ro[0]
        optimizer.step()
        ro.zero_()
        return row.sum().item()

    return train


@refused("record is made before optimizer.step.*kept elsewhere")
def a_record_that_is_kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    records: list[Any] = []

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        record = {"loss": loss.item()}
        records.append(record)
        loss.backward()
        optimizer.step()
        record["rows"] = len(x)
        return records[-1]

    return train


def test_containers_among_the_arguments_are_the_callers() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @decorated(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, history: list[float], calls: list[int] = []) -> Any:  # noqa: B006
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        calls.append(1)
        return len(calls), y.dtype

    history: list[float] = []
    assert [train(*batch, history) for batch in batches(3)] == [(1, torch.int64), (2, torch.int64), (3, torch.int64)]
    assert len(history) == 3


def test_a_variable_with_a_value_at_some_calls_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    on = [True]

    @decorated(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        if on[0]:
            extra = 5
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return extra if on[0] else 0

    assert train(*batches()[0]) == 5
    on[0] = False
    with pytest.raises(NotImplementedError, match=r"extra, which is used after .* has a value at some calls only"):
        train(*batches()[0])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(number: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))
        for _ in range(number)
    ]


def decorated(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    mesh = ts.make_mesh(batch=4, model=2)
    return ts.train_step(model, optimizer, mesh=mesh, plan=ts.plans.fsdp_tp, **options)


def run(make: Make, *, ours: bool, **options: Any) -> tuple[list[Any], Any, Any]:
    """What a step returns for some batches, the weights and moments then, and the step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train: Any = make(model, optimizer)
    if ours:
        train = decorated(model, optimizer, **options)(train)
    returned = [train(*batch) for batch in batches()]
    values = [value.detach().to("cpu") for value in model.state_dict().values()]
    values += [of["momentum_buffer"].detach().to("cpu") for of in optimizer.state_dict()["state"].values()]
    return returned, values, train


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_in_eager_torch(name: str) -> None:
    theirs = run(STEPS[name], ours=False)
    ours = run(STEPS[name], ours=True)
    assert_same(ours[:2], theirs[:2])
    assert ours[2].step.num_compiles <= 1 + (name in MORE)


MORE = ("written_to_after_the_step",)
"""Steps with other training flags of the model at their second call."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused_by_its_line(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"(?s){match}"):
        run(make, ours=True)


def test_an_argument_that_wants_a_gradient_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = decorated(model, optimizer)(STEPS["clipped_by_value"](model, optimizer))
    x, y = batches()[0]
    with pytest.raises(NotImplementedError, match="an argument requires a gradient"):
        train(x.requires_grad_(), y)


def test_microbatches_of_the_step_give_means() -> None:
    make = STEPS["clipped_by_value"]
    assert_same(run(make, ours=True, accumulate_steps=2)[:2], run(make, ours=False)[:2])
    with pytest.raises(NotImplementedError, match=r"out is used after optimizer\.step.*accumulate_steps"):
        run(STEPS["within_an_if"], ours=True, accumulate_steps=2)


def test_arguments_are_of_any_kind() -> None:
    def losses(ours: bool) -> list[Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(batch: Any, *more: torch.Tensor, scale: float = 1.0, smooth: bool = False) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"] + sum(more)) * scale, batch["y"]) * (2 if smooth else 1)
            loss.backward()
            optimizer.step()
            return {"loss": loss.item(), "scale": scale, "rows": len(batch["x"])}

        function = decorated(model, optimizer)(train) if ours else train
        return [
            function({"y": y, "x": x}, x, x.numpy() if ours else x, scale=0.5 + number, smooth=number > 1)
            for number, (x, y) in enumerate(batches())
        ]

    assert_same(losses(True), losses(False))


def test_methods_and_two_functions_of_one_model() -> None:
    class Trainer:
        def __init__(self, ours: bool) -> None:
            self.model: Any = net()
            self.first = torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9)
            self.last = torch.optim.Adam(self.model[2].parameters(), lr=0.1)
            self.calls = 0
            self.steps: list[Any] = [self.train_first, self.train_last]
            if ours:
                optimizers = self.first, self.last
                pairs = zip(optimizers, self.steps, strict=True)
                self.steps = [decorated(self.model, optimizer)(function) for optimizer, function in pairs]

        def train_first(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.first.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            clip_grad_norm_(self.model[0].parameters(), 0.1)
            self.first.step()
            self.calls += 1
            return loss.item()

        def train_last(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.last.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.last.step()
            self.calls += 1
            return loss.item()

    found = []
    for ours in (True, False):
        trainer = Trainer(ours)
        losses = [function(*batch) for batch in batches() for function in trainer.steps]
        weights = [value.detach().to("cpu") for value in trainer.model.state_dict().values()]
        found.append((losses, weights, trainer.calls))
    assert_same(*found)


def test_state_preview_proof_and_evaluation_are_those_of_the_step(tmp_path: pathlib.Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, decorated(model, optimizer)(STEPS["microbatches"](model, optimizer))

    data = batches(4)
    _, train = made()
    with pytest.raises(ValueError, match="made at the first call, or by begin"):
        _ = train.state
    assert train.preview(*data[0]).fits is not False
    losses = [train(*batch) for batch in data[:2]]
    assert int(train.state.step) == 2
    train.prove(*data[2]).raise_if_different()
    ts.Checkpointer(tmp_path).save(train.state)
    evaluated = train.step.evaluation()(train.state, dict(zip("xy", data[2], strict=True)))["loss"]
    losses += [train(*batch) for batch in data[2:]]
    torch.testing.assert_close(float(evaluated), losses[2], rtol=1e-5, atol=0)

    _, again = made()
    ts.Checkpointer(tmp_path).restore(again.begin(*data[0]))
    assert [again(*batch) for batch in data[2:]] == losses[2:]
    assert int(again.state.step) == 4


def test_what_is_returned_is_on_the_device() -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def train(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss, norm, x

        return train

    returned, _, _ = run(make, ours=True)
    for tensors in returned:
        assert all(tensor.device.type == "jax" for tensor in tensors)
        assert all(isinstance(tensor.jax(), jax.Array) for tensor in tensors)


def test_wrong_arguments_of_the_decorator() -> None:
    model, mesh = net(), ts.make_mesh(batch=4, model=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer is the torch\.optim optimizer"):
        ts.train_step(model, object(), mesh=mesh, plan=ts.plans.fsdp)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="clip_grad_norm is read from the function"):
        ts.train_step(model, optimizer, mesh=mesh, plan=ts.plans.fsdp, clip_grad_norm=1.0)
    with pytest.raises(ValueError, match="the optimizer has parameters that Sequential has not"):
        ts.train_step(model, other, mesh=mesh, plan=ts.plans.fsdp)(lambda x: x)
    with pytest.raises(TypeError, match="above the definition of a function, and is given Linear"):
        ts.train_step(model, optimizer, mesh=mesh, plan=ts.plans.fsdp)(nn.Linear(2, 2))
