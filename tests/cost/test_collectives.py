"""Which devices talk to each other, in all ways in which HLO writes it."""

import pytest

from torch_shard._cost.hlo import axes_of_group

BOTH = ("batch", "model")
GROUPS = {
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": ("model",),
    "replica_groups={{0,2,4,6},{1,3,5,7}}": ("batch",),
    "replica_groups={{0,1,2,3,4,5,6,7}}": BOTH,
    "replica_groups={}": BOTH,
    "": BOTH,
    "replica_groups=[4,2]<=[8]": ("model",),
    "replica_groups=[2,4]<=[4,2]T(1,0)": ("batch",),
    "replica_groups=[1,8]<=[8]": BOTH,
    "source_target_pairs={{0,1},{2,3},{4,5},{6,7}}": ("model",),
    "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}": ("batch",),
    "source_target_pairs={{0,0},{1,2},{2,4},{3,6},{4,1},{5,3},{6,5},{7,7}}": BOTH,
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}": ("model",),
    "replica_groups=mesh['axis_0'=4,'axis_1'=2,'axis_2'=1] {'axis_0','axis_2'}": ("batch",),
    "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}": ("model",),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}": ("batch",),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(4)2}": ("model",),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}": BOTH,
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_axes_of_a_group_are_those_along_which_its_devices_differ(group: str) -> None:
    assert axes_of_group(group, {"batch": 4, "model": 2}) == GROUPS[group]


def test_axes_of_one_device_have_no_communication() -> None:
    assert axes_of_group("", {"batch": 4, "model": 1}) == ("batch",)
