"""Moments and activations in the host's memory: the oracle is the same step with all of it on the device."""

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of

D, LAYERS = 8, 4
RULES = {"**.up.weight": P("batch", "model"), "**.down.weight": P("model"), "embed.weight": P("batch")}
BOTH = ("optimizer", "activations")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = D, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(seed))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Rows of a stack are in two groups, with numbers of their own."""
    first, others = list(model.layers[0].parameters()), set(model.layers[0].parameters())
    rest = [p for p in model.parameters() if p not in others]
    return torch.optim.AdamW(
        [{"params": first, "lr": 1e-2}, {"params": rest, "weight_decay": 0.3}], lr=3e-3, amsgrad=True
    )


def optax_adamw(model: nn.Module) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def last_updates() -> optax.GradientTransformation:
    """It keeps the updates, and never reads those of the step before."""
    return optax.GradientTransformation(optax.tree.zeros_like, lambda updates, state, params=None: (updates, updates))


OPTIMIZERS = {
    "adamw": adamw,
    "optax": optax_adamw,
    "last": lambda model: optax.chain(optax.sgd(0.1), last_updates()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
    "lion": lambda model: optax.lion(1e-3),
}


def make(optimizer: str, **options: object) -> ts.TrainStep:
    torch.manual_seed(0)
    model = Net()
    plan = ts.ShardingPlan(RULES, default=P())
    return step_of(model, next_token, OPTIMIZERS[optimizer](model), plan=plan, **options)


def train(step: ts.TrainStep, *, skip: bool) -> tuple[ts.TrainState, list[dict[str, jax.Array]]]:
    """Three steps, of which the second one is not taken if that is asked."""
    state, found = step.init(seed=0), []
    for seed in range(3):
        limit = {"skip_grad_norm": 1e-3 if seed == 1 else 1e3} if skip else {}
        state, metrics = step(state, tokens(seed), **limit)
        found.append({name: metrics[name] for name in ("loss", "grad_norm")})
    return state, found


def assert_equal(found: object, wanted: object, *, atol: float = 0.0) -> None:
    found, wanted = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (found, wanted))
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=atol)


@pytest.mark.parametrize(("optimizer", "offload", "options"), [
    ("adamw", BOTH, {"ema": 0.9, "accumulate_steps": 2, "skip": True}),
    ("optax", BOTH, {"ema": 0.9, "remat": "block", "skip": True}),
    ("last", "optimizer", {"skip": True}),
    pytest.param("adamw", "optimizer", {"scan_layers": False}, marks=pytest.mark.slow),
    pytest.param("adamw", "activations", {"remat": "dots"}, marks=pytest.mark.slow),
    pytest.param("sgd", "optimizer", {}, marks=pytest.mark.slow),
    pytest.param("muon", "optimizer", {}, marks=pytest.mark.slow),
    pytest.param("lion", "optimizer", {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_numbers_are_the_same_to_the_bit(optimizer, offload, options):
    skip = options.pop("skip", False)
    state, found = train(make(optimizer, offload=offload, **options), skip=skip)
    expected, wanted = train(make(optimizer, **options), skip=skip)
    assert int(state.step) == (2 if skip else 3)
    assert_equal((state.params, found, state.step), (expected.params, wanted, expected.step))
    assert_equal(state.opt_state, expected.opt_state)
    kinds = {(leaf.ndim > 1, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(state.opt_state)}
    away = {"pinned_host"} if "optimizer" in offload else set()
    assert away <= {kind for is_matrix, kind in kinds if is_matrix}


def test_a_state_with_moments_on_the_host_is_proved_saved_and_handed_back(tmp_path):
    step, whole = make("adamw", offload=BOTH), make("adamw")
    state, _ = step(step.init(seed=0), tokens(0))
    plain, _ = whole(whole.init(seed=0), tokens(0))
    assert repr(state) != repr(plain)  # which says what lies on a device
    step.prove(state, tokens(1)).raise_if_different()
    assert_equal(
        state.opt_state.slots["exp_avg"]["layers.2.up.weight"], plain.opt_state.slots["exp_avg"]["layers.2.up.weight"]
    )
    given, kept = (run.export_optimizer(own)["state"] for run, own in ((step, state), (whole, plain)))
    assert all(torch.equal(given[p][slot], kept[p][slot]) for p in kept for slot in kept[p])
    with ts.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
    wanted = float(whole(plain, tokens(1))[1]["loss"])
    for each in (step, make("adamw")):  # of a step with offload, for one without
        with ts.Checkpointer(tmp_path) as checkpoints:
            restored = checkpoints.restore(each)
        assert_equal(restored.opt_state, state.opt_state)
        assert float(each(restored, tokens(1))[1]["loss"]) == wanted
    for each, seed in ((whole, 1), (step, 2)):  # straight from one to the other
        state, metrics = each(state, tokens(seed))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
        assert ("pinned_host" in kinds) is (each is step)
        assert seed == 2 or float(metrics["loss"]) == wanted


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"offload": "moments"}, ValueError, r"offload must be \"optimizer\", \"activations\" or both"),
    ({"offload": ["optimizer", 3]}, ValueError, "got 3"),
    ({"offload": "activations", "plan": ts.ShardingPlan({}, default=P(), pipeline=ts.Pipeline("model"))},
     NotImplementedError, "not there for a pipeline"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        step_of(Net(), next_token, **options)


def test_activations_need_layers_that_repeat():
    step = step_of(nn.Linear(4, 2), offload="activations")
    with pytest.raises(ValueError, match='offload="activations" needs repeated layers'):
        step(step.init(seed=0), torch.ones(8, 4))


@pytest.mark.slow
def test_a_pipeline_may_have_its_moments_on_the_host():
    def steps(offload):
        torch.manual_seed(0)
        model = Net()
        plan = ts.ShardingPlan({}, default=P(), pipeline=ts.Pipeline("model"))
        step = step_of(
            model, next_token, torch.optim.AdamW(model.parameters()), plan=plan, offload=offload, accumulate_steps=2
        )
        return train(step, skip=False)

    (state, found), (expected, wanted) = steps("optimizer"), steps(None)
    assert_equal((state.params, state.opt_state, found), (expected.params, expected.opt_state, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "optax"])
def test_tpus_hold_less(optimizer):
    """Moments are on the host, of which little is brought in at a time, and little is kept of layers."""
    pytest.importorskip("libtpu")
    mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
    with torch.device("meta"):
        model = Net(512, 16)

    def preview(**options):
        plan = ts.ShardingPlan({"**.weight": P("batch")}, default=P())
        step = step_of(
            model, next_token, OPTIMIZERS[optimizer](model), mesh=mesh, plan=plan, scan_layers=True, **options
        )
        return step.preview(torch.empty(64, 256, dtype=torch.long, device="meta"))

    plain, away, both = preview(), preview(offload="optimizer"), preview(offload=BOTH)
    moved = plain.memory.moments - away.memory.moments
    assert moved > 0.99 * plain.memory.moments
    assert away.memory.host == moved
    assert away.host_bytes == 2 * moved  # there and back
    assert away.memory.peak < plain.memory.peak - 0.5 * moved
    assert both.memory.host - moved > 0.9 * (plain.memory.saved - both.memory.saved) > 0
    assert both.memory.peak < away.memory.peak
    assert both.host_seconds == both.host_bytes / 16e9
