import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn import init
from torch.nn.utils import parametrizations

import torch_shard as ts
from tests.tables.cases import CASES, WHOLE, chosen, make_mesh
from tests.tables.models import MODELS

SPLIT = ts.ShardingPlan({"w": P("batch", "model")})
SHAPE = (256, 128)


class Holder(nn.Module):
    """One parameter that a function fills."""

    def __init__(self, fill: Callable[[torch.Tensor], Any], *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            fill(self.w)


class Buffer(nn.Module):
    """One buffer that is not saved."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("b", make(), persistent=False)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().cpu() for n, t in (*model.named_parameters(), *model.named_buffers())}


def assert_equal(found: nn.Module, wanted: nn.Module) -> None:
    one, other = values(found), values(wanted)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def parts(w: torch.Tensor) -> None:
    w[:32].zero_()
    w[32:].normal_()


RANDOM = {
    "uniform": lambda w: init.uniform_(w, -2, 3),
    "normal": lambda w: init.normal_(w, 1, 2),
    "trunc_normal": lambda w: init.trunc_normal_(w, 0.5, 1, -1, 1),
    "trunc_normal_tail": lambda w: init.trunc_normal_(w, 0, 1, 2, 6),
    "orthogonal": init.orthogonal_,
    "sparse": lambda w: init.sparse_(w, 0.25),
    "exponential": lambda w: w.exponential_(2),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "random": lambda w: w.random_(3, 10),
    "log_normal": lambda w: w.log_normal_(0, 0.5),
    "multinomial": lambda w: w.copy_(torch.multinomial(torch.ones(8), w.numel(), replacement=True).view(w.shape)),
    "parts": parts,
    "data": lambda w: w.data.normal_(0, 0.02).clamp_(-0.03, 0.03),
    "copied": lambda w: w.copy_(torch.randn(w.shape[::-1]).t() * 3),
}


STRUCTURE: dict[str, Callable[[torch.Tensor], bool]] = {
    # float32 sums of 64 products
    "orthogonal": lambda w: torch.allclose(w.T @ w, torch.eye(w.shape[1]), atol=2e-6, rtol=0),
    "sparse": lambda w: (w == 0).sum(0).tolist() == [SHAPE[0] // 4] * SHAPE[1],
    "trunc_normal": lambda w: bool(w.min() >= -1) and bool(w.max() <= 1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_initialisers_are_those_of_torch_in_distribution(name: str) -> None:
    fill = RANDOM[name]
    shape = (64, 32) if name == "orthogonal" else SHAPE  # of which each device computes all
    found = values(ts.materialize(lambda: Holder(fill, *shape), make_mesh((4, 2)), SPLIT))["w"]
    torch.manual_seed(0)
    wanted = torch.stack([Holder(fill, *shape).w.detach() for _ in range(2)])
    # One of a thousand right initialisers would fail by chance, and the seed is fixed. So many numbers tell a normal
    # distribution from one whose standard deviation is 6% larger.
    assert scipy.stats.ks_2samp(found.flatten(), wanted.flatten()).pvalue > 1e-3
    # The outermost of 32768 and of 65536 numbers: 4.0 +- 0.3 and 4.2 +- 0.3 standard deviations of a normal
    # distribution, whose difference exceeds 2 for one of a thousand; 11 +- 1.3 and 11.5 +- 1.3 of an exponential one.
    room = 5 if name in ("exponential", "log_normal", "trunc_normal_tail") else 2  # tails that end slowly
    assert abs(found.min() - wanted.min()) <= room * wanted.std()
    assert abs(found.max() - wanted.max()) <= room * wanted.std()
    assert STRUCTURE.get(name, lambda w: True)(found)


FIXED: dict[str, Callable[[], nn.Module]] = {
    "constant": lambda: Holder(lambda w: init.constant_(w, 0.3), 8, 8),
    "ones": lambda: Holder(init.ones_, 8, 8),
    "zeros": lambda: Holder(init.zeros_, 8, 8),
    "eye": lambda: Holder(init.eye_, 8, 16),
    "dirac": lambda: Holder(lambda w: init.dirac_(w, 2), 8, 8, 3),
    "empty": lambda: Holder(lambda w: w, 0, 8),
    "bfloat16": lambda: Holder(lambda w: w.fill_(0.1), 8, 8, dtype=torch.bfloat16),
    "linspace": lambda: Buffer(lambda: torch.linspace(0.1, 1.7, 100)),
    "alphas": lambda: Buffer(lambda: torch.cumprod(1 - torch.linspace(1e-4, 0.02, 200), 0)),
    "rotary": lambda: Buffer(lambda: torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(0, 32, 2) / 32)).cos()),
    "mask": lambda: Buffer(lambda: torch.ones(16, 16, dtype=torch.bool).tril()),
    "complex": lambda: Buffer(lambda: torch.polar(torch.ones(8), torch.arange(8.0))),
    "float64 on the way": lambda: Buffer(lambda: torch.sin(torch.arange(99, dtype=torch.float64) * 1234.567).float()),
    "numpy": lambda: Buffer(lambda: torch.from_numpy(np.arange(6, dtype=np.float32)) / 3),
    "literal": lambda: Buffer(lambda: torch.tensor([1.0, 2.5])),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_is_not_random_is_what_torch_computes_to_the_bit(name: str) -> None:
    assert_equal(ts.materialize(FIXED[name], make_mesh((4, 2)), WHOLE), FIXED[name]())


def small() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(16, 32), "b": nn.Embedding(32, 16), "c": nn.Linear(16, 32)})


def test_numbers_are_those_of_name_and_seed_on_every_mesh() -> None:
    plan = ts.ShardingPlan({"a.weight": P("model"), "a.bias": P("batch"), "b.weight": P(None, "model")}, default=P())
    first = ts.materialize(small, ts.make_mesh(batch=1, model=1), plan, seed=3)
    for sizes in ((4, 2), (1, 8)):
        assert_equal(ts.materialize(small, make_mesh(sizes), plan, seed=3), first)
    mesh, found = make_mesh((4, 2)), values(first)
    again = values(ts.materialize(lambda: nn.ModuleDict({"c": nn.Linear(16, 32)}), mesh, WHOLE, seed=3))
    assert torch.equal(again["c.weight"], found["c.weight"])
    other = values(ts.materialize(lambda: nn.Embedding(32, 16), mesh, WHOLE, seed=4))
    assert len({float(v.flatten()[0]) for v in (*found.values(), *other.values())}) == 6


MODELS_BY_NAME = {case.name: case for case in (*CASES, *MODELS)}


@pytest.mark.parametrize("name", ["gpt", "lstm", "buffers", "frozen", "resnet_train", "diffusion"])
def test_models_are_as_their_constructors_leave_them(name: str) -> None:
    case = MODELS_BY_NAME[name]
    found, wanted = ts.materialize(case.build, make_mesh((4, 2)), case.plan), case.model().train()
    shardings = case.plan.resolve(wanted, make_mesh((4, 2)))
    assert list(found.state_dict()) == list(wanted.state_dict())
    pairs = zip(found.named_parameters(), wanted.named_parameters(), strict=True)
    for (name, one), (other_name, other) in (*pairs, *zip(found.named_buffers(), wanted.named_buffers(), strict=True)):
        assert (name, one.shape, one.requires_grad) == (other_name, other.shape, other.requires_grad)
        assert one.dtype == other.dtype or (one.dtype, other.dtype) == (torch.int32, torch.int64)
        assert one.jax().sharding == shardings[name]
        value = one.detach().cpu()
        if other.is_floating_point() and other.numel() >= 64 and other.unique().numel() > 32 and name != "alphas":
            assert scipy.stats.ks_2samp(value.flatten(), other.detach().flatten()).pvalue > 1e-4
        elif other.unique().numel() == 1 or not other.is_floating_point():
            assert torch.equal(value, other.to(value.dtype)) or other.numel() == 1


def test_ties_marks_and_plain_attributes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)
            self.b.bias.no_decay = True
            self.shift, self.rates = torch.full((3,), 0.5), [x.item() for x in torch.linspace(0, 1, 3)]
            self.held = {"weights": [self.a.weight]}

    model = ts.materialize(Model, make_mesh((4, 2)), WHOLE)
    assert model.a.weight is model.b.weight
    assert model.held["weights"][0] is model.a.weight
    assert (model.a.bias.requires_grad, model.b.bias.requires_grad, model.b.bias.no_decay) == (False, True, True)
    assert torch.equal(model.shift, torch.full((3,), 0.5))
    assert model.rates == [0.0, 0.5, 1.0]


def test_tensors_of_one_draw_stay_consistent() -> None:
    mesh = make_mesh((4, 2))
    normed = values(ts.materialize(lambda: parametrizations.weight_norm(nn.Linear(64, 64)), mesh, WHOLE))
    norms, weight = normed["parametrizations.weight.original0"], normed["parametrizations.weight.original1"]
    torch.testing.assert_close(norms, weight.norm(dim=1, keepdim=True))


def test_copies_have_the_same_numbers() -> None:
    """As the layers of `nn.TransformerEncoder`, which copies one."""
    first = ts.materialize(
        lambda: nn.ModuleList([one := nn.Linear(8, 8), copy.deepcopy(one)]), make_mesh((4, 2)), WHOLE
    )
    assert_equal(first[0], first[1])


def num_compiles(run: Callable[[], Any]) -> int:
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return sum(event.endswith("backend_compile_duration") for event in events)


def test_compiles_do_not_grow_with_depth() -> None:
    plan, mesh = ts.ShardingPlan({"*.0.weight": P("model")}, default=P()), make_mesh((2, 4))

    def deep(depth: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(depth)))

    runs = [lambda depth=depth: ts.materialize(lambda: deep(depth), mesh, plan) for depth in (2, 2, 8)]
    counts = [num_compiles(run) for run in runs]  # the first also compiles what JAX keeps
    assert counts[1] == counts[2] <= 4  # a program for each kind of entry, of 32


def hf(name: str) -> Any:
    import transformers

    from tests.tables.hf_models import HF_MODELS

    model = next(m for m in HF_MODELS if m.name == name)
    return lambda: getattr(transformers, model.model)(getattr(transformers, model.config)(**model.fields)), model.rules


@pytest.mark.parametrize("name", chosen(["Llama", "DeepseekV3", "Mamba"], ["Llama"]))
def test_hugging_face(name: str) -> None:
    make, rules = hf(name)
    found = ts.materialize(make, make_mesh((4, 2)), ts.ShardingPlan(rules, default=P()))
    torch.manual_seed(0)
    for (key, one), other in zip(values(found).items(), values(make()).values(), strict=True):
        if other.numel() >= 256 and other.is_floating_point() and other.unique().numel() > 200:
            assert scipy.stats.ks_2samp(one.flatten(), other.flatten()).pvalue > 1e-5, key
        elif not (one.unique().numel() > 1 and other.unique().numel() > 1):
            assert torch.equal(one, other.to(one.dtype)), key
    assert copy.deepcopy(found).config.to_dict() == found.config.to_dict()
