"""Numbers of a graph as inputs: the program of two captures gives what torch gives, for a third number too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_shard._capture import Spec
from torch_shard._lowering import Program, outline_of, split_kinds, vectors

Function = Callable[[torch.Tensor, int], torch.Tensor]

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

# Others are in tests/loss/test_answers.py.
CARRIED: dict[str, Function] = {
    "columns from the end": lambda x, n: x[:, -(n % 2) - 2 : 4 - (n % 2)],
    "narrow": lambda x, n: x.narrow(0, n, 3),
    "whole numbers": lambda x, n: (torch.arange(8) * n + 3 - n) % 5,
    "a quotient of whole numbers": lambda x, n: torch.arange(8) / (n + 2) + torch.arange(8) // (n + 2),
    "a comparison of floats": lambda x, n: (x > n / 20).sum() + (x > 0) * n,
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


def program_of(n: int, *functions: Function) -> Program[None]:
    return Program(lambda x: ([fn(x, n) for fn in functions], None), [Spec((8, 4), torch.float32)], "a test")


def test_equals_torch() -> None:
    programs = {n: program_of(n, *CARRIED.values()) for n in (2, 5, 4)}
    outlines = {n: outline_of(program.graph, {}) for n, program in programs.items()}
    places, _ = outlines[2].differences(outlines[5])
    kinds = split_kinds(outlines[2].numbers, places)
    general = jax.jit(programs[2].carrying(kinds).run)
    for n, outline in outlines.items():
        assert outlines[2].differences(outline)[0] <= places
        given = [X, *programs[n].graph.closure, *vectors(outline.numbers, kinds)]  # literals are inputs already
        found = general(None, *(jnp.asarray(x.numpy()) for x in given))
        for (name, fn), value in zip(CARRIED.items(), found, strict=True):
            # tanh and division are rounded otherwise
            np.testing.assert_allclose(value, fn(X, n), rtol=1e-5, atol=1e-6, err_msg=f"{name}, {n}")


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_other_differences_are_other_programs(name: str) -> None:
    first, second = (outline_of(program_of(n, OTHER_PROGRAMS[name]).graph, {}) for n in (2, 3))
    assert first.differences(second) is None


def test_zeros_of_both_signs_differ() -> None:
    first, second = (outline_of(program_of(n, lambda x, n: x / (0.0 * (n or -1))).graph, {}) for n in (0, 1))
    found = first.differences(second)
    assert found is not None
    assert len(found[0]) == 1


def test_what_is_closed_over_is_no_number() -> None:
    closed = [torch.tensor(2.0), torch.tensor(3.0)]
    first, second = (outline_of(program_of(0, lambda x, n, c=c: x * c).graph, {}) for c in closed)
    assert first.differences(second) is None
    assert first.differences(first) == (set(), set())
