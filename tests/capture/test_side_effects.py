"""What forward does to the plain attributes of modules: right or refused, and the module is left as it was."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.capture.test_left_alone import attributes, live
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.steps import anew, sgd_step
from tests.tables.cases import squared_error
from tests.tables.semantics import WIDTH, built

ALIKE = {"*.a.weight": P("model")}
"""Rules by which layers may be one loop."""


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)


class CountsForItself(One):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        return self.a(x)


class Collects(One):
    """Losses of layers in a list, as mixtures of experts do; a table that is kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.clear()
        for scale in (1, 2):
            self.losses.append(scale * self.a(x).square().mean())
        if WIDTH not in self.tables:
            self.tables[WIDTH] = torch.linspace(0, 1, WIDTH)
        return self.a(x) * sum(self.losses) + self.tables[WIDTH]


class Windows(One):
    """A mask that is made at the first call, and repeated for each row as one matrix."""

    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH).tril()
        repeated = torch.ones(WIDTH, WIDTH).tril().expand(len(x), WIDTH, WIDTH).reshape(-1, WIDTH)
        return self.a(x) @ (self.mask + repeated[-WIDTH:])


def test_a_module_counts_as_in_eager_torch() -> None:
    case = built(CountsForItself)
    model: Any = case.model()
    assert_follows(case, model, eager_trajectory(case, 3), (4, 2))
    assert (model.calls, model.history) == (3, [1, 2, 3])


@pytest.mark.parametrize("build", [Collects, Windows], ids=lambda b: b.__name__)
def test_harmless_writes_are_right_and_taken_back(build: type[One]) -> None:
    case = built(build)
    model = case.model()
    before = attributes(live(model))
    assert_follows(case, model, eager_trajectory(case, 2), (4, 2))
    assert attributes(model) == before


def test_a_function_of_jax_that_is_made_anew_in_each_call_is_the_same() -> None:
    class InTorch(Collects):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mul(2).relu()

    class InJax(Collects):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = jnp.ones(3)
            return ts.call_jax(lambda x: jax.nn.relu(x * 2 * scale.mean()), super().forward(x))

    case = built(InTorch)
    assert_follows(case, built(InJax).model(), eager_trajectory(case, 2), (4, 2))


class Moves(One):
    """A mask that each call brings to the device of its input, as CLIP does it, also within a list and a record."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tril(torch.ones(WIDTH, WIDTH))
        self.others: list[torch.Tensor] = [torch.linspace(0, 1, WIDTH), torch.ones(WIDTH)]
        self.record = types.SimpleNamespace(scale=torch.full((), 0.5), names=["a"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = self.mask.to(x.device) if self.mask is not None else None
        self.mask = self.mask.to(dtype=x.dtype).contiguous()
        self.others[0] = self.others[0].type_as(x)
        self.others = [other.cpu() for other in self.others]
        self.record.scale = self.record.scale.float()
        return (self.a(x) @ self.mask + self.others[0] * self.others[1]) * self.record.scale


def test_a_write_that_changes_nothing_is_none(caplog: pytest.LogCaptureFixture) -> None:
    case = dataclasses.replace(built(lambda: nn.Sequential(*(Moves() for _ in range(4)))), rules=ALIKE)
    model = case.model()
    before = [(layer.mask, *layer.others, layer.record.scale) for layer in model]
    step = assert_follows(case, model, eager_trajectory(case, 2), (4, 2))
    assert all(
        now is then
        for layer, held in zip(model, before, strict=True)
        for now, then in zip((layer.mask, *layer.others, layer.record.scale), held, strict=True)
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert any("one loop" in line for line in step.programs[-1].report)
    eager, batch = case.model(), case.batches(1)[0]
    state = anew(step, eager).init()
    for each in (model, eager):
        each[0].mask.zero_()  # it is closed over, and stays live
    wanted = case.loss_fn(eager, batch).item()
    np.testing.assert_allclose(step(state, batch)[1]["loss"], wanted, rtol=case.rtol)


TABLE = torch.full((WIDTH,), 3.0)


class Swaps(One):
    """It reads a tensor and leaves another one for the next call, made of numbers or lying elsewhere."""

    def __init__(self, new: Callable[[torch.Tensor], torch.Tensor], *, in_list: bool) -> None:
        super().__init__()
        self.new, self.in_list = new, in_list
        self.scale, self.scales = torch.ones(WIDTH), [torch.ones(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * (self.scales[0] if self.in_list else self.scale)
        if self.in_list:
            self.scales[0] = self.new(x)
        else:
            self.scale = self.new(x)
        return y


NEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda x: torch.full((WIDTH,), 2.0),
    "numbers": lambda x: torch.tensor([2.0] * WIDTH),
    "another tensor": lambda x: TABLE,
    "another tensor, moved": lambda x: TABLE.to(x.device),
}


SWAPS = [("full", 1, True), ("numbers", 4, False), ("another tensor", 4, True), ("another tensor, moved", 1, False)]


@pytest.mark.parametrize(("new", "depth", "in_list"), SWAPS)
def test_another_tensor_for_the_next_call_is_refused(new: str, depth: int, in_list: bool) -> None:
    """The program would be that of the first call at every call, or that of the second already at the first."""
    build = functools.partial(Swaps, NEW[new], in_list=in_list)
    case = dataclasses.replace(built(lambda: nn.Sequential(*(build() for _ in range(depth)))), rules=ALIKE)
    with pytest.raises(NotImplementedError, match=r"changes .*0\.scales?\b.* on each call and depends on it"):
        assert_follows(case, case.model(), eager_trajectory(case, 1), (1, 1))


class Warmup(One):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x) * min(1.0, self.calls / 3)


class BeginsLate(One):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x) if self.calls <= 1000 else 2 * self.a(x)


class WarmupByList(One):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.a(x) * min(1.0, len(self.seen) / 3)


class FirstBatch(One):
    """A layer that is set from the data of its first batch."""

    ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.a.bias.data.copy_(-x.mean(0))
            self.ready = True
        return self.a(x)


class Remembers(One):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = (self.hidden + self.a(x).mean(0)).detach()
        return self.a(x) + self.hidden


class ReadsTheOther(One):
    """What one call writes, the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) if self.memory is None else self.a(x) + self.memory
        self.memory = y.mean(0).detach()
        return y


class GrowsAParameter(One):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return self.late(self.a(x))


class BufferOfTheBatch(One):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mean", x.mean(0))
        return self.a(x)


class Grows(One):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, x[:1]])
        return self.a(x) + self.queue.sum(0)


REFUSED = [
    (Warmup, "changes the plain attribute calls on each call and depends on it.*register_buffer"),
    (BeginsLate, "changes the plain attribute calls on each call and depends on it.*register_buffer"),
    (WarmupByList, r"min\(1\.0, len\(self\.seen\).*each call of the captured function changes seen"),
    (FirstBatch, "changes the plain attribute ready on each call and depends on it"),
    (Remembers, r"reads the plain attribute hidden, a tensor, and writes it.*register_buffer\('hidden'"),
    (ReadsTheOther, r"reads the plain attribute memory, a tensor, and writes it.*register_buffer\('memory'"),
    (GrowsAParameter, r"adds late to a module, with parameters"),
    (BufferOfTheBatch, r"registers the buffer mean.*register it in __init__"),
    (Grows, r"buffer queue is \(1, 8\) torch.float32 and forward makes it \(2, 8\)"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_what_a_compiled_program_cannot_carry_is_refused_by_name(build: type[One], message: str) -> None:
    case = built(build)
    model = case.model()
    before = attributes(live(model))
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        assert_follows(case, model, eager_trajectory(case, 1), (1, 1))
    assert attributes(model) == before


def by_adapter(model: nn.Module, x: torch.Tensor) -> None:
    found = ts.jax_jit(model)(x).cpu()
    assert not hasattr(model, "last")
    torch.testing.assert_close(found, model(x).detach())
    del model.last


@pytest.mark.parametrize(
    "run",
    [
        by_adapter,
        lambda model, x: ts.jax_jit(lambda x: model(x))(x),
        lambda model, x: (step := sgd_step(model, squared_error))(step.init(), (x, x)),
    ],
    ids=["adapter", "function", "step"],
)
def test_writes_to_plain_attributes_are_taken_back_and_reported(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(One):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.a(x)
            return self.last

    model = Keeps()
    run(model, torch.ones(2, WIDTH))
    assert not hasattr(model, "last")
    assert "forward writes the plain attribute last" in caplog.text


KEPT: list[torch.Tensor] = []


def keep(value: torch.Tensor) -> torch.Tensor:
    KEPT.append(value.detach())
    return value


class Log:
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        self.values.append(value.detach())
        return value

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.keep(model(x).sum())

    __call__ = loss


def log_in(log: Log, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return log.keep(model(x).sum())


class OnlySlots:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


def keeping(held: Any) -> Any:
    def kept(value: torch.Tensor) -> torch.Tensor:
        held.values.append(value.detach())
        return value

    return lambda: kept


LOGS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a global of a helper": lambda: (lambda m, x: keep(m(x).sum()), KEPT),
    "of a nested function": lambda: (lambda m, x: (lambda y: keep(y))(m(x).sum()), KEPT),
    "an object": lambda: (lambda log: (lambda m, x: (lambda y: log.keep(y))(m(x).sum()), log.values))(Log()),
    "a callable object": lambda: (lambda log: (log, log.values))(Log()),
    "a method": lambda: (lambda log: (log.loss, log.values))(Log()),
    "an argument": lambda: (lambda log: (functools.partial(log_in, log), log.values))(Log()),
    "a default": lambda: (lambda log: (lambda m, x, log=log: log.keep(m(x).sum()), log.values))(Log()),
    "slots": lambda: (lambda log: (lambda m, x: keeping(log)()(m(x).sum()), log.values))(OnlySlots()),
}


@pytest.mark.parametrize("name", LOGS)
def test_lists_that_functions_of_a_loss_reach_have_the_values_of_each_step(name: str) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
    wanted = model(x).sum().detach()
    loss_fn, held = LOGS[name]()
    held.clear()
    step = sgd_step(model, loss_fn, look_again=True)
    state, _ = step(step.init(), x)
    _, metrics = step(state, x)
    torch.testing.assert_close(held[0].cpu(), wanted)
    assert held[1].item() == float(metrics["loss"])
    held.clear()


def test_weights_that_a_recurrent_module_lists_for_itself_are_no_writes(caplog: pytest.LogCaptureFixture) -> None:
    module, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    params = {name: p.detach() + 1 for name, p in module.named_parameters()}
    run = lambda params, x: torch.func.functional_call(module, params, (x,))[0]  # noqa: E731
    torch.testing.assert_close(
        ts.jax_jit(run)(params, x).cpu(), run(params, x), atol=1e-6, rtol=1e-5
    )  # sums in float32
    assert "_flat_weights" not in caplog.text
    module(x)  # has its own weights again
    assert all(w is p for w, p in zip(module._flat_weights, module.parameters(), strict=True))


def test_caches_that_a_capture_filled_serve_the_next() -> None:
    @functools.lru_cache
    def tables(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.full((size, size), -1.0).triu(1)
        mask[0, 0] = torch.tensor([5.0, 7.0]).sum()
        return torch.arange(size).float(), mask

    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        places, mask = tables(3)
        return (x * places + mask) * scale

    x = torch.ones(3)
    found = [ts.jax_jit(lambda x, s=scale: fn(x, s))(x).cpu() for scale in (1.0, 2.0)]
    ts.jax_jit(lambda x: torch.ones(3))(x)  # a capture of something else in between
    found.append(ts.jax_jit(lambda x: fn(x, 3.0))(x).cpu())
    tables.cache_clear()
    for scale, out in zip((1.0, 2.0, 3.0), found, strict=True):
        torch.testing.assert_close(out, fn(x, scale))


class Remembers(nn.Module):
    """What it has seen last, in an object of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = types.SimpleNamespace(last=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.last = x
        return x


def test_objects_of_the_last_of_many_modules_are_looked_after() -> None:
    model = nn.Sequential(*(Remembers() for _ in range(600)), nn.Linear(2, 2))
    ts.jax_jit(model)(torch.ones(2, 2))
    assert {type(module.seen.last) for module in model[:-1]} == {type(None)}
