"""Bytes and products that a program counts, where these are not read off its instructions one by one."""

import jax
import jax.numpy as jnp

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


def test_all_branches_of_a_switch_count():
    branches = [lambda x: x, lambda x: x + 1, lambda x: x @ x]
    lowered = jax.jit(lambda at, x: jax.lax.switch(at, branches, x)).lower(1, jnp.ones((64, 64)))
    assert sum(cost.flops for cost in costs_of(lowered.compile().as_text() or "")) == 2 * 64**3
