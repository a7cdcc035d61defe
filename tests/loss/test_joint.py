"""Loss, gradients and buffers as one function: hooks, parts that run again, parameters without a gradient."""

import numpy as np
import optax
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.eager import agrees_with_torch
from tests.oracles.errors import refuses
from tests.oracles.steps import sgd_step
from tests.tables.cases import BATCH, CASE, WHOLE, make_mesh, make_step, squared_error


def test_parameters_without_a_gradient_stay_as_torch_leaves_them() -> None:
    """AdamW would decay them; torch skips a parameter whose .grad is None."""
    case = CASE["frozen"]
    model = case.model()
    step = make_step(case, optimizer=optax.adamw(0.1, weight_decay=0.5), model=model)
    state, _ = step(step.init(), case.batches(1)[0])
    for name in ("unused.weight", "unused.bias", "layers.2.weight", "layers.4.bias"):
        np.testing.assert_array_equal(state.tensors[name], model.get_parameter(name).detach().numpy())
    assert set(state.frozen) == {"layers.2.weight", "layers.2.bias", "layers.4.bias"}
    assert set(state.opt_state[0].mu) == set(state.params)


def test_a_post_accumulate_hook() -> None:
    model = nn.Linear(8, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    step = sgd_step(model, squared_error, (8, 1))
    with refuses(r"weight has a post-accumulate-grad hook.*register_hook", NotImplementedError):
        step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))


class Recomputed(nn.Module):
    """Its backward pass runs parts of it again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_() if self.use_reentrant else x
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.use_reentrant
        )
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * self.second.bias.detach().sum().cos())
        return self.second(hidden)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_pass_that_runs_parts_again_sees_the_state(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(BATCH, 8), torch.randn(BATCH, 4)) for _ in range(4)]
    agrees_with_torch(Recomputed(use_reentrant), squared_error, batches)


def test_parameters_that_only_some_batches_reach() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def loss_fn(model: nn.Module, batch: dict) -> torch.Tensor:
        return sum(getattr(model, name)(x).square().mean() for name, x in batch.items())

    step = ts.make_train_step(Heads(), loss_fn, optax.adam(0.1), mesh=make_mesh((8, 1)), plan=WHOLE)
    state, _ = step(step.init(), {"a": torch.ones(8, 8)})
    with refuses(
        r"reaches a\.bias, a\.weight, b\.bias, b\.weight for some batches and not for others", NotImplementedError
    ):
        step(state, {"b": torch.ones(8, 8)})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of its forward mode
def test_a_gradient_of_a_hessian_is_refused_with_another_way() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hessian = torch.func.hessian(lambda x: model(x).sum())
        return torch.func.vmap(hessian)(batch).square().mean() + model(batch).mean()

    step = sgd_step(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), loss_fn, (8, 1))
    with refuses(r"make_train_step: a tensor of the meta device.*write jacrev\(jacrev\(f\)\)", NotImplementedError):
        step(step.init(), torch.ones(8, 4))
