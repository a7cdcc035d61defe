"""Wrong arguments of every public name are refused in our words, before anything is traced."""

import contextlib
import re
import time
import traceback
import warnings

import pytest
import torch

from tests.tables.bad_calls import ACCEPTED, RAISED, REFUSED, X, call, make


def raised_by(text: str) -> Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is odd about the call, as that zeros have no elements
        try:
            found = call(text)
        except Exception as error:
            return error
    raise AssertionError(f"{text} was accepted, and gave {found!r}.")


def is_ours(error: Exception) -> bool:
    """Tell whether our code, or that of the command line, raised it."""
    by_command_line = type(error).__module__.startswith(("click", "typer"))
    return by_command_line or "torch_shard" in traceback.extract_tb(error.__traceback__)[-1].filename


@pytest.mark.parametrize("topic", REFUSED)
def test_a_bad_call_is_refused_in_our_words(topic, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    faults = []
    for text, words in REFUSED[topic].items():
        error = raised_by(text)
        found = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
        if not found.startswith(words) or not is_ours(error):
            faults.append(f"{text}\n    must be {words}\n    got     {found}")
    assert not faults, "\n".join(faults)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_users_own_code_says_for_which_batch():
    for text, kind in RAISED.items():
        error = raised_by(text)
        assert type(error).__name__ == kind, text
        if not text.startswith("ts.explain_capture"):
            assert any("_step: the loss was captured, once, for a batch of " in note for note in error.__notes__), text


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_is_right_is_accepted(text):
    call(text)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_changes_nothing():
    losses = []
    for mode in (contextlib.nullcontext, torch.autograd.detect_anomaly):
        torch.manual_seed(0)
        step = make()
        with mode():
            losses.append(float(step(step.init(seed=0), X)[1]["loss"]))
    assert losses[0] == losses[1]


def test_a_clock_that_changes_nothing_is_harmless():
    def timed(model, batch):
        start = time.perf_counter()
        loss = model(batch).square().mean()
        model.elapsed = time.perf_counter() - start
        return loss

    step = make(loss_fn=timed)
    step(step(step.init(seed=0), X)[0], X)
