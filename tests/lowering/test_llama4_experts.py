"""Llama 4's experts on the tokens that chose them, against its own model in eager torch, which runs all on all."""

from typing import Any

import optax
import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import torch_shard as ts
from tests.lowering.test_experts import CLOSE, OURS, TOKENS, WIDTH, targets


def make_mixture(choices: int = 1, num: int = 4) -> Llama4TextMoe:
    fields = {"hidden_size": WIDTH, "intermediate_size": 12, "num_local_experts": num}
    torch.manual_seed(0)
    mixture = Llama4TextMoe(Llama4TextConfig(**fields, num_experts_per_tok=choices))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture


@pytest.mark.parametrize("choices", [1, 2])
def test_value_and_gradients_equal_eager_torch(choices: int) -> None:
    mixture, x = make_mixture(choices), torch.randn(2, TOKENS // 2, WIDTH)
    names, wanted = [name for name, _ in mixture.named_parameters()], torch.randn(TOKENS, WIDTH)

    def fn(x: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out = torch.func.functional_call(mixture, dict(zip(names, values, strict=True)), (x,))
        return (out[0] * wanted).sum(), out

    given = [x, *(p.detach() for p in mixture.parameters())]
    assert OURS in targets(lambda *args: fn(*args)[0], given)
    (_, out), grads = ts.jax_jit(ts.jax_value_and_grad(fn, argnums=tuple(range(len(given))), has_aux=True))(*given)
    leaves = [t.clone().requires_grad_() for t in given]
    loss, expected = fn(*leaves)
    for ours, theirs in zip((*out, *grads), (*expected, *torch.autograd.grad(loss, leaves)), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), **CLOSE)


def test_arithmetic_does_not_grow_with_the_number_of_experts() -> None:
    def flops(num: int) -> float:
        step = ts.make_train_step(
            make_mixture(num=num),
            lambda mixture, x: mixture(x)[0].square().mean(),
            optax.sgd(0.1),
            mesh=ts.make_mesh(batch=1),
            plan=ts.plans.replicated(),
        )
        step(step.init(), torch.randn(1, 4096, WIDTH))
        return step.programs[0].num_flops

    assert flops(16) < 1.5 * flops(4)  # half a block more of each expert; four times as much as the model writes it


def test_hooked_and_other_experts_stay_as_they_are() -> None:
    hooked, other, x = make_mixture(), make_mixture(), torch.randn(1, TOKENS, WIDTH)
    hooked.experts.register_forward_hook(lambda module, args, out: out)
    other.experts.forward = lambda rows: rows
    for mixture in (hooked, other):
        assert OURS not in targets(lambda x, mixture=mixture: mixture(x)[0], [x])
