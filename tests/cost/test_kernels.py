"""What kernels written in Pallas are taken to need."""

import pytest

from torch_shard._cost import costs_of
from torch_shard._cost.chips import CHIPS, REACHED

ROWS, HEADS, TIME, WIDTH = 2, 8, 1024, 128
HALF = ROWS * HEADS * TIME * TIME // 2 * WIDTH  # pairs of a query and a key before it, times the width of a head

Q = f"bf16[{ROWS},{HEADS},{TIME},{WIDTH}]{{3,2,1,0}}"
K = f"bf16[{ROWS},2,{TIME},{WIDTH}]{{3,2,1,0}}"


def program(name: str, results: str = Q, given: str = f"s8[1,4,4]{{2,1,0}}, {Q}, {K}", about: str = "{}") -> str:
    kernel = f'%{name}.1 = ({results}) custom-call(%a), custom_call_target="tpu_custom_call"'
    constraints = f"operand_layout_constraints={{{given}}}, metadata={{}}"
    return f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  {kernel}, {constraints}, backend_config={about}\n}}\n"


@pytest.mark.parametrize(
    ("name", "results", "products"),
    [
        ("splash_mha_fwd_residuals", Q, 2),
        ("splash_mha_dq_no_residuals", Q, 3),
        ("splash_mha_dkv_no_residuals", f"f32[2,256,128]{{2,1,0}}, {K}, {K}", 4),  # beside its scratch
        ("splash_mha_dkv_no_residuals", f"{Q}, {K}, {K}", 5),  # all gradients at once
        ("flash_attention", Q, 2),
        ("flash_mha_bwd_dkv_block_q_major_512", f"{K}, {K}", 4),
        ("flash_mha_bwd_dq_block_q_major_512", Q, 3),
    ],
)
def test_attention_is_counted_as_causal(name: str, results: str, products: int) -> None:
    (cost,) = costs_of(program(name, results), CHIPS["TPU v5 lite"])
    assert cost.flops == 2 * products * HALF
    assert cost.cycles == pytest.approx(1.5e9 * cost.flops / (REACHED * 197e12), rel=1e-3)
    assert costs_of(program(name, results))[0].cycles is None  # of an unknown chip


def test_heads_that_are_narrower_than_the_matrix_unit_leave_it_idle() -> None:
    text = program("splash_mha_fwd_residuals")
    wide, narrow = (costs_of(text, CHIPS[name])[0].cycles or 0 for name in ("TPU v5", "TPU v6 lite"))
    assert narrow / wide == pytest.approx(2 * 459 / 918, rel=1e-3)


def test_other_kernels_take_what_their_authors_say_and_at_least_what_they_move() -> None:
    said = program("gmm", about='{"custom_call_config":{"cost_estimate":{"flops":"1000000000000"}}}')
    chip = CHIPS["TPU v5 lite"]
    assert costs_of(said, chip)[0].cycles == pytest.approx(1.5e9 * 1e12 / (REACHED * chip.flops), rel=1e-3)
    num_bytes = 2 * ROWS * HEADS * TIME * WIDTH
    assert costs_of(program("mine"), chip)[0].cycles == pytest.approx(1.5e9 * num_bytes / chip.bandwidth, rel=1e-2)
