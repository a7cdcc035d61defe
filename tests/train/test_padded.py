"""A vocabulary that does not divide, stored padded; the oracles are eager torch, and a step that keeps it whole."""

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
from tests.oracles.collectives import collectives_of, count_collectives
from tests.oracles.steps import check_goes_on, check_same, run_steps, step_of
from tests.train.test_pipeline import Tower

VOCAB, D = 13, 8


class Tied(nn.Module):
    """A table of words that is the head, too, or a head of its own with a bias."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.head = nn.Linear(D, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_batch(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (8, 4), generator=torch.Generator().manual_seed(seed))


def make_step(
    *,
    tied: bool = True,
    pad_vocab: bool = True,
    sizes: tuple[int, int] = (4, 2),
    optimizer: optax.GradientTransformation | None = None,
    **options: Any,
) -> ts.TrainStep:
    torch.manual_seed(0)
    model = Tied(tied)
    mesh = ts.make_mesh(batch=sizes[0], model=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
    plan = ts.plans.fsdp_tp(model, mesh, pad_vocab=pad_vocab)
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return step_of(model, loss_fn, optimizer, mesh=mesh, plan=plan, **options)


def run(step: ts.TrainStep, state: ts.TrainState | None = None, num: int = 3) -> tuple[ts.TrainState, list[float]]:
    return run_steps(step, make_batch, state, num)


@pytest.mark.parametrize(
    ("optimizer", "tied"),
    [
        pytest.param(None, True, id="adamw, tied"),
        pytest.param(optax.adafactor(1e-2, min_dim_size_to_factor=4), False, id="adafactor"),
    ],
)
def test_padded_trains_as_whole(optimizer: optax.GradientTransformation | None, tied: bool):
    step = make_step(tied=tied, optimizer=optimizer)
    state, losses = run(step)
    wanted, expected = run(make_step(tied=tied, optimizer=optimizer, pad_vocab=False, sizes=(1, 1)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    check_same(state, wanted)
    step.prove(state, make_batch()).raise_if_different()


def test_a_device_has_its_part_of_the_words():
    step = make_step(accumulate_steps=2)
    state, _ = run(step, num=1)
    assert state.params["words.weight"].shape == (VOCAB, D)
    stored = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert stored[VOCAB + 1, D] == P("model", "batch")
    assert (VOCAB, D) not in stored
    entry = step.plan.entries["words.weight"]
    assert entry.local_shape == (7, 2)
    assert "padded to 14" in entry.reason
    kept = np.asarray(next(leaf for leaf in jax.tree.leaves(state.params) if leaf.shape == (VOCAB + 1, D)))
    assert not kept[VOCAB:].any()


def test_as_little_is_sent_as_for_a_vocabulary_that_divides():
    def sent(vocab: int) -> tuple[int, set[str]]:
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "VOCAB", vocab)
            step = make_step()
        program = step.lower(step.structs, make_batch()).compile()
        return sum(sum(found.sizes) for found in collectives_of(program)), set(count_collectives(program))

    (padded, kinds), (even, wanted) = sent(13), sent(14)
    assert kinds <= wanted
    assert padded <= even


@pytest.mark.parametrize("is_written", [True, False])
def test_files_are_of_torchs_form(tmp_path, is_written: bool):
    first, second = make_step(pad_vocab=is_written), make_step(pad_vocab=not is_written, sizes=(2, 4))
    state, _ = run(first)
    ts.export_safetensors(state, tmp_path / "model.safetensors")
    exported = dict(first.export(state).named_parameters())["words.weight"].detach().numpy()
    np.testing.assert_array_equal(exported, state.params["words.weight"])
    mesh = ts.make_mesh(batch=4, model=2)
    model = ts.load_safetensors(tmp_path / "model.safetensors", Tied(), mesh, ts.plans.tp(Tied(), mesh, pad_vocab=True))
    np.testing.assert_array_equal(model.words.weight.detach().numpy(), exported)
    check_goes_on(tmp_path / "run", state, (first, second), make_batch)


def test_the_stream_may_be_split_along_its_sequence():
    model = Tower(3, words=VOCAB)
    plan = ts.plans.fsdp_tp(model, ts.make_mesh(batch=4, model=2), sequence=True, pad_vocab=True)
    assert plan.activations["embed"] == P("batch", "model", None)
    step = step_of(model, loss_fn, plan=plan)
    step.prove(step.init(seed=0), make_batch()).raise_if_different()


def test_what_does_not_fit_is_refused():
    model, mesh = Tied(), ts.make_mesh(batch=4, model=2)
    plan = ts.ShardingPlan({"words.weight": P("model")}, default=P(), stored={"words.weight": ts.Padded(15, dim=0)})
    with pytest.raises(ValueError, match="15 is not a multiple"):
        plan.resolve(model, mesh)
