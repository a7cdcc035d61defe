"""Whole activations in bfloat16: against eager torch with parameters that are cast, and by what the program holds."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import anew, sgd_step

ROWS, LENGTH, WIDTH = 4, 6, 16
PLAN = ts.ShardingPlan({}, default=P())


class Block(nn.Module):
    """With a scale of its own, as HF's norms have one, outside of all functions that are named in a policy."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Tied, with a learned place and a scale of its own."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(40, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.RMSNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.attention = (
            nn.LSTM(WIDTH, WIDTH, batch_first=True),
            nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True),
        )
        self.conv, self.batch, self.group = nn.Conv1d(WIDTH, 8, 3), nn.BatchNorm1d(8), nn.GroupNorm(2, 8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.recurrent(x)[0]
        x = x + self.attention(x, x, x)[0]
        return self.batch(self.group(self.conv(x.transpose(1, 2))).tanh())[..., 0]


class Encoder(nn.TransformerEncoderLayer):
    """What comes into its attention is wide, before anything is a product."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0, :8]


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x[:, 0, :8])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[], torch.Tensor]]] = {
    "language": (Language, next_token, tokens),
    "encoder": (Encoder, squares, lambda: torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))),
    "others": (Others, squares, lambda: torch.randn(32, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))),
}


CAST: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mixed_precision": "params"}


@functools.cache
def make_step(name: str) -> tuple[ts.TrainStep, torch.Tensor]:
    make, loss_fn, batch = CASES[name]
    torch.manual_seed(0)
    return sgd_step(make(), loss_fn, (2, 1), **CAST), batch()


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_what_eager_torch_makes_of_it(name: str) -> None:
    step, batch = make_step(name)
    step.prove(state := step.init(), batch).raise_if_different()
    if name == "language":  # no layer of it knows whether it is trained
        evaluated, trained = step.evaluation()(state, batch), step(state, batch)[1]
        # two programs, in which what is rounded to 8 bits may be summed in another order before
        assert float(evaluated["loss"]) == pytest.approx(float(trained["loss"]), rel=2**-8)


def test_it_is_a_model_whose_parameters_are_cast() -> None:
    """By plain torch alone: `functional_call` with parameters in bfloat16, whose gradients reach those in float32."""
    step, batch = make_step("language")
    torch.manual_seed(0)
    model = Language()
    state, metrics = step(anew(step, model).init(), batch)
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    cast = {name: p.bfloat16() for name, p in held.items()}
    logits = torch.func.functional_call(model, cast, (batch,))
    assert logits.dtype is torch.bfloat16
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    loss = loss.detach()
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=2**-7)  # a rounding of 2**-8 on each of two sides
    found = dict(step.export(state).named_parameters())
    for name, parameter in held.items():
        assert parameter.grad is not None
        wanted = parameter - 0.1 * parameter.grad
        largest = float(parameter.grad.abs().max())
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=0.1 * largest * 2**-4, check_dtype=False)


def test_no_activation_between_layers_is_wide() -> None:
    """The stream of a block's norm is; under autocast the sums between layers are, too."""
    step, batch = make_step("language")
    text = step.lower(step.structs, batch).as_text()
    assert [loop.num_iterations for loop in step.programs[0].loops] == [3, 3]
    assert f"tensor<3x{ROWS}x{LENGTH}x{WIDTH}xbf16>" in text  # what the loop saves
    assert f"tensor<3x{ROWS}x{LENGTH}x{WIDTH}xf32>" not in text
    autocast = sgd_step(Language(), next_token, (2, 1), **{**CAST, "mixed_precision": "autocast"})
    assert f"tensor<3x{ROWS}x{LENGTH}x{WIDTH}xf32>" in autocast.lower(autocast.structs, batch).as_text()


def test_a_parameter_that_is_written_stays_as_it_is() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(4, 4), nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1.001
            return self.linear(x)

    step = sgd_step(Counts(), lambda model, x: model(x).float().square().mean(), **CAST)
    state, _ = step(step.init(), torch.ones(2, 4))
    assert torch.equal(step.export(state).get_parameter("count"), torch.full((3,), 1.001))


def test_another_cast_is_refused() -> None:
    with pytest.raises(ValueError, match='mixed_precision must be "autocast" or "params", got \'all\''):
        sgd_step(Language(), next_token, mixed_precision="all")
