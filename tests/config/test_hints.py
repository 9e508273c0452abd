"""Names and units that users of vLLM bring along: taken, or refused with a hint."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from quire import ConfigError, EngineConfig, QuireError, SamplingParams, UnknownParameter
from quire.config import option_sections
from quire.config.hints import OPTION_HINTS, SAMPLING_HINTS


@pytest.mark.parametrize("name", OPTION_HINTS)
def test_a_well_known_option_is_refused_with_its_hint(name: str) -> None:
    assert name not in option_sections()
    with pytest.raises(ConfigError, match="unknown option") as caught:
        EngineConfig.from_options(**{name: True})
    assert caught.value.field == name
    assert f"{name!r}; {OPTION_HINTS[name]}; known options are block_size" in str(caught.value)


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
