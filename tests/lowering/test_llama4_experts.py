"""Llama 4's experts on the tokens that chose them, against its own model in eager torch, which runs all on all."""

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import torch_shard as ts
from tests.lowering.test_experts import OURS, TOKENS, WIDTH, check
from tests.oracles.graphs import targets_of
from tests.oracles.steps import step_of


def make_mixture(choices: int = 1, num: int = 4) -> Llama4TextMoe:
    fields = {"hidden_size": WIDTH, "intermediate_size": 12, "num_local_experts": num}
    torch.manual_seed(0)
    mixture = Llama4TextMoe(Llama4TextConfig(**fields, num_experts_per_tok=choices))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture


@pytest.mark.parametrize("choices", [1, 2])
def test_value_and_gradients_equal_eager_torch(choices: int) -> None:
    check(make_mixture(choices))


def test_arithmetic_does_not_grow_with_the_number_of_experts() -> None:
    def flops(num: int) -> float:
        step = step_of(
            make_mixture(num=num), lambda mixture, x: mixture(x)[0].square().mean(), mesh=ts.make_mesh(batch=1)
        )
        step(step.init(), torch.randn(1, 4096, WIDTH))
        return step.programs[0].num_flops

    assert flops(16) < 1.5 * flops(4)  # half a block more of each expert; four times as much as the model writes it


def test_hooked_and_other_experts_stay_as_they_are() -> None:
    hooked, other, x = make_mixture(), make_mixture(), torch.randn(1, TOKENS, WIDTH)
    hooked.experts.register_forward_hook(lambda module, args, out: out)
    other.experts.forward = lambda rows: rows
    for mixture in (hooked, other):
        assert OURS not in targets_of(lambda x, mixture=mixture: mixture(x)[0], [x])
