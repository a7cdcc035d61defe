"""Wrong arguments of every public name are refused in our words, before anything is traced."""

import re
import traceback
import warnings

import pytest

from tests.tables.bad_calls import RAISED, REFUSED, call


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
