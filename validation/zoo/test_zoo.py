"""Models and losses of other packages, none of them written for this one: right to the last gradient, or refused."""

import contextlib

import jax
import pytest

from tests.oracles.eager import assert_follows, eager_trajectory
from validation.zoo.report import MESHES, STEPS
from validation.zoo.rows import Row
from validation.zoo.table import ZOO


@pytest.mark.filterwarnings("ignore")  # the packages' own
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("row", ZOO, ids=str)
def test_three_steps_equal_eager_torch_or_are_refused(row: Row, sizes: tuple[int, int]) -> None:
    if row.missing:
        pytest.skip(row.missing)
    row = row.split()
    trajectory = eager_trajectory(row, STEPS)
    refused = pytest.raises(NotImplementedError, match=row.refused) if row.refused else contextlib.nullcontext()
    with jax.enable_x64(row.wide), refused:
        assert_follows(row, row.model(), trajectory, sizes)


def test_every_package_has_an_installed_name_and_rows_have_names_of_their_own() -> None:
    from validation.zoo.rows import PACKAGES

    assert {row.package for row in ZOO} == set(PACKAGES)
    assert len({str(row) for row in ZOO}) == len(ZOO) >= 40
    assert len({row.package for row in ZOO}) >= 10
