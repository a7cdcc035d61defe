"""The page of the documentation is what the models of the installed transformers come to."""

import pytest
import transformers

import torch_shard as ts
from tests.plans.test_to_hf import MESH, assert_comes_back
from validation.hf_families.report import PAGE, all_outcomes, build, configurations, outcome, page


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


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_plans_of_all_families_come_back() -> None:
    """Of those that this release of transformers can make."""
    for family, config in configurations().items():
        try:
            model = build(config)
        except LookupError:  # as the page says of them
            continue
        unsaid = assert_comes_back(ts.plans.from_hf(model, MESH, fsdp=None), model)
        assert not unsaid or family == "embedding_gemma2", family  # its last layer has one head, which is not split
