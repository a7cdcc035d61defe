"""The page of the documentation is what the models of the installed transformers come to."""

import pytest
import transformers

from tests.oracles.eager import assert_follows, eager_trajectory
from tests.system.test_hf_usage import lora, of_llama
from validation.hf_families.report import PAGE, all_outcomes, configurations, outcome, page


def test_every_family_resolves_as_the_page_says() -> None:
    if f"transformers {transformers.__version__} " not in PAGE.read_text():
        pytest.skip("the page is of another version")
    assert page(all_outcomes()) == PAGE.read_text()


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("family", ["longcat_flash", "inkling", "mimo_v2_flash", "aria"])  # their styles are rare
def test_families_with_rare_styles_resolve(family: str) -> None:
    found = outcome(family, configurations([family])[family])
    assert not found.error
    assert f"| {family} | {found.model} | " in PAGE.read_text()


def test_adapters_with_magnitudes_equal_eager_torch() -> None:
    """DoRA of peft; `tests/system/test_hf_usage.py` has LoRA."""
    case = of_llama("lora_with_magnitudes", lambda: lora(use_dora=True), {})
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
