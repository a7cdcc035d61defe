"""Random numbers in a training step: other ones by step and by layer, the same by seed and on every mesh."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard as ts
from tests.oracles.eager import record_grads
from tests.oracles.steps import step_of

WIDTH = 16

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.5, training=True)[..., 0],
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rand": lambda x: x * torch.rand(WIDTH),
    "randn_like": torch.randn_like,
    "randint": lambda x: x * torch.randint(0, 1000, (WIDTH,)),
    "randperm": lambda x: x[:, torch.randperm(WIDTH)] * torch.arange(WIDTH),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(WIDTH), WIDTH)] * torch.arange(WIDTH),
    "normal_": lambda x: x * torch.empty(WIDTH).normal_(),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
}


class Draws(nn.Module):
    """Each kind of draw twice, as two layers would."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        drawn = {name: (draw(x * self.scale), draw(x * self.scale)) for name, draw in DRAWS.items()}
        loss = torch.stack([a.mean() + b.mean() for a, b in drawn.values()]).sum()
        return loss, {name: torch.stack(pair).detach() for name, pair in drawn.items()}


@pytest.fixture(scope="module")
def run() -> Callable[..., list[dict[str, np.ndarray]]]:
    model, loss_fn = Draws(), lambda model, batch: model(batch)
    x = (torch.arange(8 * WIDTH).view(8, WIDTH) % 7 + 1.0) / 4
    steps: dict[Any, ts.TrainStep] = {}

    def metrics(sizes: tuple[int, int], seed: int) -> list[dict[str, np.ndarray]]:
        plan = ts.ShardingPlan({"scale": P("model")}, default=P())
        if sizes not in steps:
            steps[sizes] = step_of(model, loss_fn, optax.sgd(0.0), mesh=sizes, plan=plan)
        step = steps[sizes]
        state, first = step(step.init(seed=seed), x)
        _, second = step(state, x)
        return [{name: np.asarray(m[name]) for name in DRAWS} for m in (first, second)]

    return metrics


def test_draws_differ_by_layer_step_and_seed(run: Any) -> None:
    (firsts, seconds), others = run((1, 1), seed=0), run((1, 1), seed=1)[0]
    for name, first in firsts.items():
        assert not np.array_equal(first[0], first[1]), name
        assert not np.array_equal(first, seconds[name]), name
        assert not np.array_equal(first, others[name]), name
    dropped = firsts["dropout"] == 0
    assert 0.3 < np.mean(dropped) < 0.7  # 256 fair coins


def test_draws_repeat_by_seed_on_every_mesh(run: Any) -> None:
    for wanted, found in zip(run((1, 1), seed=0), run((4, 2), seed=0), strict=True):
        for name in DRAWS:  # the draws are the same bits; sums of products after them may differ in order
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's, of nested ones
@pytest.mark.parametrize(
    ("where", "use_reentrant"),
    [("step", True), ("adapters", False), ("eager", True), pytest.param("step", False, marks=pytest.mark.slow)],
)
def test_a_checkpoint_draws_the_same_numbers_again(where: str, use_reentrant: bool) -> None:
    """The gradient of `w * mask` is the mask; nested, with another draw in between that must not shift."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def inner(z: torch.Tensor) -> torch.Tensor:
                return checkpoint(lambda a: F.dropout(a, 0.5) + 0 * torch.rand_like(a), z, use_reentrant=use_reentrant)

            out = checkpoint(lambda z: inner(F.dropout(z, 0.25)), self.w * x, use_reentrant=use_reentrant)
            return out + 0 * F.dropout(x, 0.5)

    def loss_fn(model: Any, x: torch.Tensor) -> Any:
        out = model(x)
        return out.sum(), {"out": out.detach()}

    model, x = Masked(), torch.ones(8, WIDTH)
    if where == "step":
        step = step_of(model, loss_fn, record_grads(), plan=ts.ShardingPlan({"w": P("batch", "model")}))
        state, metrics = step(step.init(), x)
        grad, out = np.asarray(state.opt_state["w"]), np.asarray(metrics["out"])
    elif where == "adapters":

        def of_weights(w: torch.Tensor) -> Any:
            return loss_fn(lambda x: torch.func.functional_call(model, {"w": w}, (x,)), x)

        (_, aux), found = ts.jax_jit(ts.jax_value_and_grad(of_weights, has_aux=True))(model.w.detach())
        grad, out = found.cpu().numpy(), aux["out"].cpu().numpy()
    else:
        model.to("jax")
        loss, aux = loss_fn(model, x.to("jax"))
        loss.backward()
        grad, out = model.w.grad.cpu().numpy(), aux["out"].cpu().numpy()  # pyright: ignore
    assert 0 < np.mean(out > 0) < 1
    np.testing.assert_allclose(grad, out, rtol=1e-6)
