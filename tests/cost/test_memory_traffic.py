"""Bytes that instructions move, where these are not those of their operands and results."""

from torch_shard._cost.total import costs_of

PROGRAM = """
ENTRY %main (to: bf16[1024,128], part: bf16[8,128], at: s32[]) -> bf16[1024,128] {
  %to = bf16[1024,128]{1,0} parameter(0)
  %part = bf16[8,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %new = bf16[1024,128]{1,0} dynamic-update-slice(%to, %part, %at, %at)
}
"""


def test_an_update_in_place_moves_what_is_updated():
    assert sum(cost.memory_bytes for cost in costs_of(PROGRAM)) == 2 * 8 * 128 * 2
