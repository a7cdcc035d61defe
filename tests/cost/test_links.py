"""By how many links of a torus a group of chips receives."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torch_shard._cost.chips import Links


def links(kind: str, *sizes: int) -> tuple[Links, np.ndarray]:
    """Of a torus of these sizes, with the numbers of its chips by their places."""
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    return Links([SimpleNamespace(device_kind=kind, coords=place) for place in np.ndindex(*sizes)]), numbers


@pytest.mark.parametrize(
    ("kind", "sizes", "group", "num_links"),
    [
        ("TPU v6 lite", (2, 2), np.s_[:, :], 2),  # one along each axis
        ("TPU v6 lite", (2, 2), np.s_[:, 0], 1),
        ("TPU v5 lite", (4, 4), np.s_[0], 1),  # it ends
        ("TPU v5 lite", (16, 16), np.s_[0], 2),  # a ring
        ("TPU v5 lite", (16, 16), np.s_[:, :], 4),
        ("TPU v5 lite", (16, 16), np.s_[0, :4], 1),
        ("TPU v5 lite", (16, 16), np.s_[0, ::4], 0.5),  # a ring, of which three other groups use each link
        ("TPU v5", (4, 4, 4), np.s_[0, 0], 2),
        ("TPU v5", (4, 4, 4), np.s_[:, :, 0], 4),
        ("TPU v5", (2, 2, 1), np.s_[:, :, 0], 2),
    ],
)
def test_a_group_receives_by_its_links(kind: str, sizes: tuple[int, ...], group: Any, num_links: float) -> None:
    torus, numbers = links(kind, *sizes)
    members = numbers[group].ravel().tolist()
    assert torus.rate([members]) == pytest.approx(num_links * torus.chip.link / 2)


def test_a_shift_takes_one_link_and_shares_it_with_those_between() -> None:
    torus, numbers = links("TPU v5", 4, 8, 4)
    for step, share in ((1, 1), (2, 2)):
        row = numbers[0, ::step, 0].tolist()
        assert torus.rate_of_pairs(list(zip(row, row[1:] + row[:1], strict=True))) == torus.chip.link / 2 / share


def test_where_chips_lie_may_not_be_known() -> None:
    one = Links([SimpleNamespace(device_kind="TPU v4")])
    assert one.rate([[0, 1]]) == one.chip.link
    assert one.rate_of_pairs([[0, 1]]) == one.chip.link / 2
