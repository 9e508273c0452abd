"""Model parts that are not bit-reproducible are refused with `deterministic`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.models.loading.loading import hindrances
from quire.models.specs.spec import Attention, Experts, GatedMLP, LayerSpec, RMSNorm, ShortConv

ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=64, rope=None, window=20)
LAYER = LayerSpec(norm=RMSNorm(1e-5), mixer=ATTENTION, ffn=GatedMLP(96), post_norm=RMSNorm(1e-5))
EXPERTS = Experts(num_experts=4, num_chosen=2, width=32)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"ffn": EXPERTS}, None),
        ({"ffn": replace(EXPERTS, scoring="sigmoid")}, "sigmoid"),
        ({"mixer": replace(ATTENTION, output_gate=True)}, "gates"),
        ({"mixer": replace(ATTENTION, head_dim=288)}, "heads of 288"),
        ({"mixer": replace(ATTENTION, head_dim=33)}, "heads of 33"),
        ({"mixer": ShortConv(64, 3, False)}, "recurrent"),
        ({"mixer_scale": 0.5}, "scaled"),
        ({"ffn_scale": 0.5}, "scaled"),
    ],
)
def test_parts_of_a_layer(changed: dict[str, Any], words: str | None) -> None:
    found = hindrances(replace(LAYER, **changed))
    assert found == [] if words is None else words in found[0]
