"""Programs that a compiler refuses for want of memory."""

from typing import Any

import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard._train import programs
from torch_shard._train.fitting import TooLarge, compile_or_refuse


class Lowered:
    """Stands for JAX's, whose compiler says this."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self) -> Any:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.5G of 15.75G hbm.", int(26.5 * 2**30)),
        ("RESOURCE_EXHAUSTED: the program (512M) exceeds", 2**29),
        ("RESOURCE_EXHAUSTED: it does not say", None),
    ],
)
def test_a_refusal_says_what_the_program_needs(message: str, num_bytes: int | None) -> None:
    lowered: Any = Lowered(message + "\nand more")
    assert compile_or_refuse(lowered) == TooLarge(message, num_bytes)


def test_another_error_stays_one() -> None:
    lowered: Any = Lowered("INTERNAL: broken")
    with pytest.raises(RuntimeError, match="INTERNAL"):
        compile_or_refuse(lowered)


def test_what_the_compiler_refuses_does_not_fit_into_any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([TooLarge("no", 2**35), TooLarge("no", None)])
    monkeypatch.setattr(programs, "compile_or_refuse", lambda lowered: next(refusals, None) or lowered.compile())
    step = ts.make_train_step(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
        lambda model, x: model(x).square().mean(),
        optax.sgd(0.1),
        mesh=ts.make_mesh(batch=1),
        plan=ts.ShardingPlan({}, default=P()),
        remat=2**40,
    )
    step.preview(torch.empty(8, 8))
    assert "remat='block' takes" in step.report()
    refusals = iter([TooLarge("no", 2**35), TooLarge("no", None), TooLarge("no", 2**34)])
    with pytest.raises(
        ValueError, match=r"'none' takes more than the device has, \d+, 'dots' takes more than the device"
    ):
        step.preview(torch.empty(16, 8))
