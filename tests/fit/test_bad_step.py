"""Steps that are not taken: named, skipped, or the end of the run."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.steps import anew, step_of
from tests.tables.runs import DATA, FEATURES, loader, make_model, values
from torch_shard.cli import app


def poisoned(position, at):
    batch = DATA[:8].clone()
    batch[0, 0] = math.nan if position == at else 0
    return batch


def test_bad_step_is_named(step, tmp_path):
    batches = [poisoned(n, 3) for n in range(6)]
    with ts.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            ts.BadStepError, match=r"batch 4 was not taken.*the loss is nan.*The batch itself has"
        ) as found:
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        assert found.value.non_finite == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
        assert (int(found.value.state.step), int(found.value.state.num_batches)) == (3, 3)
        assert "the state is saved in" in "".join(found.value.__notes__)
        assert checkpointer.steps() == [3]
        with pytest.raises(ts.BadStepError, match="batch 4 was not taken"):  # and not passed over in silence
            ts.fit(step, None, batches, steps=6, checkpointer=checkpointer, progress=False)
        state = checkpointer.restore(step)
    good = ts.fit(step, anew(step, make_model()).init(seed=0), batches[:3], steps=3, progress=False)
    for name, value in values(good).items():
        np.testing.assert_array_equal(values(state)[name], value, err_msg=name)


def test_bad_step_is_skipped_or_ends_the_run(step, caplog):
    batches = [poisoned(n, 3) for n in range(6)]
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="skip", progress=False)
    assert (int(state.step), int(state.num_batches)) == (5, 6)
    assert all(np.isfinite(value).all() for value in values(state).values())
    assert "batch 4 was not taken" in caplog.text
    state = ts.fit(step, step.init(seed=0), batches, steps=6, on_bad_step="stop", progress=False)
    assert (int(state.step), int(state.num_batches)) == (3, 3)


def test_large_gradient_is_no_step(step):
    with pytest.raises(ts.BadStepError, match=r"the gradient's norm .* \(skip_grad_norm=1e-09\)") as found:
        ts.fit(step, step.init(seed=0), loader(), steps=2, skip_grad_norm=1e-9, progress=False)
    assert found.value.non_finite == []


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x * 0)


class Model(nn.Module):
    """Registered in another order than it runs: a, b, root, c."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.root, self.a = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.root = Root()

    def forward(self, x):
        return self.c(self.root(self.b(self.a(x))))


class Logs(Model):
    def forward(self, x):
        hidden = self.a(x).clamp(min=0) * 0
        return self.c(-torch.log(hidden)) * 0


class Masked(Model):
    """Hidden keys are minus infinity, as they should be; a row without a key is what fails."""

    def forward(self, x):
        scores = self.a(x).masked_fill(x > -99, -math.inf)
        return self.c(scores.softmax(-1))


LINE = r'\(File ".*test_bad_step.py", line \d+, in forward: '
FAILS = [
    (
        1,
        Model,
        r"gradients are not finite .*The first value that is not finite is in the gradient of sqrt in root " + LINE,
    ),
    (
        2,
        Logs,
        r"nan.*The first minus infinity is a result of log in Logs .*torch.log.*\. The first NaN is a result of",
    ),
    (1, Masked, r"nan.* not finite \([^)]*\)\. The first NaN is a result of softmax in Masked .*scores.softmax"),
]


def refused(said, model, loss_fn=lambda m, x: m(x).sum(), **options):
    """The error of a run whose first step is bad."""
    step = step_of(model, loss_fn, mesh=(4, 1), **options)
    with pytest.raises(ts.BadStepError, match=said) as found:
        ts.fit(step, None, [DATA[:8]], steps=1, progress=False)
    return found.value


@pytest.mark.parametrize(("accumulate_steps", "build", "said"), FAILS, ids=["gradient", "log", "softmax"])
def test_the_place_where_it_began_is_named(accumulate_steps, build, said):
    refused(said, build(), lambda m, x: F.dropout(m(x), 0.1).sum(), accumulate_steps=accumulate_steps)


def test_where_it_began_is_not_guessed(monkeypatch):
    words = "Where it began is not known: "
    with monkeypatch.context() as patch:
        patch.setattr("torch_shard._fit.loop._MOST_WORK", 10)
        refused(words + "repeating the batch in eager torch would take", Model())
    monkeypatch.setattr("torch_shard._train.replay.split_loss", lambda loss: (torch.ones(()), {}))
    refused(words + "eager torch ends this batch with RuntimeError: element 0 of tensors", Model())


def test_what_eager_torch_refuses_is_said():
    labels = torch.full((8,), 10)
    refused(
        "eager torch ends this batch with IndexError: Target 10 is out of bounds",
        nn.Linear(FEATURES, 10),
        lambda m, x: F.cross_entropy(m(x), labels),
    )


def test_parameters_that_were_bad_before_are_named():
    model = nn.Linear(FEATURES, 1)
    model.bias.data.fill_(math.nan)
    refused("Before the batch, bias of the state had values that are not finite", model)


def test_gradients_that_are_not_finite_are_named():
    """A square root of zero has no gradient: what stands before it is bad, what stands after it is not."""
    error = refused(r"4 of 6 gradients are not finite \(b.weight, b.bias, a.weight, a.bias\)", Model())
    assert error.non_finite == ["b.weight", "b.bias", "a.weight", "a.bias"]


ROOTED = """
import optax, torch
from jax.sharding import PartitionSpec as P
import torch_shard as ts
from tests.fit.test_bad_step import Model, root_loss as loss_fn
model, optimizer = Model(), optax.sgd(0.1)
batch = {"x": torch.zeros(8, 6), "scale": 1.0}
plan = ts.ShardingPlan({}, default=P())
"""


def root_loss(model, batch):
    return F.dropout(model(batch["x"]) * batch["scale"], 0.1).sum()


def test_a_bad_step_is_explained_and_can_be_repeated(tmp_path, monkeypatch):
    step = step_of(Model(), root_loss, plan=ts.ShardingPlan({"c.weight": P("model")}, default=P()))
    batch = {"x": DATA[:8], "scale": 1.0}
    with ts.Checkpointer(tmp_path) as checkpointer, pytest.raises(ts.BadStepError) as found:
        ts.fit(step, None, [batch], steps=1, checkpointer=checkpointer, on_bad_step="explain", progress=False)
    said = "The first value that is not finite is in the gradient of sqrt in root"
    assert said in str(found.value)
    assert "Gradients that are not finite: b.weight, b.bias, a.weight, a.bias" in str(found.value)
    (tmp_path / "run.py").write_text(ROOTED)
    monkeypatch.syspath_prepend(".")
    command, batch_file = ["replay", str(tmp_path / "run.py"), str(tmp_path)], tmp_path / "bad_batch.safetensors"
    done = CliRunner().invoke(app, [*command, "--mesh", "batch=2"])
    assert done.exit_code == 0, done.output
    assert said in done.output
    batch_file.write_bytes(b"nothing")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "is damaged" in done.output
    batch_file.unlink()
    assert "writes it" in CliRunner().invoke(app, command).output
