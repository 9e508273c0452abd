"""Configurations with wrong values, of every causal model of transformers: read, or refused with a typed error.

As the families read them and as transformers' modules are examined; in a bounded time, and without large tensors.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.forked import Attempt, attempts_of
from tests.hosted.small_configs import MODEL_TYPES, small_config
from tests.hostile.checkpoints import MORE_FIELDS, VALUES

pytestmark = pytest.mark.slow

# transformers refuses its own default configuration of one.
TYPES = sorted(MODEL_TYPES.keys() - {"dots3_note"})
NUM_PARTS = 7
SEEDS = [pytest.param(range(1), id="one"), pytest.param(range(1, 5), id="more", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with attempts_of("tests.hostile.config_attempts") as attempt:
        yield attempt


def mutated(good: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a configuration of which one or two fields have other values, perhaps in its part for text."""
    config = json.loads(json.dumps(good))
    for _ in range(rng.randint(1, 2)):
        inner = config.get("text_config")
        part = inner if isinstance(inner, dict) and rng.random() < 0.7 else config
        part[rng.choice([*part, *MORE_FIELDS])] = rng.choice(VALUES)
    return dict(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("seeds", SEEDS)
def test_wrong_values_are_typed_errors(attempt: Attempt, part: int, seeds: range) -> None:
    happened: list[str] = []
    for model_type in TYPES[part::NUM_PARTS]:
        good = json.loads(small_config(model_type).to_json_string()) | {"architectures": [MODEL_TYPES[model_type]]}
        for seed in seeds:
            outcome = attempt(json.dumps(mutated(good, random.Random(f"{model_type} {seed}"))))
            assert outcome["said"].startswith("["), f"{model_type} {seed}: {outcome['said']}"
            happened += json.loads(outcome["said"])
    assert 0 < happened.count("read") < len(happened)
