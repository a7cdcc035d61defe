"""The demo's model."""

import torch

from torch_shard._demo.model import GPT
from torch_shard._demo.text import VOCABULARY

SMALL = {"vocab_size": len(VOCABULARY), "context": 16, "width": 32, "num_layers": 1, "num_heads": 4}


def test_model_sees_no_later_token():
    model = GPT(**SMALL).eval()
    tokens = torch.randint(len(VOCABULARY), (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
