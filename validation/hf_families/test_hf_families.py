"""The section of the page and its table are what the models of the installed transformers come to."""

import pytest
import transformers

from docs.pages import section_of
from tests.oracles.eager import assert_follows, eager_trajectory
from tests.system.test_hf_usage import lora, of_llama
from validation.hf_families.report import PAGE, all_outcomes, configurations, outcome, page

TABLE = PAGE.parent / "tables" / "hf_plans.csv"


def test_every_family_resolves_as_the_page_says() -> None:
    section, rows = section_of(PAGE, "hf_plans"), TABLE.read_text()
    if f"transformers {transformers.__version__} " not in section:
        pytest.skip("the page is of another version")
    assert page(all_outcomes()).strip() == section  # and it writes the table
    assert TABLE.read_text() == rows


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("family", ["longcat_flash", "inkling", "mimo_v2_flash", "aria"])  # their styles are rare
def test_families_with_rare_styles_resolve(family: str) -> None:
    found = outcome(family, configurations([family])[family])
    assert not found.error
    assert f"\n{family},{found.model}," in TABLE.read_text()


def test_adapters_with_magnitudes_equal_eager_torch() -> None:
    """DoRA of peft; `tests/system/test_hf_usage.py` has LoRA."""
    case = of_llama("lora_with_magnitudes", lambda: lora(use_dora=True), {})
    assert_follows(case, case.model(), eager_trajectory(case, num_steps=2), (4, 2))
