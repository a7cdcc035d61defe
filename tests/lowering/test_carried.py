"""Numbers of a graph as inputs: the program of two captures gives what torch gives, for a third number too."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

from torch_shard._capture import Spec
from torch_shard._lowering import Program, outline_of, split_kinds, vectors

Function = Callable[[torch.Tensor, int], torch.Tensor]

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

CARRIED: dict[str, Function] = {
    "rows": lambda x, n: x[n : n + 2].square(),
    "columns from the end": lambda x, n: x[:, -(n % 2) - 2 : 4 - (n % 2)],
    "a column": lambda x, n: x[:, -1 - n % 4],
    "narrow": lambda x, n: x.narrow(0, n, 3),
    "written rows": lambda x, n: _written(x, slice(n, n + 2), x[:2].tanh()),
    "a written column": lambda x, n: _written(x, (slice(None), n % 4), x[:, 0].tanh()),
    "on the left": lambda x, n: n - x,
    "alpha": lambda x, n: torch.add(x, x.tanh(), alpha=0.3 + n),
    "whole numbers": lambda x, n: (torch.arange(8) * n + 3 - n) % 5,
    "a quotient of whole numbers": lambda x, n: torch.arange(8) / (n + 2) + torch.arange(8) // (n + 2),
    "a comparison": lambda x, n: torch.where(torch.arange(8)[:, None] < n, x, -x),
    "a comparison of floats": lambda x, n: (x > n / 20).sum() + (x > 0) * n,
    "full": lambda x, n: torch.full((4,), n) + torch.full_like(x, n / 7),
    "a range": lambda x, n: x[torch.arange(n, n + 3) % 8],
    "a constant": lambda x, n: x * torch.tensor([n, 1, n, 2]),
    "masked": lambda x, n: x.masked_fill(x > 0, n),
}

OTHER_PROGRAMS: dict[str, Function] = {
    "a length": lambda x, n: x[:n].sum(),
    "a size": lambda x, n: torch.zeros(n),
    "an exponent": lambda x, n: x**n,
    "an operator": lambda x, n: x.tanh() if n > 2 else x.sin(),
    "an order": lambda x, n: x + torch.arange(4) * n if n > 2 else torch.arange(4) * n + x,
    "more than JAX holds": lambda x, n: torch.arange(4) * (n << 40),
    "a stride": lambda x, n: x[n % 2 :: 2] * x[:4].roll(1, n % 2),
}


def _written(x: torch.Tensor, where: Any, value: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[where] = value
    return x


def program_of(fn: Function, n: int) -> Program[None]:
    return Program(lambda x: ([fn(x, n)], None), [Spec((8, 4), torch.float32)], "a test")


@pytest.mark.parametrize("name", CARRIED)
def test_equals_torch(name: str) -> None:
    fn = CARRIED[name]
    one, two, three = (program_of(fn, n) for n in (2, 5, 4))
    outlines = [outline_of(program.graph, {}) for program in (one, two, three)]
    found = outlines[0].differences(outlines[1])
    assert found is not None
    places, literals = found
    assert places or literals
    kinds = split_kinds(outlines[0].numbers, places)
    general = one.carrying(kinds)
    for n, program, outline in zip((2, 5, 4), (one, two, three), outlines, strict=True):
        differences = outlines[0].differences(outline)
        assert differences is not None
        assert differences[0] <= places
        closure = program.graph.closure  # literals are inputs already
        inputs = [X, *closure, *vectors(outline.numbers, kinds)]
        (got,) = jax.jit(general.run)(None, *(np.asarray(t, dtype=_narrow(t)) for t in inputs))
        wanted = fn(X, n)
        # tanh and division are rounded otherwise
        np.testing.assert_allclose(np.asarray(got), wanted.numpy(), rtol=1e-5, atol=1e-6)


def _narrow(tensor: torch.Tensor) -> Any:
    return np.int32 if tensor.dtype is torch.int64 else tensor.numpy().dtype


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_other_differences_are_other_programs(name: str) -> None:
    first, second = (outline_of(program_of(OTHER_PROGRAMS[name], n).graph, {}) for n in (2, 3))
    assert first.differences(second) is None


def test_zeros_of_both_signs_differ() -> None:
    first, second = (outline_of(program_of(lambda x, n: x / (0.0 * (n or -1)), n).graph, {}) for n in (0, 1))
    found = first.differences(second)
    assert found is not None
    assert len(found[0]) == 1


def test_what_is_closed_over_is_no_number() -> None:
    closed = [torch.tensor(2.0), torch.tensor(3.0)]
    first, second = (outline_of(program_of(lambda x, n, c=c: x * c, 0).graph, {}) for c in closed)
    assert first.differences(second) is None
    assert first.differences(first) == (set(), set())
