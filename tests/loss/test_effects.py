"""Numbers that Python only keeps: lists, sums, texts and logs after some steps are those of eager torch."""

import collections
import copy
import dataclasses
import io
import json
import logging
import math
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

Loss = Callable[[Any, torch.Tensor], Any]
Script = Callable[[nn.Module], tuple[Loss, Callable[[], Any]]]
"""Makes a loss, and what reads all that it has kept."""

SCRIPTS: dict[str, Script] = {}
REFUSED: dict[str, tuple[Script, str]] = {}


def script(make: Script) -> Script:
    SCRIPTS[make.__name__] = make
    return make


def refused(match: str) -> Callable[[Script], Script]:
    def note(make: Script) -> Script:
        REFUSED[make.__name__] = make, match
        return make

    return note


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@script
def appended(model: nn.Module) -> Any:
    history = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        history.append(loss.item())
        history.append(loss.item() > 0.3)
        return loss

    return loss_fn, lambda: history


@script
def set_default(model: nn.Module) -> Any:
    log: dict[str, Any] = {}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        log.setdefault("all", []).append(loss.item())
        log["last"] = loss.item()
        log["sum"] = log.get("sum", 0) + loss.item()
        log["each"] = [loss.item()]
        return loss

    return loss_fn, lambda: log


class Trainer:
    """As those of libraries: metrics by mode that are cleared when they are logged, and counts."""

    def __init__(self) -> None:
        self.metrics = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}
        self.tokens, self.steps, self.scale = 0, 0, 2.0
        self.logged: list[Any] = []

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        self.metrics["train"]["loss"].append(loss.item() * self.scale)
        self.tokens += (x > 0).sum().item()
        self.metrics["train"]["tokens"] = [self.tokens]
        self.steps += 1
        return self.checked(loss)

    def checked(self, loss: torch.Tensor) -> torch.Tensor:
        self.metrics["train"]["half"].append(loss.item() / 2)
        return loss


@script
def trainer(model: nn.Module) -> Any:
    own = Trainer()

    def read() -> Any:
        own.logged.append({name: sum(values) / len(values) for name, values in own.metrics["train"].items()})
        own.metrics["train"].clear()
        return own.logged, own.tokens, own.steps

    return own.loss, read


@script
def running(model: nn.Module) -> Any:
    total = 0.0

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        loss = square(model, x)
        total = 0.9 * total + 0.1 * loss.item()
        return loss

    return loss_fn, lambda: total


TOTAL, LAST = 0.0, None


@script
def in_globals(model: nn.Module) -> Any:
    global TOTAL
    TOTAL = 0.0

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        global TOTAL, LAST
        loss = square(model, x)
        TOTAL += loss.item()
        LAST = loss.item()
        return loss

    return loss_fn, lambda: (TOTAL, LAST)


class AverageMeter:
    def __init__(self) -> None:
        self.val, self.avg, self.sum, self.count = 0, 0, 0, 0

    def update(self, value: float, num: int) -> None:
        self.val = value
        self.sum += value * num
        self.count += num
        self.avg = self.sum / self.count


@script
def meters(model: nn.Module) -> Any:
    own = {"loss": AverageMeter(), "positive": AverageMeter()}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        own["loss"].update(loss.item(), x.shape[0])
        own["positive"].update((x > 0).float().mean().item() * 100, x.shape[0])
        return loss

    return loss_fn, lambda: [vars(meter) for meter in own.values()]


@script
def on_the_module(model: nn.Module) -> Any:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        model.last = loss.item()
        model.all = getattr(model, "all", [])
        model.all.append(loss.item())
        return loss

    return loss_fn, lambda: (model.last, model.all)


@script
def computed(model: nn.Module) -> Any:
    kept = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        value = loss.item()
        kept.append((math.exp(value), round(value, 2), -value // 2, abs(value - 1), value**2, 2**value))
        kept.append([sum([value, value]) / 2, np.sqrt(value), math.isnan(value), divmod(value, 0.1)])
        kept.append(model(x).mean(0).tolist())
        return loss

    return loss_fn, lambda: kept


@script
def texts(model: nn.Module) -> Any:
    lines = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        lines.append(f"{loss.item():.3f}")
        lines.append(f"loss {loss:.2f} of {x.shape[0]} rows, " + str(loss.item() > 0))
        model.text = "{:.1f}!".format(loss.item())  # noqa: UP032
        return loss

    return loss_fn, lambda: (lines, model.text)


@script
def told(model: nn.Module) -> Any:
    logger = logging.getLogger("of this test")

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        print(f"loss {loss.item():.3f}", loss.item() > 0, sep=" | ")  # noqa: T201
        print("rows", x.sum(0)[:2])  # noqa: T201
        logger.warning("loss %.3f of %s", loss.item(), "a step")
        return loss

    return loss_fn, lambda: None


@script
def queue(model: nn.Module) -> Any:
    last = collections.deque(maxlen=2)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        last.append(("loss", loss.item()))
        return loss

    return loss_fn, lambda: last


@script
def newest_first(model: nn.Module) -> Any:
    history = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        history.insert(0, loss.item())
        return loss

    return loss_fn, lambda: history


@script
def emptied(model: nn.Module) -> Any:
    history, sums = [], [0.0]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        history.clear()
        history.append(loss.item())
        sums[-1] += loss.item()
        return loss

    return loss_fn, lambda: (history, sums)


@dataclasses.dataclass
class Record:
    total: float = 0.0
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    a: float = 1.0
    b: float = 2.0


@script
def record(model: nn.Module) -> Any:
    own = Record()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        own.total += x.shape[0] * loss.item()
        own.last = {"loss": loss.item(), "fixed": [1, 2]}
        own.a, own.b = own.b + loss.item(), own.a * 2
        return loss

    return loss_fn, lambda: dataclasses.asdict(own)


@script
def first_then_mean(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        if hasattr(own, "mean"):
            own.mean = 0.5 * own.mean + 0.5 * loss.item()
        else:
            own.mean = loss.item()
        return loss

    return loss_fn, lambda: own.mean


@script
def hooks(model: nn.Module) -> Any:
    kept = []
    model[0].register_forward_hook(lambda module, args, out: kept.append(out.mean().item()))
    model[0].weight.register_hook(lambda grad: kept.append(grad.norm().item()))
    return square, lambda: kept


@script
def checked(model: nn.Module) -> Any:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        if math.isnan(loss.item()):
            raise RuntimeError("not a number")
        assert loss.item() >= 0
        return loss

    return loss_fn, lambda: None


@script
def metrics_of_numbers(model: nn.Module) -> Any:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        loss = square(model, x)
        return loss, {"twice": 2 * loss.item()}

    return loss_fn, lambda: None


@script
def tensors(model: nn.Module) -> Any:
    kept: dict[str, Any] = {"all": []}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        kept["all"].append((loss.detach(), loss.item(), (x > 0).sum()))
        kept["out"] = model(x).detach()
        return loss

    return loss_fn, lambda: kept


@script
def features_of_a_hook(model: nn.Module) -> Any:
    features = []
    model[0].register_forward_hook(lambda module, args, out: features.append(out))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        features.clear()
        model(x)
        return features[0].square().mean()

    return loss_fn, lambda: [feature.detach() for feature in features]


class Pair(NamedTuple):
    total: float
    rows: int


@script
def pairs(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()
    own.plain, own.named = (0.0, 0), Pair(0.0, 0)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        own.plain = own.plain[0] + loss.item(), own.plain[1] + len(x)
        own.named = Pair(own.named.total + loss.item(), own.named.rows + len(x))
        return loss

    return loss_fn, lambda: (own.plain, own.named)


@script
def two_names(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()
    history = own.history = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        history.append(loss.item())
        own.history.append(1.0)
        return loss

    return loss_fn, lambda: (history, own.history)


@script
def counts_and_plain_values(model: nn.Module) -> Any:
    """Without a number of the step: they are those of each step all the same."""
    own: Any = type("State", (), {})()
    own.calls, model.rows, shapes, counts = 0, 0, [], {"calls": 0}

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        own.calls += 1
        model.rows += len(x)
        counts["calls"] += 1
        shapes.append(tuple(x.shape))
        return square(model, x) / len(x)

    return loss_fn, lambda: (own.calls, model.rows, counts, shapes)


@script
def counted_and_told(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()
    own.step, lines = 0, []
    logger = logging.getLogger("of this test")

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own.step += 1
        loss = square(model, x)
        print(f"step {own.step}: {loss.item():.3f}")  # noqa: T201
        print("step", own.step, x.shape, x.dtype)  # noqa: T201
        logger.warning("step %d of %d rows", own.step, len(x))
        lines.append(f"step {own.step}: {loss.item():.3f}")
        return loss

    return loss_fn, lambda: (own.step, lines)


@refused("Here Python needs the value of a tensor")
def asked(model: nn.Module) -> Any:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        return loss * 2 if loss.item() > 1 else loss

    return loss_fn, lambda: None


@refused("Here Python needs the value of a tensor")
def smallest(model: nn.Module) -> Any:
    best = [1e9]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        best[0] = min(best[0], loss.item())
        return loss

    return loss_fn, lambda: best


@refused("Here Python asks for a number that the captured function itself keeps")
def sum_that_is_asked(model: nn.Module) -> Any:
    own = Record()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x) if own.total < 1e9 else square(model, 2 * x)
        own.total += loss.item()
        return loss

    return loss_fn, lambda: own.total


@refused("Here Python asks for a number that the captured function itself keeps")
def loss_of_the_last_step(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()
    own.loss = 1.0

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x) * own.loss
        own.loss = loss.item()
        return loss

    return loss_fn, lambda: own.loss


@refused("each call of the captured function changes history")
def length_that_is_asked(model: nn.Module) -> Any:
    history: list[float] = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x) * (2 if len(history) > 2 else 1)
        history.append(loss.item())
        return loss

    return loss_fn, lambda: history


@refused("Here Python asks for a number that the captured function itself keeps .* a count")
def count_that_is_asked(model: nn.Module) -> Any:
    own: Any = type("State", (), {})()
    own.step = 0

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own.step += 1
        return square(model, x) * (2 if own.step > 2 else 1)

    return loss_fn, lambda: own.step


@refused("Here Python needs the value of a tensor")
def error_that_is_caught(model: nn.Module) -> Any:
    kept = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        try:
            kept.append("zero" if int(loss.item()) == 0 else "more")
        except Exception:
            kept.append("none")
        return loss

    return loss_fn, lambda: kept


@refused("Here Python needs the value of a tensor")
def type_that_is_asked(model: nn.Module) -> Any:
    kept = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        kept.append(type(loss.item()) is float)
        return loss

    return loss_fn, lambda: kept


@refused("nobody is seen to keep it")
def part_of_a_text(model: nn.Module) -> Any:
    lines = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        lines.append(f"{loss.item():.6f}"[:4])
        return loss

    return loss_fn, lambda: lines


@refused("nobody is seen to keep it")
def text_written_at_once(model: nn.Module) -> Any:
    file = io.StringIO()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        file.write(f"{loss.item():.3f}")
        return loss

    return loss_fn, file.getvalue


@refused("nobody is seen to keep it")
def text_in_a_file(model: nn.Module) -> Any:
    file = io.StringIO()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        line = f"{loss.item():.3f}"
        file.write(line.rjust(20))
        return loss

    return loss_fn, file.getvalue


class Slots:
    __slots__ = ("count", "last", "total")

    def __init__(self) -> None:
        self.last, self.total, self.count = 0.0, 0.0, 0


@script
def in_slots(model: nn.Module) -> Any:
    own = Slots()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        own.last = loss.item()
        own.total += own.last
        own.count += 1
        return loss

    return loss_fn, lambda: (own.last, own.total, own.count)


@refused("keeps a number of the step .*where it is not seen")
def in_a_new_object(model: nn.Module) -> Any:
    kept = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        own = Slots()
        own.last = loss.item()
        kept.append(own)
        return loss

    return loss_fn, lambda: kept


@refused("nobody is seen to keep it")
def text_in_a_new_object(model: nn.Module) -> Any:
    kept = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        kept.append(Exception(f"{loss.item()}"))
        return loss

    return loss_fn, lambda: None


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4))


def in_eager_torch(make: Script) -> Any:
    model = net()
    loss_fn, read = make(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for x in BATCHES:
        sgd.zero_grad()
        out = loss_fn(model, x)
        (out[0] if isinstance(out, tuple) else out).backward()
        sgd.step()
        kept.append(copy.deepcopy(read()))
    return kept


def on_a_mesh(make: Script, **options: Any) -> tuple[Any, ts.TrainStep]:
    model = net()
    loss_fn, read = make(model)
    step = sgd_step(model, loss_fn, (4, 2), look_again=True, **options)
    state, kept = step.init(), []
    for x in BATCHES:
        state, _ = step(state, x)
        kept.append(copy.deepcopy(read()))
    return kept, step


def assert_same(ours: Any, theirs: Any) -> None:
    """The same structure, and numbers to the rounding of sums in float32."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, float):
        assert isinstance(ours, float)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    else:
        assert isinstance(ours, type(theirs))
        assert ours == theirs


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_loss_keeps_is_what_eager_torch_keeps(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = in_eager_torch(SCRIPTS[name])
    printed, logged = capsys.readouterr().out, [r.getMessage() for r in caplog.records if r.name == "of this test"]
    caplog.clear()
    ours, step = on_a_mesh(SCRIPTS[name])
    assert_same(ours, theirs)
    assert capsys.readouterr().out == printed
    assert [r.getMessage() for r in caplog.records if r.name == "of this test"] == logged
    assert step.num_compiles == 1 + (name == "first_then_mean")  # which goes two ways


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_again_is_refused_and_taken_back(name: str) -> None:
    make, match = REFUSED[name]
    model = net()
    loss_fn, read = make(model)
    before = copy.deepcopy(read())
    step = sgd_step(model, loss_fn, (4, 2))
    with refuses(rf"(?s){match}", NotImplementedError):
        step(step.init(), BATCHES[0])
    assert read() == before


def test_what_a_loss_printed_before_it_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        print("rows of", x.shape)  # noqa: T201
        return model(x[:, :3]).mean()

    step = sgd_step(net(), loss_fn, (4, 2))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        step(step.init(), BATCHES[0])
    assert capsys.readouterr().out == "rows of torch.Size([8, 4])\n"


def test_microbatches_are_done_one_after_the_other() -> None:
    kept, step = on_a_mesh(SCRIPTS["trainer"], accumulate_steps=2)
    model = net()
    loss_fn, read = SCRIPTS["trainer"](model)
    sgd, theirs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in BATCHES:
        sgd.zero_grad()
        for part in range(2):
            rows = torch.arange(8).view(4, 2, -1)[:, part].reshape(-1)  # as four shards have them
            (loss_fn(model, x[rows]) / 2).backward()
        sgd.step()
        theirs.append(copy.deepcopy(read()))
    assert_same(kept, theirs)
    assert step.num_compiles == 1


def test_evaluations_and_forward_passes_keep_numbers_and_proofs_none() -> None:
    model, history = net(), []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        history.append(loss.item())
        print(f"{loss.item():.3f}")  # noqa: T201
        return loss

    step = sgd_step(model, loss_fn, (4, 2))
    state = step.init()
    assert step.prove(state, BATCHES[0])
    ts.compare_with_torch(model, loss_fn, BATCHES[0], mesh=step.mesh, plan=step.options.plan).raise_if_different()
    assert history == []
    evaluate = step.evaluation()
    wanted = float(evaluate(state, BATCHES[0])["loss"])
    apply = ts.make_apply(model, mesh=step.mesh, plan=step.options.plan, fn=loss_fn)
    apply(state, BATCHES[0])
    np.testing.assert_allclose(history, [wanted, wanted], rtol=1e-6)  # a sum in float32


def test_a_step_does_not_wait_for_what_is_kept() -> None:
    model, history = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = x
        for _ in range(20):
            out = model(out)
        loss = out.square().mean()
        history.append(loss.item())
        return loss

    step = sgd_step(model, loss_fn, (1, 1))
    state, x = step.init(), torch.randn(2048, 512)
    state, metrics = step(state, x)
    float(metrics["loss"])
    began = time.perf_counter()
    state, metrics = step(state, x)
    called = time.perf_counter() - began
    float(metrics["loss"])
    whole = time.perf_counter() - began
    assert called < 0.5 * whole
    assert isinstance(history[-1], float)
    assert json.loads(json.dumps(history)) == [float(value) for value in history]
    state, _ = step(state, x)
    assert [type(value) for value in history[:2]] == [float, float]
    assert type(pickle.loads(pickle.dumps(history))[-1]) is float


def test_a_number_that_is_not_read_yet_is_a_number() -> None:
    step = sgd_step(net(), appended(net())[0], (4, 2))
    loss_fn, read = appended(net())
    step = sgd_step(net(), loss_fn, (4, 2))
    step(step.init(), BATCHES[0])
    number = read()[0]
    assert isinstance(number, float)
    assert np.mean([number, number]) == number
    assert f"{number:.2f}" == f"{float(number):.2f}"
    assert torch.full((2,), number).tolist() == torch.full((2,), float(number)).tolist()
    assert (number + 1, number < 2, max(number, 0.0), math.sqrt(number)) == (
        float(number) + 1,
        float(number) < 2,
        float(number),
        math.sqrt(float(number)),
    )
