"""The demo's text and its batches."""

import numpy as np
import pytest
import torch

from torch_shard._demo.text import VOCABULARY, Corpus, decode, draw_batch, encode


def test_corpus_is_real_and_split_by_file(corpus):
    assert len(corpus.train) > 5 * len(corpus.validation) > 0
    assert "import " in decode(torch.from_numpy(corpus.validation[:100_000]))
    assert 3 < corpus.unigram_entropy < np.log(len(VOCABULARY))


def test_unigram_entropy_of_two_equal_tokens_is_log_two():
    tokens = np.array([5, 9, 9, 5], np.uint8)
    assert Corpus(tokens, tokens, 1).unigram_entropy == pytest.approx(np.log(2))


def test_text_survives_encoding():
    text = "def f(x):\n    if x:\n        return '~'\n"
    assert decode(encode(text)) == text
    assert decode(encode("é\r")) == "??"
    assert len(encode(text)) < len(text)


def test_targets_are_inputs_one_position_on():
    inputs, targets = draw_batch(np.arange(50, dtype=np.uint8), batch_size=3, context=8, seed=(0, 1))
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(targets, inputs + 1)
    again, _ = draw_batch(np.arange(50, dtype=np.uint8), batch_size=3, context=8, seed=(0, 1))
    assert torch.equal(inputs, again)
