"""Fields of a `GenerationConfig`: each is followed, refused or without effect."""

import pytest
import transformers as hf

from torch_shard._generate.generate import FOLLOWED, NEUTRAL, WITHOUT_EFFECT, check_settings


def test_every_field_of_transformers_is_known() -> None:
    fields = {name for name in vars(hf.GenerationConfig()) if not name.startswith("_")}
    assert fields <= FOLLOWED | WITHOUT_EFFECT | NEUTRAL.keys()
    check_settings(hf.GenerationConfig())


def test_a_field_that_changes_tokens_is_refused_by_name_also_an_unknown_one() -> None:
    config = hf.GenerationConfig(min_p=0.1)
    config.of_tomorrow = 3
    with pytest.raises(NotImplementedError, match=r"has min_p=0\.1, of_tomorrow=3, which only model\.generate has"):
        check_settings(config)
