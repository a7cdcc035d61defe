"""What forward does to the plain attributes of modules: right or refused, and the module is left as it was."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.tables.cases import WHOLE, make_mesh, squared_error
from tests.tables.semantics import WIDTH, built


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


@pytest.mark.parametrize("build", [CountsForItself, Collects], ids=lambda b: b.__name__)
def test_harmless_writes_are_right_and_taken_back(build: type[One]) -> None:
    case = built(build)
    model = case.model()
    before = {name: repr(value) for name, value in vars(model).items()}
    assert_follows(case, model, eager_trajectory(case, 2), (4, 2))
    assert {name: repr(value) for name, value in vars(model).items()} == before


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


class Warmup(One):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x) * min(1.0, self.calls / 3)


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


class Grows(One):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, x[:1]])
        return self.a(x) + self.queue.sum(0)


REFUSED = [
    (Warmup, "changes the plain attribute calls on each call and depends on it.*register_buffer"),
    (WarmupByList, "changes the plain attribute seen on each call and depends on it"),
    (FirstBatch, "changes the plain attribute ready on each call and depends on it"),
    (Remembers, r"reads the plain attribute hidden, a tensor, and writes it.*register_buffer\('hidden'"),
    (Grows, r"buffer queue is \(1, 8\) torch.float32 and forward makes it \(2, 8\)"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_what_a_compiled_program_cannot_carry_is_refused_by_name(build: type[One], message: str) -> None:
    case = built(build)
    model = case.model()
    before = {name: repr(value) for name, value in vars(model).items()}
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        assert_follows(case, model, eager_trajectory(case, 1), (1, 1))
    assert {name: repr(value) for name, value in vars(model).items()} == before


def test_containers_of_numbers_may_change_between_steps() -> None:
    class Scales(One):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [1.0, 2.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * sum(self.scales)

    case = built(Scales)
    model, mesh = case.model(), make_mesh((1, 1))
    step = ts.make_train_step(model, case.loss_fn, optax.sgd(0.0), mesh=mesh, plan=case.plan)
    state = step.init()
    for change in ([1.0, 2.0], [1.0, 2.0], [3.0]):
        model.scales[:] = change
        state, metrics = step(state, case.batches(1)[0])
        wanted = case.loss_fn(model, case.batches(1)[0])
        torch.testing.assert_close(torch.tensor(float(metrics["loss"])), wanted.detach())
    assert step.num_compiles == 2


def test_adapters_take_writes_back_too(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(One):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.a(x)
            return self.last

    model, x = Keeps(), torch.ones(2, WIDTH)
    torch.testing.assert_close(ts.jax_jit(model)(x).cpu(), model(x).detach())
    del model.last
    ts.jax_jit(lambda x: model(x))(x)
    assert not hasattr(model, "last")
    assert "forward writes the plain attribute last" in caplog.text


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


def test_a_tensor_that_a_capture_left_behind_without_a_value_is_named() -> None:
    kept: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + kept[0]

    ts.jax_jit(fn)(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"(?s)test_side_effects.py.*earlier capture left behind.*lru_cache"):
        ts.jax_jit(lambda x: fn(x))(torch.ones(3))


def test_writes_to_plain_attributes_are_taken_back_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    model = Keeps(8, 4)
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))
    assert not hasattr(model, "last")
    assert "forward writes the plain attribute last" in caplog.text
