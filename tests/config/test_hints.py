"""Names and units that users of vLLM bring along: taken, or refused with a hint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire import ConfigError, EngineConfig, InvalidParameter, QuireError, SamplingParams, UnknownParameter
from quire.cli.main import parse_args
from quire.cli.server_options import read_server_config
from quire.config import option_sections
from quire.config.hints import OPTION_HINTS, PARSER_ALIASES, SAMPLING_HINTS, hint_for
from quire.server.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from quire.text.reasoning import REASONING_FORMATS, ReasoningModel
from quire.text.tool_calls import FORMATS, ToolModel


@pytest.mark.parametrize("name", OPTION_HINTS)
def test_a_well_known_option_is_refused_with_its_hint_unless_its_value_is_neutral(name: str) -> None:
    assert name not in option_sections()
    neutral, hint = OPTION_HINTS[name]
    for value in (None, *(["whatever"] if neutral is None else neutral)):
        assert EngineConfig.from_options(**{name: value}) == EngineConfig()
    if neutral is not None:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_options(**{name: "another"})
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name} must be ")
        assert str(caught.value).endswith(f"or absent, got 'another': {hint}" if neutral else f"'another': {hint}")


def test_one_warning_names_all_neutral_options(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.from_options(
        data_parallel_size=1, trust_remote_code=True, hf_overrides=None, load_format="auto", dtype="half"
    )
    assert config.model.dtype == "float16"
    (record,) = caplog.records
    assert record.getMessage().endswith("here: data_parallel_size, hf_overrides, load_format, trust_remote_code")
    for name, value in (("data_parallel_size", 2), ("data_parallel_size", True), ("enable_eplb", True)):
        with pytest.raises(ConfigError, match=f"{name} must be (1|False) or absent, got {value}"):
            EngineConfig.from_options(**{name: value})


def test_names_of_models_and_folders_may_be_paths() -> None:
    config = EngineConfig.from_options(
        model=Path("a/model"), tokenizer=Path("t"), prefix_cache_dir=Path("d"), record_memory=Path("log")
    )
    names = (config.model.model, config.model.tokenizer, config.cache.prefix_cache_dir, config.cache.record_memory)
    assert names == ("a/model", "t", "d", "log")
    draft = EngineConfig.from_options(speculative_config={"method": "draft_model", "model": Path("small")}).speculative
    assert (draft.speculative_method, draft.draft_model) == ("draft", "small")


@pytest.mark.parametrize("name", SAMPLING_HINTS)
def test_a_well_known_sampling_parameter_is_refused_with_its_hint(name: str) -> None:
    assert name not in [field.name for field in fields(SamplingParams)]
    given: dict[str, Any] = {name: 1}
    with pytest.raises(UnknownParameter) as caught:
        SamplingParams(**given)
    assert caught.value.field == name
    assert str(caught.value) == f"unknown sampling parameter {name!r}; {SAMPLING_HINTS[name]}"


def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown option 'block_sise'; did you mean block_size"):
        EngineConfig.from_options(block_sise=16)
    given: dict[str, Any] = {"temprature": 1.0}
    with pytest.raises(QuireError, match="unknown sampling parameter 'temprature'; did you mean temperature"):
        SamplingParams(**given)
    for name in ("xyzzy", "needs_history"):
        given = {name: True}
        with pytest.raises(UnknownParameter, match=f"{name!r}$" if name == "xyzzy" else repr(name)):
            SamplingParams(**given)


def refusal(option: str, name: Any) -> str:
    """Return the error of `LLM.chat` about the name of a parser."""
    model, more = (ToolModel, 100) if option == "tool_call_parser" else (ReasoningModel, ())
    find: Any = model.find
    with pytest.raises(InvalidParameter) as caught:
        find(name, None, more)
    assert (caught.value.field, caught.value.value) == (option, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "known", "formats"),
    [("tool_call_parser", TOOL_CALL_PARSERS, FORMATS), ("reasoning_parser", REASONING_PARSERS, REASONING_FORMATS)],
)
def test_vllms_names_of_parsers_stand_for_formats_of_the_same_texts(
    option: str, known: tuple[str, ...], formats: dict[str, object]
) -> None:
    flag, wrong = "--" + option.replace("_", "-"), dict[str, Any]({option: "minicpm5"})
    for name, ours in PARSER_ALIASES[option].items():
        assert (name in formats, ours in formats) == (False, True)
        assert getattr(read_server_config(parse_args(["serve", flag, name])), option) == ours
    with pytest.raises(
        ConfigError, match=rf"{option} must be one of auto, .*; auto finds .*, got 'minicpm5'"
    ) as caught:
        ServerConfig(**wrong)
    assert caught.value.field == option
    assert all(name in str(caught.value) for name in (*known, *PARSER_ALIASES[option]))
    assert str(caught.value) == refusal(option, "minicpm5"), "a server and LLM.chat refuse it alike"
    with pytest.raises(ConfigError, match="got 'minicpm5'"):
        read_server_config(parse_args(["serve", flag, "minicpm5"]))


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
@pytest.mark.parametrize("wrong", [None, 7, ["auto"], ""])
def test_what_is_no_name_of_a_parser_is_refused_at_each_door(option: str, wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**dict[str, Any]({option: wrong}))
    assert caught.value.field == option
    assert str(caught.value) == refusal(option, wrong)


def test_names_that_are_hardly_alike_are_no_hints() -> None:
    assert hint_for("stop", {}, ["top_p", "top_k"]) == hint_for("num_predict", {}, ["prediction"]) == ""
    assert hint_for("stopp", {}, ["stop", "top_p"]) == "; did you mean stop?"
