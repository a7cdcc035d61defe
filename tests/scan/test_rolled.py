"""Repeated layers as loops: the numbers of eager torch, whatever the layers do."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.oracles.steps import sgd_step
from tests.tables.cases import Case, chosen, make_mesh, regression, squared_error
from tests.tables.layered import FORTH_AND_BACK, LAYERED
from tests.tables.layers import DEPTH, WIDTH, Block, Stack
from tests.tables.layers_with_effects import Keeping

EVERYWHERE = ts.ShardingPlan({}, default=P())


def _loops(step: Any) -> tuple[tuple[int, int], ...]:
    (program,) = step.programs
    return tuple((loop.num_iterations, len(loop.layers) // loop.num_iterations) for loop in program.loops)


class Seen(list[BaseException]):
    """A list that a capture does not put back: it knows Python's own containers only."""


SEEN = Seen()


def watched(case: Case) -> Case:
    """The same, with a loss that catches whatever is thrown through it, where a capture starts again say."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return case.loss_fn(model, batch)
        except BaseException as error:
            SEEN.append(error)
            raise

    return dataclasses.replace(case, loss_fn=loss_fn)


# One of each kind: loops, what starts a capture again, what is refused.
OFTEN = {"chain", "collected", "alternating", "passed on", "in place", "an attribute", "buffers", "autocast"}
OFTEN |= {"a rule that reads late", "hooks on the graph", "second derivative", "a second result of the last"}
ROWS = {row.case.name: row for row in LAYERED}


@pytest.mark.parametrize("name", chosen(ROWS, OFTEN))
def test_layers_follow_eager_torch(name: str) -> None:
    SEEN.clear()
    layered = ROWS[name]
    trajectory = eager_trajectory(layered.case, 2)
    case = watched(layered.case)
    step = assert_follows(case, case.model(), trajectory, (4, 2) if case.rules else (2, 1))
    assert SEEN == []
    assert layered.says in step.report()
    if layered.loops:
        assert _loops(step) == layered.loops


def _trained(case: Case, **options: Any) -> Any:
    """Losses, and the state after three steps."""
    step = sgd_step(case.model(), case.loss_fn, (4, 2), plan=case.plan, **options)
    state, losses = step.init(seed=3), []
    for batch in case.batches(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, step


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def test_loops_can_be_asked_for_and_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    options: Any = {"mesh": make_mesh((1, 1)), "plan": EVERYWHERE}
    batch = (torch.ones(2, 4), torch.ones(2, 3))

    def run(model: nn.Module, **choice: Any) -> ts.TrainStep:
        step = ts.make_train_step(model, squared_error, optax.sgd(0.1), **options, **choice)
        step.lower(step.structs, batch)
        return step

    assert run(model).report() == "No layers repeat: there are no 3 numbered siblings that look alike."
    alike = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 3))
    assert run(alike, scan_layers=False).report() == "No layers are loops: scan_layers=False."
    budgeted = ts.make_train_step(alike, squared_error, optax.sgd(0.1), **options, remat=2**30)
    budgeted(budgeted.init(seed=0), batch)  # whether it fits is known of a compiled program
    assert "remat='none' takes" in budgeted.report()
    assert "0, 1, 2: not in a loop: scan_layers=False" in run(alike, scan_layers=False, remat="block").report()
    with pytest.raises(ValueError, match=r"(?s)scan_layers=True needs .* no numbered siblings"):
        run(model, scan_layers=True)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 3)
    )  # 4, 3 twice, not in a row
    with pytest.raises(ValueError, match=r"(?s)scan_layers=True needs .* layers next to it are other programs"):
        run(model, scan_layers=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"(?s)remat='block' needs .* torch.utils.checkpoint"):
        run(model, remat="block")


@pytest.mark.parametrize(
    ("depth", "choice", "loops"),
    [(16, {}, False), (17, {}, True), (4, {"scan_layers": True}, True)],
)
def test_few_layers_run_one_by_one_on_tpus(depth: int, choice: dict[str, Any], loops: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)))
    batch = tuple(torch.empty(8, 8, device="meta") for _ in range(2))
    mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
    step = ts.make_train_step(model, squared_error, optax.sgd(0.1), mesh=mesh, plan=EVERYWHERE, **choice)
    step.lower(step.structs, batch)  # nothing is compiled
    assert ("one loop" in step.report()) is loops
    if not loops:
        assert step.report() == (
            "No layers are loops: on TPU up to 16 layers, here 16, are faster one by one, and compile two to three "
            "times as long; scan_layers=True makes loops."
        )


class Conditioned(Stack):
    """Uses a part of its first block once more at the end, as diffusers' DiT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].norm(super().forward(x))


def test_parameters_of_layers_are_used_outside_of_them_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, batch = Conditioned(), (torch.ones(8, WIDTH), torch.ones(8, WIDTH))
    step = sgd_step(model, squared_error)
    step.lower(step.structs, batch)
    assert step.report().splitlines()[0] == f"blocks.0 to blocks.{DEPTH - 1}: one loop, {DEPTH} iterations"


class CountingOn(Block):
    """Multiplies by the number of earlier calls, of all models' steps."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_layers_may_not_depend_on_counts_of_their_calls() -> None:
    step = sgd_step(Stack(CountingOn), squared_error)
    with pytest.raises(NotImplementedError, match=r"changes the plain attribute blocks.0.calls"):
        step(step.init(seed=0), (torch.ones(8, WIDTH), torch.ones(8, WIDTH)))


class Widened(Block):
    """Norms are in float32, and so is what a region within the layer asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.norm(x).dtype == torch.float32
        with torch.autocast("cuda", torch.bfloat16):
            assert x.softmax(-1).dtype == torch.float32
            assert self.up(x).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert self.norm(x.float()).dtype == self.up(x.float()).dtype == torch.float32
        return super().forward(x)


AUTOCAST: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mixed_precision": "autocast"}

# Masks are the same bit by bit, but XLA sums the rest in another order; in a loop it rounds to bfloat16 less often.
UNROLLED = {
    "random numbers": (Dropping, {}, {"remat": "dots"}, 1e-5, 2e-6),
    "dtypes": (Widened, AUTOCAST, {}, 2e-3, 4e-3),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_loops_give_what_the_unrolled_program_does(name: str) -> None:
    block, options, remat, rtol, atol = UNROLLED[name]
    case = Case(name, lambda: Stack(block), regression(WIDTH, out=WIDTH), {})
    losses, state, step = _trained(case, **options, **remat)
    wanted, unrolled, _ = _trained(case, **options, scan_layers=False)
    assert _loops(step) == FORTH_AND_BACK
    np.testing.assert_allclose(losses, wanted, rtol=rtol)
    for name, value in unrolled.params.items():
        np.testing.assert_allclose(state.params[name], value, rtol=0, atol=atol, err_msg=name)


def test_gradients_leave_a_loop_as_narrow_as_they_were_computed() -> None:
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mesh": make_mesh((1, 1)), "plan": EVERYWHERE}
    seen = list[Any]()
    note = optax.stateless(lambda updates, params: seen.extend(x.dtype for x in jax.tree.leaves(updates)) or updates)
    step = ts.make_train_step(Stack(), lambda model, x: model(x).square().mean(), note, **options)
    text = step.lower(step.structs, torch.empty(6, WIDTH)).as_text()
    backward = re.findall(r"stablehlo.while.*? : (.*)", text)[1]
    weights = [p for p in Block().parameters() if p.ndim == 2]
    stacks = [f"tensor<{DEPTH}x{'x'.join(map(str, w.shape))}x" for w in weights]
    assert all(backward.count(f"{stack}bf16>") == stacks.count(stack) for stack in stacks)  # else they are of float32
    assert {np.dtype(dtype) for dtype in seen} == {np.dtype(np.float32)}


def test_what_layers_keep_serves_later_captures() -> None:
    case = Case("keeping", lambda: Stack(Keeping), regression(WIDTH, out=WIDTH), {})
    model, (batch,) = case.model(), case.batches(1)
    step = sgd_step(model, case.loss_fn, plan=case.plan)
    state, _ = step(step.init(seed=0), batch)
    wanted = case.loss_fn(step.export(state), batch).item()
    np.testing.assert_allclose(step.evaluation()(state, batch)["loss"], wanted, rtol=1e-6)


def test_an_evaluation_has_loops_too() -> None:
    case = Case("dropping", lambda: Stack(Dropping), regression(WIDTH, out=WIDTH), {})
    model, (batch,) = case.model().eval(), case.batches(1)
    wanted = case.loss_fn(model, batch).item()
    step = sgd_step(model, case.loss_fn, (4, 2), plan=case.plan)
    evaluate = step.evaluation()
    metrics = evaluate(step.init(seed=0), batch)
    assert _loops(evaluate) == ((DEPTH, 1),)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)


def test_gradients_of_what_comes_after_the_layers_are_made_before_the_loop_back() -> None:
    """Else XLA for TPUs makes that of an output layer at the very end, and keeps the logits for it until then."""
    model = nn.Sequential(Stack(), nn.Linear(WIDTH, 40))
    step = sgd_step(model, lambda model, x: model(x).logsumexp(-1).mean(), (8, 1))
    lines = step.lower(step.structs, torch.empty(8, WIDTH)).as_text().splitlines()
    (barrier,) = [at for at, line in enumerate(lines) if "optimization_barrier" in line and "40x" in line]
    loops = [at for at, line in enumerate(lines) if "stablehlo.while" in line]
    assert loops[0] < barrier < loops[1]
