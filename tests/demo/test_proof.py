"""The demo's proof: it holds, and fails for what is wrong."""

import optax
import pytest
import torch

import torch_shard as ts
from torch_shard._demo import proof as proving
from torch_shard._demo.model import GPT
from torch_shard._demo.run import PLAN
from torch_shard._demo.text import VOCABULARY, draw_batch

SMALL = {"vocab_size": len(VOCABULARY), "context": 16, "width": 32, "num_layers": 1, "num_heads": 4}


def prove_small(corpus):
    torch.manual_seed(0)
    batches = [draw_batch(corpus.validation, batch_size=8, context=16, seed=(0, i)) for i in range(10)]
    return proving.prove(GPT(**SMALL), batches, mesh=ts.make_mesh(batch=4, model=2), plan=PLAN)


def test_proof_holds(corpus):
    proof = prove_small(corpus)
    assert proof.holds
    assert proof.losses[-1] < proof.losses[0]


@pytest.mark.slow
def test_proof_fails_if_the_step_leaves_out_weight_decay(corpus, monkeypatch):
    adamw = optax.adamw
    monkeypatch.setattr(optax, "adamw", lambda *args, **kwargs: adamw(*args, **kwargs | {"weight_decay": 0.0}))
    assert not prove_small(corpus).holds
