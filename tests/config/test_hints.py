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
    with pytest.raises(UnknownParameter) as caught:
        SamplingParams(**{name: 1})
    assert caught.value.field == name
    assert str(caught.value) == f"unknown sampling parameter {name!r}; {SAMPLING_HINTS[name]}"


def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown option 'block_sise'; did you mean block_size"):
        EngineConfig.from_options(block_sise=16)
    given: dict[str, Any] = {"temprature": 1.0}
    with pytest.raises(QuireError, match="unknown sampling parameter 'temprature'; did you mean temperature"):
        SamplingParams(**given)
    with pytest.raises(UnknownParameter, match=r"'xyzzy'$"):
        SamplingParams(xyzzy=1)
    with pytest.raises(UnknownParameter, match="'needs_history'"):
        SamplingParams(needs_history=True)


@pytest.mark.parametrize("number", [1, 4, 16, 4095])
def test_a_swap_space_in_gib_is_refused_with_the_unit(number: int) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(swap_space=number)
    assert caught.value.field == "swap_space"
    assert f"swap_space={number} is {number} bytes" in str(caught.value)
    assert f'write swap_space="{number}GiB"' in str(caught.value)
    assert EngineConfig.from_options(swap_space=f"{number}GiB").cache.swap_space == number << 30


@pytest.mark.parametrize(
    "name",
    ["swap_space", "kv_cache_memory_bytes", "prefix_cache_disk_bytes", "grammar_memory_bytes", "suffix_cache_bytes"],
)
def test_every_number_of_bytes_is_also_read_from_a_text(name: str) -> None:
    options = {"speculative_method": "suffix"} if name == "suffix_cache_bytes" else {}
    for text, size in (("4G", 4 * 10**9), ("1.5 GiB", 3 << 29), ("67108865", 67108865)):
        config = EngineConfig.from_options(**{name: text}, **options)
        assert getattr(getattr(config, option_sections()[name]), name) == size
    for text in ("", "4X", "GiB", "-1G", "9" * 400 + ".0G"):
        with pytest.raises(ConfigError, match=f"{name}: .* is not a size") as caught:
            EngineConfig.from_options(**{name: text}, **options)
        assert caught.value.field == name
    with pytest.raises(ConfigError, match=f'{name} must be whole bytes, or a text such as "4GiB", got 4.5'):
        EngineConfig.from_options(**{name: 4.5}, **options)


def test_every_option_in_bytes_is_tried_above() -> None:
    (mark,) = test_every_number_of_bytes_is_also_read_from_a_text.pytestmark  # type: ignore[attr-defined]
    named = {name for name in option_sections() if name.endswith("_bytes")}
    assert named | {"swap_space"} == set(mark.args[1])
