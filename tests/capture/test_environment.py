"""A capture leaves torch as it was, and sees what JAX is set to."""

import jax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.capture.test_data_dependence import Chooses
from tests.oracles.derivatives import agrees

X = torch.tensor([0.5, -1.0, 2.0])


def test_a_capture_leaves_torch_as_it_was() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    state, fastpath = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 3, 8)
    torch.set_rng_state(state)
    ts.jax_jit(lambda x: model(x, x, x)[0])(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert torch.backends.mkldnn.enabled
    assert not model.in_proj_weight.grad_fn
    assert torch.is_grad_enabled()


def test_a_failed_capture_leaves_torch_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Chooses())
    with pytest.raises(NotImplementedError):
        ts.jax_jit(model)(X)
    assert torch.backends.mkldnn.enabled
    assert type(model[0].weight) is nn.Parameter
    torch.testing.assert_close(ts.jax_jit(model[0])(X).cpu(), model[0](X))


def test_sixty_four_bits_when_jax_has_them() -> None:
    with jax.enable_x64(True):
        agrees(lambda x: (x**3).sum(), X.double())
