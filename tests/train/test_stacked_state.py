"""A state whose repeated layers are stored together: steps equal to those without."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from tests.tables.cases import BATCH, make_mesh, squared_error


class Deep(nn.Module):
    """Repeated blocks with parameters, a frozen one, buffers, and what stands alone."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 16)) for _ in range(depth)
        )
        for block in self.blocks:
            block[3].bias.requires_grad_(False)
        self.unused = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) + 0 * self.unused[1](x[:, :2]).sum()


RULES = {"blocks.*.0.weight": P("model"), "blocks.*.0.bias": P("model"), "blocks.*.3.weight": P(None, "model")}

PLAN = ts.ShardingPlan(RULES, default=P())

FIRST = "blocks.0.0.weight"


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


def batches(num: int) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for _ in range(num)]


def make(optimizer: Any = None, model: nn.Module | None = None, **options: Any) -> ts.TrainStep:
    return step_of(model or deep(), squared_error, optimizer or optax.adamw(1e-2), plan=PLAN, **options)


def labels(params: Any) -> Any:
    return {name: "slow" if name.startswith(("first", "blocks.0")) else "fast" for name in params}


def test_steps_are_those_of_entries_stored_alone() -> None:
    """Under an optimiser that looks at names, shapes and dims; others are in `tests/optim/test_by_name.py`."""
    parts = {"slow": optax.adafactor(1e-2, min_dim_size_to_factor=4), "fast": optax.sgd(0.1, momentum=0.9)}
    found = []
    for scan_layers in (False, True):
        step = make(optax.multi_transform(parts, labels), scan_layers=scan_layers)
        state = step.init()
        for batch in batches(3):
            state, metrics = step(state, batch)
        assert step.num_compiles == 1
        assert len(state.params.arrays) == (11 if scan_layers else 23)
        found.append(ts.gather((state.params, state.frozen, state.buffers, state.opt_state, metrics)))
    leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in found]
    assert [path for path, _ in leaves[0]] == [path for path, _ in leaves[1]]
    for (path, wanted), (_, got) in zip(*leaves, strict=True):
        # Sums are fused and ordered differently; Adam divides small gradients by their own size.
        floor = 2e-5 * max(float(wanted.abs().max()) if wanted.numel() else 0, 1e-3)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=floor, msg=lambda m, p=path: f"{p}: {m}")


@pytest.fixture(scope="module")
def step() -> ts.TrainStep:
    """For tests that make states of it, from whichever values its model has then."""
    return make()


def test_the_state_lies_as_the_plan_says(step: ts.TrainStep) -> None:
    state = step.init()
    for _ in range(2):
        for name, array in [*state.tensors.items(), *state.opt_state[0].mu.items()]:
            assert array.sharding.is_equivalent_to(step.plan[name], array.ndim), name
        assert state.params.arrays[2].sharding.shard_shape((3, 32, 16)) == (3, 16, 16)
        assert state.opt_state[0].nu.arrays[2].sharding.shard_shape((3, 32, 16)) == (3, 16, 16)
        state, _ = step(state, batches(1)[0])


def test_initial_values_go_straight_to_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    step = make(model=model)
    seen: list[tuple[int, ...]] = []
    original = jax.make_array_from_callback

    def spy(shape: Any, sharding: Any, read: Any) -> Any:
        return original(shape, sharding, lambda index: seen.append((found := read(index)).shape) or found)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    monkeypatch.setattr(jnp, "stack", None)  # nothing is stacked on a device
    with jax.transfer_guard_device_to_device("disallow"):
        params = step.init().params
    assert (3, 16, 16) in seen
    assert (3, 32, 16) not in seen
    for name, p in model.named_parameters():
        if p.requires_grad:
            np.testing.assert_array_equal(params[name], p.detach())


def test_the_stored_arrays_are_reused(step: ts.TrainStep) -> None:
    state = step.init()
    analysis = step.lower(state, batches(1)[0]).compile().memory_analysis()
    leaves = jax.tree.leaves((state.tensors, state.opt_state))
    local = sum(leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
    assert analysis.alias_size_in_bytes >= local


def test_a_donated_state_is_not_read(step: ts.TrainStep) -> None:
    state = step.init()
    params: Any = state.params
    name = next(name for name, (_, row) in params.layout.places.items() if row is not None)
    before = np.asarray(params[name])
    later, _ = step(state, batches(1)[0])
    with pytest.raises(RuntimeError, match="donated to a later step"):  # and the process does not hang
        params[name]
    assert later.params[name].shape == before.shape


def test_plain_dicts_may_be_put_into_a_state(step: ts.TrainStep) -> None:
    state, _ = step(step.init(), batches(1)[0])
    assert dict(state.params)[FIRST].shape == (32, 16)
    kinds = {kind: dict(ts.gather(getattr(state, kind))) for kind in ("params", "frozen", "buffers")}
    wanted, _ = step(dataclasses.replace(state, opt_state=step.init().opt_state), batches(1)[0])
    for convert in (lambda t: t, lambda t: t.numpy(), lambda t: jnp.array(t.numpy())):
        plain = {kind: {n: convert(t) for n, t in tensors.items()} for kind, tensors in kinds.items()}
        moments = optax.adamw(1e-2).init(jax.tree.map(jnp.asarray, {n: t.numpy() for n, t in kinds["params"].items()}))
        got, _ = step(dataclasses.replace(step.init(), opt_state=moments, **plain), batches(1)[0])
        assert step.num_compiles == 1
        assert got.params.layout == wanted.params.layout
        for name in got.params:
            np.testing.assert_array_equal(got.params[name], wanted.params[name])
    changed = dataclasses.replace(wanted, params={**wanted.params, FIRST: jnp.zeros((32, 16))})
    assert not step.export(changed).get_parameter(FIRST).any()


def test_states_of_either_layout_are_evaluated() -> None:
    model, (batch,) = deep().eval(), batches(1)
    evaluate = ts.make_eval_step(model, squared_error, mesh=make_mesh((4, 2)), plan=PLAN, scan_layers=False)
    wanted = squared_error(model, batch).item()
    for scan_layers in (False, True):
        state = make(model=model, scan_layers=scan_layers).init()
        np.testing.assert_allclose(evaluate(state, batch)["loss"], wanted, rtol=1e-5)
        state = dataclasses.replace(state, params=dict(state.params))
        np.testing.assert_allclose(evaluate(state, batch)["loss"], wanted, rtol=1e-5)


def test_an_exported_module_owns_its_tensors(step: ts.TrainStep) -> None:
    exported = step.export(step.init())
    for name, p in exported.named_parameters():
        assert p.untyped_storage().nbytes() == p.nbytes, name  # a row of a larger storage would be saved whole
        assert torch.equal(p, step.model.get_parameter(name).cpu()), name


def test_values_that_do_not_fit_are_named(step: ts.TrainStep) -> None:
    state, (batch,) = step.init(), batches(1)
    plain = {name: np.asarray(value) for name, value in state.params.items()}
    missing = {name: value for name, value in plain.items() if name != FIRST}
    wrong = {
        r"blocks\.0\.0\.weight: missing": missing,
        r"blocks\.0\.0\.weight: must be \(32, 16\) float32, got \(16, 32\) float32": {**plain, FIRST: plain[FIRST].T},
        r"must be \(32, 16\) float32, got \(32, 16\) int32": {**plain, FIRST: plain[FIRST].astype("int32")},
        r"other: not among the params of the model": {**plain, "other": plain[FIRST]},
    }
    for match, params in wrong.items():
        with pytest.raises(ValueError, match=f"(?s)make_train_step: params of the state do not fit.*{match}"):
            step(dataclasses.replace(state, params=params), batch)
    other = optax.sgd(0.1, momentum=0.9).init(plain)
    with pytest.raises(ValueError, match=r"opt_state does not fit.*optimizer\.init\(dict\(state\.params\)\)"):
        step(dataclasses.replace(state, opt_state=other), batch)


def test_moments_made_from_stacks_are_refused() -> None:
    """They have the right structure, and the shapes of stacks."""
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    step = make(optimizer)
    state = step.init()
    with pytest.raises(ValueError, match="opt_state does not fit"):
        step(dataclasses.replace(state, opt_state=optimizer.init(state.params)), batches(1)[0])
