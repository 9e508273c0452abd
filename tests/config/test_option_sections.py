"""The options of an engine as a flat mapping, and in their sections again."""

from __future__ import annotations

import dataclasses

from quire.config import EngineConfig, option_sections


def test_options_go_round() -> None:
    config = EngineConfig.from_options(seed=5, watermark=0.25, scheduling_policy="priority")
    parts = [getattr(config, section.name) for section in dataclasses.fields(config)]
    flat = {name: value for part in parts for name, value in dataclasses.asdict(part).items()}
    assert flat.keys() == option_sections().keys()
    assert EngineConfig.from_options(**flat) == config
