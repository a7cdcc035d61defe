"""The loop: to the bit after any stop, with an orderly refusal of what it cannot do."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.steps import anew, step_of
from tests.tables.cases import chosen
from tests.tables.runs import DATA, FEATURES, LOADERS, STEPS, loader, losses, make_model, run, squares, values
from torch_shard._fit import read_metrics
from torch_shard._fit.data import Batches
from torch_shard._fit.fit import Evaluation


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the workers do not touch
@pytest.mark.parametrize("kind", chosen([kind for kind in LOADERS if kind != "shuffled"], ["stream"]))
def test_stopped_and_resumed_is_uninterrupted_to_the_bit(kind, step, tmp_path):
    whole = run(step, LOADERS[kind](), tmp_path / "whole")
    parts = tmp_path / "parts"
    for number, stop in enumerate((4, 7, STEPS)):  # within an epoch and at none of the checkpoints' steps
        torch.manual_seed(number)  # another process would have drawn other numbers before
        random.seed(number)
        np.random.seed(number)
        state = run(step, LOADERS[kind](), parts, stop)
        assert int(state.num_batches) == stop
    assert losses(parts / "log") == losses(tmp_path / "whole" / "log")
    assert len(losses(parts / "log")) == STEPS
    for name, value in values(whole).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_state_alone_goes_on_where_it_was(step):
    whole = ts.fit(step, step.init(seed=0), loader(), steps=9, progress=False)
    state = ts.fit(step, anew(step, make_model()).init(seed=0), loader(), steps=4, progress=False)
    state = ts.fit(step, state, loader(), steps=9, progress=False)
    for name, value in values(whole).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_evaluation_in_bfloat16_adds_up_in_float():
    step = step_of(nn.Linear(FEATURES, 2).bfloat16())
    state, batches = step.init(seed=0), [part.bfloat16() for part in DATA[:40].split(8)]
    evaluate = step.evaluation()
    wanted = np.mean([float(evaluate(state, batch)["loss"]) for batch in batches])
    assert Evaluation(evaluate, Batches(batches, seed=0))(state) == {"loss": pytest.approx(wanted, 1e-12)}


def test_the_last_batch_of_an_evaluation_may_have_any_size(step, tmp_path, caplog):
    """What does not divide over the mesh is evaluated whole on each device: the mean is that over all rows."""
    batches, evaluate = [DATA[:16], DATA[16:32], DATA[32:37]], step.evaluation()
    with caplog.at_level(logging.INFO):
        state = ts.fit(
            step, None, loader(), steps=2, eval_loader=batches, eval_step=evaluate, log=tmp_path, progress=False
        )
    (found,) = (r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "eval")
    model = step.export(state).eval()
    with torch.no_grad():
        wanted, each = (squares(model, batch)[0].item() for batch in (DATA[:37], DATA[32:37]))
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)  # float32 sums in another order
    assert float(evaluate(state, DATA[32:37])["loss"]) == pytest.approx(each, rel=1e-5)
    assert evaluate.num_compiles == 2
    assert evaluate.put(DATA[32:37]).arrays[0].sharding.is_fully_replicated
    assert not evaluate.put(DATA[:16]).arrays[0].sharding.is_fully_replicated
    (said,) = {r.getMessage() for r in caplog.records if "whole on each device" in r.getMessage()}
    assert said.startswith("make_eval_step: a batch that does not divide over the mesh")
    with pytest.raises(ValueError, match="is not a multiple of batch=4"):  # where each device has its share of the work
        step(step.init(seed=0), DATA[32:37])


def test_options_are_checked_before_anything_runs(step):
    state = ts.fit(step, None, loader(), steps=2, progress=False)
    with pytest.raises(ValueError, match=r"the state has seen 2 batches, and steps=1"):
        ts.fit(step, state, loader(), steps=1, progress=False)
    assert not state.step.is_deleted()
