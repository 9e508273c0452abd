"""Options of speculative decoding that depend on each other, and vLLM's spelling of them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.speculative import METHODS, METHODS_OF
from quire.errors import ConfigError

SMALL: dict[str, Any] = {
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 5,
    "suffix_cache_bytes": 1 << 20,
    "draft_model": "folder",
}


@pytest.mark.parametrize("name", METHODS_OF)
@pytest.mark.parametrize("method", METHODS)
def test_an_option_is_taken_only_where_it_means_something(name: str, method: str) -> None:
    options = {"speculative_method": method, name: SMALL[name]}
    if method == "draft":
        options["draft_model"] = "folder"
    if method in METHODS_OF[name]:
        assert getattr(EngineConfig.from_options(**options).speculative, name) == SMALL[name]
        return
    with pytest.raises(ConfigError, match=f"{name} .* needs speculative_method .* got {method!r}") as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field == name


def test_a_draft_model_is_needed_where_one_is_to_guess() -> None:
    with pytest.raises(ConfigError, match="must be a model with the same vocabulary") as caught:
        EngineConfig.from_options(speculative_method="draft")
    assert caught.value.field == "draft_model"


def test_the_longest_match_is_no_shorter_than_the_shortest() -> None:
    options = {"speculative_method": "ngram", "prompt_lookup_min": 4}
    with pytest.raises(
        ConfigError, match=r"prompt_lookup_max \(3\) must be at least prompt_lookup_min \(4\)"
    ) as caught:
        EngineConfig.from_options(**options, prompt_lookup_max=3)
    assert caught.value.field == "prompt_lookup_max"
    assert EngineConfig.from_options(**options, prompt_lookup_max=4).speculative.lookup_max == 4
    assert EngineConfig.from_options(**{**options, "prompt_lookup_min": 20}).speculative.lookup_max == 20


def test_nobody_guesses_unless_asked_to() -> None:
    assert EngineConfig().speculative.num_tokens == 0
    assert EngineConfig.from_options(speculative_method="ngram").speculative.num_tokens == 8


def test_a_mapping_as_vllm_takes_it_says_the_same() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert EngineConfig.from_options(speculative_config=given) == EngineConfig.from_options(
        speculative_method="ngram", num_speculative_tokens=5, prompt_lookup_max=4
    )
    drafted = EngineConfig.from_options(speculative_config={"model": "folder"}).speculative
    assert (drafted.speculative_method, drafted.draft_model) == ("draft", "folder")
    assert EngineConfig.from_options(speculative_config=None) == EngineConfig()


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"speculative_config": "ngram"}, "speculative_config", "a mapping or None, got 'ngram'"),
        (
            {"speculative_config": {"metod": "ngram"}},
            "speculative_config",
            "unknown key 'metod'.* known keys are method, model",
        ),
        ({"speculative_config": {"dtype": "float32"}}, "speculative_config", "unknown key 'dtype'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_branches": 3}},
            "num_speculative_branches",
            "must be 1 or absent, got 3: alternative drafts were removed, .*; leave it out, and set num_spec",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "speculative_method": "off"},
            "speculative_method",
            "given twice",
        ),
    ],
)
def test_a_mapping_that_says_nothing_sensible_is_refused(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field == field
